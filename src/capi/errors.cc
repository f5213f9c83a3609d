#include <pthread.h>

#include <algorithm>
#include <map>

#include "capi/handle.h"

namespace paceline::capi {
namespace {

/// What this thread was told: last, and last of each handle. Handles are keys alone here, never looked into: they may be
/// another process's, after a fork.
struct Told {
  std::string last;
  std::map<const paceline_comm*, std::string> of_handle;  ///< only failures
};
thread_local Told told;
std::atomic<uint64_t> forks{0};

// Runs in the child, where only the forking thread lives on.
void count_fork() { forks.fetch_add(1, std::memory_order_relaxed); }
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, count_fork);

}  // namespace

paceline_code report(const paceline_comm* comm, const Status& status) {
  if (status.is_ok()) {
    told.last.clear();
    forget_errors(comm);
  } else {
    told.last = status.message();
    if (comm != nullptr) told.of_handle[comm] = status.message();
  }
  return static_cast<paceline_code>(status.code());
}

void forget_errors(const paceline_comm* comm) {
  if (!told.of_handle.empty()) told.of_handle.erase(comm);
}

const char* last_error(const paceline_comm* comm) {
  if (comm == nullptr) return told.last.c_str();
  const auto found = told.of_handle.find(comm);
  return found == told.of_handle.end() ? "" : found->second.c_str();
}

paceline_code invalid(const paceline_comm* comm, const std::string& what) {
  return report(comm, {Code::kInvalidArgument, what});
}

uint64_t fork_generation() { return forks.load(std::memory_order_relaxed); }

Status usable(const paceline_comm* comm) {
  if (comm == nullptr) return {Code::kInvalidArgument, "the communicator is null"};
  if (comm->fork_generation != fork_generation()) {
    return {
        Code::kUnsupported,
        "this communicator belongs to the parent of this process; create a new one after fork()"};
  }
  return Status::ok();
}

size_t copy_text(const std::string& text, char* to, size_t capacity) {
  if (to != nullptr && capacity > 0) {
    auto n = std::min(text.size(), capacity - 1);
    std::memcpy(to, text.data(), n);
    to[n] = '\0';
  }
  return text.size();
}

}  // namespace paceline::capi

extern "C" {

const char* paceline_error(const paceline_comm* comm) { return paceline::capi::last_error(comm); }

size_t paceline_op_error(paceline_comm* comm, paceline_op op, char* text, size_t capacity) {
  if (!paceline::capi::usable(comm)) return paceline::capi::copy_text("", text, capacity);
  return paceline::capi::copy_text(comm->runner->error_of(op), text, capacity);
}
}
