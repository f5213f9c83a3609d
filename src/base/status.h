// How every layer reports failure: a code for programs and a sentence for people.
//
// No exception crosses a thread or the C ABI. The sentence names the thing that failed (rank, host,
// tensor, setting) and what to do about it.
#pragma once

#include <cassert>
#include <string>
#include <utility>
#include <variant>

namespace paceline {

/// The values are part of the C ABI (comm.h).
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 1,    ///< the caller's input or a setting is wrong
  kMismatch = 2,           ///< ranks disagree: shape, dtype, operation, version, settings
  kTimeout = 3,            ///< a deadline passed
  kPeerLost = 4,           ///< a rank died or cannot be reached any more
  kAborted = 5,            ///< another failure ended the job; the sentence carries its cause
  kUnauthenticated = 6,    ///< a connection without the job's secret
  kUnavailable = 7,        ///< something this machine does not offer
  kResourceExhausted = 8,  ///< memory, descriptors, disk
  kUnsupported = 9,        ///< a combination that is not built
  kCorrupted = 10,         ///< bytes failed their check
  kInternal = 11,          ///< a defect in this library
};

const char* code_name(Code code);

/// Cheap when ok (one pointer-sized enum and an empty string). Copyable, comparable by code.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status ok() { return {}; }
  [[nodiscard]] bool is_ok() const { return code_ == Code::kOk; }
  explicit operator bool() const { return is_ok(); }
  [[nodiscard]] Code code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }
  /// "peer lost: rank 3 (host b) ..." or "ok".
  [[nodiscard]] std::string to_string() const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

/// A value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}        // NOLINT: conversion is the point
  Result(Status status) : state_(std::move(status)) {  // NOLINT
    assert(!std::get<Status>(state_).is_ok());
  }
  [[nodiscard]] bool is_ok() const { return std::holds_alternative<T>(state_); }
  explicit operator bool() const { return is_ok(); }
  [[nodiscard]] Status status() const { return is_ok() ? Status::ok() : std::get<Status>(state_); }
  T& value() & {
    assert(is_ok());
    return std::get<T>(state_);
  }
  const T& value() const& {
    assert(is_ok());
    return std::get<T>(state_);
  }
  T&& value() && {
    assert(is_ok());
    return std::get<T>(std::move(state_));
  }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }

 private:
  std::variant<T, Status> state_;
};

#define PACELINE_CONCAT_INNER(a, b) a##b
#define PACELINE_CONCAT(a, b) PACELINE_CONCAT_INNER(a, b)
/// Leaves the enclosing function with the Status when it is not ok.
#define PACELINE_RETURN_IF_ERROR(expr)                                                   \
  do {                                                                                   \
    if (auto paceline_status = (expr); !paceline_status.is_ok()) return paceline_status; \
  } while (0)
/// `PACELINE_ASSIGN(auto x, make_x());` leaves the function when make_x() failed.
#define PACELINE_ASSIGN(lhs, expr) \
  PACELINE_ASSIGN_IMPL(PACELINE_CONCAT(paceline_result_, __LINE__), lhs, expr)
#define PACELINE_ASSIGN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                         \
  if (!tmp.is_ok()) return tmp.status();     \
  lhs = std::move(tmp).value()

}  // namespace paceline
