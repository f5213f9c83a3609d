#include "gpu/launcher.h"

#include <chrono>

#include "base/clock.h"
#include "base/scheduling.h"
#include "gpu/flags.h"
#include "gpu/rest.h"

namespace paceline::gpu {
namespace {

constexpr Time kNap = 10 * kMicrosecond;
constexpr Time kLongerNap = 30 * kMicrosecond;

}  // namespace

Launcher::Launcher(Options options) : options_(std::move(options)) {
  thread_ = std::thread([this] { work(); });
}

void Launcher::push(uint64_t sequence, std::function<Status()> steps, std::vector<Early> early) {
  const std::lock_guard lock(mutex_);
  steps_.emplace_back(sequence, std::move(steps));
  std::move(early.begin(), early.end(), std::back_inserter(early_));
  early_left_ += early.size();
  turn_.notify_one();
}

/// The first of what is early, and nothing else meanwhile: it may have to wait.
Status Launcher::run_first(std::unique_lock<std::mutex>& lock) {
  const auto next = std::move(early_.front());
  early_.pop_front();
  --early_left_;
  lock.unlock();
  early_runs_ = true;
  auto status = next.step();
  early_runs_ = false;
  return status;
}

/// False: nothing is ready.
Result<bool> Launcher::run_ready() {
  if (early_left_ == 0 || early_runs_) return false;
  std::unique_lock lock(mutex_);
  if (!early_.front().ready()) return false;
  PACELINE_RETURN_IF_ERROR(run_first(lock));
  return true;
}

/// All that may wait on its stream by now.
Status Launcher::run_ahead() {
  while (early_left_ > 0 && !early_runs_) {
    std::unique_lock lock(mutex_);
    const auto& first = early_.front();
    if (first.sequence > ahead_through_ || first.after > launched_ || !first.may_wait()) break;
    PACELINE_RETURN_IF_ERROR(run_first(lock));
  }
  return Status::ok();
}

Status Launcher::run_early(uint64_t sequence) {
  for (;;) {
    std::unique_lock lock(mutex_);
    if (early_.empty() || early_.front().sequence > sequence) return Status::ok();
    PACELINE_RETURN_IF_ERROR(run_first(lock));
  }
}

Result<bool> Launcher::wait_for(const uint32_t* flag, uint32_t value) {
  const auto now = [] { return SteadyClock().now(); };
  const Time since = now();
  while (!reached(Flags::load(flag), value)) {
    if (halted_.load(std::memory_order_acquire))
      return Status(Code::kAborted, "the path for CUDA tensors has ended");
    if (ahead_through_.load(std::memory_order_acquire) >= current_) {
      PACELINE_RETURN_IF_ERROR(run_ahead());
      return false;
    }
    PACELINE_ASSIGN(const bool ran, run_ready());
    if (ran) continue;
    if (const Time nap = nap_after(now() - since, kNap, kLongerNap); nap > 0) take_nap(nap);
  }
  return true;
}

void Launcher::wait_until(const uint32_t* flag, uint32_t value) const {
  while (!reached(Flags::load(flag), value) && !halted_.load(std::memory_order_acquire))
    take_nap(kLongerNap);
}

void Launcher::catch_up(uint64_t sequence) {
  uint64_t before = ahead_through_.load();
  while (before < sequence && !ahead_through_.compare_exchange_weak(before, sequence)) {
  }
  wait_launched(sequence);
}

void Launcher::wait_launched(uint64_t sequence) {
  if (launched() >= sequence) return;
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return halted_ || stopping_ || launched() >= sequence; });
}

void Launcher::halt(double seconds) {
  std::unique_lock lock(mutex_);
  halted_.store(true, std::memory_order_release);
  turn_.notify_all();
  progress_.notify_all();
  progress_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !running_; });
}

void Launcher::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    halted_.store(true, std::memory_order_release);
    turn_.notify_all();
    progress_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Launcher::work() {
  become_network_thread("paceline-launch");
  options_.enter();
  std::unique_lock lock(mutex_);
  while (!stopping_ && !halted_) {
    turn_.wait(lock, [&] { return stopping_ || halted_ || !steps_.empty(); });
    if (stopping_ || halted_) break;
    auto [sequence, steps] = std::move(steps_.front());
    steps_.pop_front();
    current_ = sequence;
    running_ = true;
    lock.unlock();
    const auto status = steps();
    steps = nullptr;
    lock.lock();
    running_ = false;
    if (!status) {
      progress_.notify_all();
      lock.unlock();
      if (!halted_) options_.failed(status);
      lock.lock();
      break;
    }
    launched_.store(sequence, std::memory_order_release);
    progress_.notify_all();
  }
}

}  // namespace paceline::gpu
