#include "base/workers.h"

#include <algorithm>
#include <system_error>

#include "base/scheduling.h"

namespace paceline {

Workers::~Workers() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
  }
  for (auto& helper : helpers_) helper.join();
}

// Fewer helpers than asked for, where the system has no more threads to give: the caller does the rest.
void Workers::start_helpers(int wanted) {
  try {
    while (static_cast<int>(helpers_.size()) < wanted) helpers_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {
    return;
  }
}

void Workers::run_all(int parts, Call call) {
  const int wanted = std::min(threads_, parts);
  int most = used_.load(std::memory_order_relaxed);
  while (most < wanted && !used_.compare_exchange_weak(most, wanted, std::memory_order_relaxed)) {
  }
  if (threads_ <= 1 || parts <= 1) {
    for (int part = 0; part < parts; ++part) call.call(call.task, part);
    return;
  }
  std::lock_guard mine(turn_);
  std::unique_lock lock(mutex_);
  start_helpers(wanted - 1);
  call_ = call;
  next_ = 0;
  parts_ = left_ = parts;
  wake_.notify_all();
  take_parts(lock);
  ended_.wait(lock, [this] { return left_ == 0; });
}

void Workers::take_parts(std::unique_lock<std::mutex>& lock) {
  while (next_ < parts_) {
    const int part = next_++;
    const Call call = call_;
    lock.unlock();
    call.call(call.task, part);
    lock.lock();
    if (--left_ == 0) ended_.notify_all();
  }
}

void Workers::help() {
  // They do what the network's thread would do by itself, and the link waits for it.
  become_network_thread("paceline-codec");
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || next_ < parts_; });
    if (stopping_) return;
    take_parts(lock);
  }
}

}  // namespace paceline
