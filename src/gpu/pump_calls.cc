// What callers ask of the pump: to take an operation, to wait for it, to end.
#include <fmt/format.h>

#include <bit>
#include <chrono>
#include <thread>

#include "gpu/pump.h"

namespace paceline::gpu {
namespace {

constexpr Time kNaming = kSecond;  // by when the wires have missed whom NCCL misses

}  // namespace

void Pump::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    submitted_turn_.notify_all();
    stopping_turn_.notify_all();
  }
  if (pump_thread_.joinable()) pump_thread_.join();
  if (watch_thread_.joinable()) watch_thread_.join();
  hold(false);
  std::unique_lock lock(mutex_);
  const auto over = [&] { return under_way_ == 0 || (must_fail_ && failure_); };
  while (none_under_way_.wait(lock, over), under_way_ > 0) {
    lock.unlock();
    fail_now();  // or the other wires would go on, with what the first one's end has left
    lock.lock();
  }
  none_failing_.wait(lock, [&] { return failing_ == 0; });
}

void Pump::submit(Shared operation) {
  const auto& plan = *operation->plan;
  const int arrivals = static_cast<int>(plan.pieces.size()) * plan.hops;
  operation->arrivals_left =
      arrivals + 1 + (operation->meets ? 1 : 0) + (operation->launches ? 1 : 0);
  operation->until_meeting = arrivals + (arrivals > 0 ? 1 : 0);
  std::lock_guard lock(mutex_);
  ++submitted_;
  inbox_.push_back(std::move(operation));
  submitted_turn_.notify_one();
}

Status Pump::failure() const {
  if (!failed_.load(std::memory_order_acquire)) return Status::ok();
  std::unique_lock lock(mutex_);
  arrived_turn_.wait(lock, [&] { return told_; });
  return failure_;
}

/// NCCL inside the node may be the first to miss a neighbour, where they talk by sockets, and says nothing of whom; the
/// wires name it a moment later.
Status Pump::cause_of(const Status& found) const {
  if (found.code() != Code::kPeerLost || wires_.empty()) return found;
  const SteadyClock clock;
  const Time until = after(clock.now(), kNaming);
  while (!has_failed()) {
    for (const auto& wire : wires_) {
      if (auto health = wire.health(); !health) return health;
    }
    if (clock.now() >= until) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return found;
}

void Pump::fail(const Status& found) {
  const Status why = cause_of(found);
  {
    std::lock_guard lock(mutex_);
    if (!failure_) return;
    ++failing_;
    failure_ = why;
    failed_.store(true, std::memory_order_release);
    // Ahead of all that waits or ever will; see flags.h.
    constexpr uint32_t kFarAhead = 1U << 30;
    const Flags& f = options_.flags;
    const uint32_t finished = Flags::load(f.finished());
    for (int g = 0; g < Flags::kGates; ++g) {
      const uint64_t gated = gated_[static_cast<size_t>(g)];
      // A neighbour that is lost may spoil NCCL's part of what has come.
      const bool in_place = reached(finished, static_cast<uint32_t>(gated));
      if (gated > arrived_through_ || !in_place)
        Flags::store(f.gate(g), std::bit_cast<uint32_t>(1.0F));
    }
    for (int l = 0; l < options_.lanes; ++l) {
      auto& lane = lanes_[static_cast<size_t>(l)];
      Flags::store(f.in(l), lane.in_flag + kFarAhead);
      Flags::store(f.back(l), lane.back_flag + kFarAhead);
    }
    Flags::store(f.retired(), static_cast<uint32_t>(retired_.load()) + kFarAhead);
    Flags::store(f.met(), static_cast<uint32_t>(submitted_) + kFarAhead);
    Flags::store(f.brought(), static_cast<uint32_t>(submitted_) + kFarAhead);
    submitted_turn_.notify_all();
    stopping_turn_.notify_all();
  }
  options_.tell(why);
  {
    std::lock_guard lock(mutex_);
    told_ = true;
    arrived_turn_.notify_all();
  }
  options_.failed(why);
  std::lock_guard lock(mutex_);
  --failing_;
  none_failing_.notify_all();
}

Result<drivers::cuda::DevicePtr> Pump::gate() {
  std::lock_guard lock(mutex_);
  if (!failure_) return failure_;
  const size_t index = next_gate_++ % gated_.size();
  gated_[index] = submitted_;
  return Flags::address(options_.flags.gate(static_cast<int>(index)));
}

Status Pump::wait_until(const std::function<bool()>& there, double timeout_s, bool& finite) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return failure_ ? there() : told_; };
  if (timeout_s > 0 && timeout_s < 1e8) {
    if (!arrived_turn_.wait_for(lock, std::chrono::duration<double>(timeout_s), over) && failure_)
      return {
          Code::kTimeout,
          fmt::format("rank {}: {} of {} operations have not arrived from the other nodes within "
                      "the caller's {:g} s: a rank there is slow or has stopped; wait longer, or "
                      "look what it does",
                      options_.peers[static_cast<size_t>(options_.node)], submitted_ - arrived_,
                      submitted_, timeout_s)};
  } else {
    arrived_turn_.wait(lock, over);
  }
  if (!failure_) return failure_;
  finite = finite_;
  finite_ = true;
  return Status::ok();
}

Status Pump::wait_arrival(double timeout_s, bool& finite) {
  return wait_until([&] { return arrived_ == submitted_; }, timeout_s, finite);
}

Status Pump::wait_operation(uint64_t sequence, double timeout_s, bool& finite) {
  return wait_until([&] { return arrived_through_ >= sequence; }, timeout_s, finite);
}

uint64_t Pump::take_not_finite(std::span<uint64_t> operations) {
  const std::lock_guard lock(mutex_);
  const size_t count = std::min(operations.size(), not_finite_.size());
  std::copy_n(not_finite_.begin(), count, operations.begin());
  not_finite_.erase(not_finite_.begin(), not_finite_.begin() + static_cast<ptrdiff_t>(count));
  return count;
}

Time Pump::note_arrival(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  const Time before = noted_at_;
  noted_ = sequence;
  noted_at_ = arrived_through_ >= sequence ? SteadyClock().now() : 0;
  return before;
}

void Pump::rest(uint64_t sequence, Time until) {
  const Time left = until - SteadyClock().now();
  if (left <= 0) return;
  std::unique_lock lock(mutex_);
  arrived_turn_.wait_for(lock, std::chrono::nanoseconds(left),
                         [&] { return !failure_ || arrived_through_ >= sequence; });
}

void Pump::tell_again(bool finite) {
  const std::lock_guard lock(mutex_);
  finite_ = finite_ && finite;
}

bool Pump::has_arrived(uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  return !failure_ || arrived_through_ >= sequence;
}

Status Pump::wait_retired() {
  std::unique_lock lock(mutex_);
  arrived_turn_.wait(lock, [&] { return failure_ ? retired() == submitted_ : told_; });
  return failure_;
}

bool Pump::all_arrived() const {
  const std::lock_guard lock(mutex_);
  return arrived_ == submitted_;
}

}  // namespace paceline::gpu
