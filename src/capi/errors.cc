#include <pthread.h>

#include <algorithm>

#include "capi/handle.h"

namespace paceline::capi {
namespace {

thread_local std::string error_of_thread;
std::atomic<uint64_t> forks{0};

// Runs in the child, where only the forking thread lives on.
void count_fork() { forks.fetch_add(1, std::memory_order_relaxed); }
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, count_fork);

}  // namespace

paceline_code report(const Status& status) {
  if (status.is_ok()) {
    error_of_thread.clear();
  } else {
    error_of_thread = status.message();
  }
  return static_cast<paceline_code>(status.code());
}

const char* last_error() { return error_of_thread.c_str(); }

paceline_code invalid(const std::string& what) { return report({Code::kInvalidArgument, what}); }

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

const char* paceline_error(const paceline_comm*) { return paceline::capi::last_error(); }

size_t paceline_op_error(paceline_comm* comm, paceline_op op, char* text, size_t capacity) {
  if (!paceline::capi::usable(comm)) return paceline::capi::copy_text("", text, capacity);
  return paceline::capi::copy_text(comm->runner->error_of(op), text, capacity);
}
}
