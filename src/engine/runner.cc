#include "engine/runner.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/cores.h"
#include "base/pause.h"
#include "base/scheduling.h"

namespace paceline::engine {
namespace {

// After a caller has driven an operation itself, the runner's thread does not sleep on the
// descriptor for so long: the next one is likely to follow, and nobody should be woken for its
// messages.
constexpr Time kNapWindow = kMillisecond;
constexpr Time kLongNap = 50 * kMillisecond;
constexpr std::size_t kKeptFailures = 1024;
// A little more than what operations get beyond the deadline of the end (finish.cc).
constexpr Time kGivesUp = 2 * kSecond + 100 * kMillisecond;
// Once so much has gone through the network since the last sleep, the next comes at the network's pace: to look for
// it without a pause costs a core and saves no time, and what has gathered meanwhile takes fewer calls. (In a steady flow,
// see flow_meter.h, less is enough: several wires share what a link brings, and none of them may see so much at a time.)
constexpr uint64_t kBulk = 64 * 1024;
// For so long give_way() leaves its core between two looks: a fraction of what a bucket takes to compute.
constexpr Time kGivenAway = 200 * kMicrosecond;

std::chrono::nanoseconds span(Time t) { return std::chrono::nanoseconds(t); }

}  // namespace

RunnerOptions runner_options_for(int local_size, int sharing) {
  RunnerOptions options;
  options.yield = local_size >= usable_cores();
  const int all = std::max(local_size, sharing);
  const int usable = usable_cores();
  options.callers_yield =
      options.yield || (all >= usable && !have_cores_apart(all, usable, machine_cores()));
  return options;
}

Time Runner::now() { return SteadyClock().now(); }

Runner::Runner(Engine& engine, wire::Channel& channel, RunnerOptions options)
    : engine_(engine), channel_(channel), options_(options) {
  engine_.set_interlude(this);
  thread_ = std::thread([this] { thread_main(); });
}

Runner::~Runner() {
  if (!thread_.joinable()) return;
  {
    Lock lock(mutex_);
    stopping_ = closing_ = true;
    channel_.wake();
    runner_turn_.notify_all();
    any_turn_.notify_all();
    turn_.notify_all();
  }
  thread_.join();
  engine_.set_interlude(nullptr);
  tell_rest();
}

void Runner::begin() {
  computing_ = true;
  stepping_->unlock();
}

void Runner::end() {
  stepping_->lock();
  computing_ = false;
  if (outside_ > 0) computed_.notify_all();
}

// For what may go on during an interlude. A driver between two steps lets those pass that wait here.
Runner::Lock Runner::enter() {
  entrants_.fetch_add(1, std::memory_order_relaxed);
  Lock lock(mutex_);
  entrants_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

// For everything else that touches the engine.
Runner::Lock Runner::quiet() {
  Lock lock = enter();
  ++outside_;
  computed_.wait(lock, [this] { return !computing_; });
  --outside_;
  return lock;
}

// One look at everything. The caller is the driver and holds the mutex.
bool Runner::step(Lock& lock) {
  ended_.clear();
  stepping_ = &lock;
  bool moved = engine_.progress(now(), ended_);
  for (OpId id : ended_) publish(id);
  tell(lock);
  forget_failures();
  return moved;
}

// The oldest ones, of any number that a lost rank ended at once, but none that is yet to be told: whoever hears of it asks why.
void Runner::forget_failures() {
  while (failure_order_.size() > kKeptFailures && due_.empty()) {
    failures_.erase(failure_order_.front());
    failure_order_.pop_front();
  }
}

void Runner::publish(OpId id) {
  --pending_;
  const Outcome* outcome = engine_.outcome(id);
  if (outcome != nullptr && !outcome->status) {
    if (failures_.emplace(id, outcome->status.message()).second) failure_order_.push_back(id);
  }
  if (watched_.erase(id) > 0) {
    ended_watched_.push_back(id);
    any_turn_.notify_one();
    return;
  }
  if (auto found = notices_.find(id); found != notices_.end()) {
    due_.push_back({id, found->second, 0});
    notices_.erase(found);
    return;
  }
  if (waiting_ > 0) turn_.notify_all();
  if (polling_ > 0) channel_.wake();
}

void Runner::relax(Lock& lock, bool yield) const {
  constexpr int kPatience = 2000;
  lock.unlock();
  // A mutex is not fair: who has let go of it would have it again before a sleeper is awake.
  int looks = 0;
  do {
    if (yield) {
      sched_yield();
    } else {
      pause_cpu();
    }
  } while ((entrants_.load(std::memory_order_relaxed) > 0 || outside_ > 0) && ++looks < kPatience);
  lock.lock();
}

// Notices of what has ended. This thread stays the driver.
void Runner::tell(Lock& lock) {
  if (due_.empty()) return;
  telling_.clear();
  std::swap(telling_, due_);
  for (auto& due : telling_) {
    live_.erase(due.id);
    due.code = static_cast<int>(take(due.id).status.code());
  }
  lock.unlock();
  for (const auto& due : telling_) due.notice.call(due.notice.context, due.id, due.code);
  lock.lock();
}

// Nobody drives any more.
void Runner::tell_rest() {
  Lock lock(mutex_);
  const auto notices = std::exchange(notices_, {});
  for (const auto& [id, notice] : notices)
    failures_.emplace(id, "the communicator is being destroyed");
  lock.unlock();
  for (const auto& [id, notice] : notices)
    notice.call(notice.context, id, static_cast<int>(Code::kAborted));
}

// Sleeps in the kernel until something arrives, a timer is due, or somebody calls wake(). The role
// is free meanwhile.
void Runner::sleep(Lock& lock, Time until) {
  const Time timer = std::min(until, engine_.next_timer());
  const Time t = now();
  if (timer <= t || !channel_.prepare_wait()) return;
  pollfd p{channel_.poll_fd(), POLLIN, 0};
  const Time most = p.fd < 0 ? 50 * kMicrosecond : 10 * kSecond;
  const Time d = std::min(most, timer - t);
  timespec ts{d / kSecond, d % kSecond};
  ++polling_;
  lock.unlock();
  ppoll(&p, p.fd < 0 ? 0 : 1, &ts, nullptr);
  lock.lock();
  --polling_;
}

// Waits until done(), driving whenever nobody else does. False: `until` came first.
template <class Done>
bool Runner::wait_until(Lock& lock, Time until, Done done) {
  claims_.fetch_add(1, std::memory_order_relaxed);
  bool mine = false;
  bool ok = true;
  Time idle_since = 0;
  while (computing_ || !done()) {
    const Time t = now();
    if (t >= until) {
      ok = false;
      break;
    }
    if (computing_) {  // nothing ends meanwhile
      ++outside_;
      computed_.wait_for(lock, span(std::min<Time>(until - t, 100 * kMillisecond)));
      --outside_;
      continue;
    }
    if (!mine && driving_) {
      if (runner_drives_) {
        relax(lock, options_.callers_yield);  // it lets go as soon as it sees the claim
      } else {
        ++waiting_;
        turn_.wait_for(lock, span(std::min<Time>(until - t, 100 * kMillisecond)));
        --waiting_;
      }
      continue;
    }
    driving_ = mine = true;
    if (step(lock)) {
      idle_since = 0;
      if (entrants_.load(std::memory_order_relaxed) > 0 || outside_ > 0)
        relax(lock, options_.callers_yield);
      continue;
    }
    if (idle_since == 0) idle_since = t;
    if (t - idle_since < options_.spin) {
      relax(lock, options_.callers_yield);
      continue;
    }
    driving_ = mine = false;
    sleep(lock, until);
    idle_since = 0;
  }
  if (mine) driving_ = false;
  last_inline_ = now();
  claims_.fetch_sub(1, std::memory_order_relaxed);
  hand_over();
  return ok;
}

// A caller has stopped driving: somebody else must, if there is anything to drive.
void Runner::hand_over() {
  if (driving_) return;
  if (waiting_ > 0) {
    turn_.notify_one();
  } else if (polling_ > 0) {
    channel_.wake();  // what they sleep on may have been consumed here; the runner's thread naps
                      // from now on
  } else if (claims_.load(std::memory_order_relaxed) > 0) {
    return;  // another caller is on its way
  } else if (pending_ > 0 || long_nap_) {
    runner_turn_.notify_one();
  }
}

// Something new is pending.
void Runner::kick() {
  if (driving_) return;
  if (polling_ > 0) {
    channel_.wake();
  } else if (claims_.load(std::memory_order_relaxed) == 0) {
    runner_turn_.notify_one();
  }
}

void Runner::thread_main() {
  become_network_thread("paceline-wire");
  Lock lock(mutex_);
  int naps = 0;
  while (!stopping_) {
    if (driving_ || claims_.load(std::memory_order_relaxed) > 0) {
      // A caller drives. Naps grow while it goes on, and it tells when it leaves.
      long_nap_ = ++naps > 4;
      runner_turn_.wait_for(lock, span(long_nap_ ? kLongNap : kNapWindow));
      long_nap_ = false;
      continue;
    }
    naps = 0;
    if (pending_ > 0) {
      serve(lock);
      continue;
    }
    if (now() - last_inline_ < kNapWindow) {
      runner_turn_.wait_for(lock, span(kNapWindow));
      continue;
    }
    driving_ = runner_drives_ = true;
    bool moved = step(lock);
    driving_ = runner_drives_ = false;
    if (moved || pending_ > 0) continue;
    sleep(lock, kNever);
  }
}

// The runner's thread drives until nothing is pending or a caller wants to.
void Runner::serve(Lock& lock) {
  Time idle_since = 0;
  uint64_t carried_before = channel_.counters().network;
  auto wanted = [&] {
    return !stopping_ && pending_ > 0 && claims_.load(std::memory_order_relaxed) == 0 &&
           (runner_drives_ || !driving_);
  };
  while (wanted()) {
    driving_ = runner_drives_ = true;
    const bool moved = step(lock);
    const Time t = now();
    if (moved) {
      idle_since = 0;
      relax(lock, options_.yield);  // lets submitters in
      continue;
    }
    if (idle_since == 0) idle_since = t;
    const uint64_t carried = channel_.counters().network;
    flow_.look(t, carried);
    if (t - idle_since < options_.spin && carried - carried_before < kBulk && !flow_.is_steady()) {
      relax(lock, options_.yield);
      continue;
    }
    carried_before = carried;
    driving_ = runner_drives_ = false;
    sleep(lock, kNever);
    idle_since = 0;
  }
  if (runner_drives_) driving_ = runner_drives_ = false;
  if (waiting_ > 0) turn_.notify_one();
}

Result<OpId> Runner::added(Result<OpId> id, Notice notice) {
  if (id) {
    ++pending_;
    live_.insert(*id);
    if (notice.call != nullptr) notices_[*id] = notice;
    kick();
  }
  return id;
}

Result<OpId> Runner::submit(const Operation& operation, Notice notice) {
  Lock lock = enter();
  return added(engine_.submit(operation, now()), notice);
}
Result<OpId> Runner::send(const Transfer& transfer, Notice notice) {
  Lock lock = enter();
  return added(engine_.send(transfer, now()), notice);
}
Result<OpId> Runner::receive(const Transfer& transfer, Notice notice) {
  Lock lock = enter();
  return added(engine_.receive(transfer, now()), notice);
}

// Its end is told by wait_any() or a notice, and nobody else may release it.
bool Runner::is_spoken_for(OpId id) const {
  const auto of = [id](const Due& due) { return due.id == id; };
  return watched_.count(id) > 0 || notices_.count(id) > 0 ||
         std::find(ended_watched_.begin(), ended_watched_.end(), id) != ended_watched_.end() ||
         std::any_of(due_.begin(), due_.end(), of);
}

Outcome Runner::take(OpId id) {
  Outcome outcome = *engine_.outcome(id);
  engine_.forget(id);
  return outcome;
}

Result<Outcome> Runner::run(const Operation& operation) {
  Lock lock = enter();
  auto id = engine_.submit(operation, now());
  if (!id) return id.status();
  ++pending_;
  const Stay stay(*this);
  wait_until(lock, kNever, [&] { return engine_.outcome(*id) != nullptr; });
  return take(*id);
}

bool Runner::test(OpId id) {
  Lock lock = enter();
  return live_.count(id) == 0 || engine_.outcome(id) != nullptr;
}

Result<Outcome> Runner::wait(OpId id, Time timeout) {
  Lock lock = enter();
  const Stay stay(*this);
  if (live_.count(id) == 0 || is_spoken_for(id)) {
    return Status(
        Code::kInvalidArgument,
        "no such operation: it was released already, or belongs to wait_any, or tells of itself");
  }
  const Time until = timeout < 0 ? kNever : after(now(), timeout);
  auto done = [&] { return live_.count(id) == 0 || engine_.outcome(id) != nullptr; };
  if (!wait_until(lock, until, done)) {
    return Status(Code::kTimeout,
                  computing_ ? "the operation has not ended yet" : engine_.waiting_for(id));
  }
  if (live_.erase(id) == 0)
    return Status(Code::kInvalidArgument, "another thread released the operation");
  return take(id);
}

bool Runner::give_way(OpId id, Time patience, const std::function<bool()>& crowded) {
  Lock lock = enter();
  const Stay stay(*this);
  const Time until = after(now(), patience);
  while (live_.count(id) > 0 && !engine_.met_neighbours(id)) {
    if (closing_ || now() >= until) return false;
    lock.unlock();
    const bool sleeps = crowded();
    if (sleeps) std::this_thread::sleep_for(span(kGivenAway));
    lock = enter();
    if (!sleeps) return false;
  }
  return true;
}

Status Runner::watch(OpId id) {
  Lock lock = enter();
  if (live_.count(id) == 0 || is_spoken_for(id))
    return {Code::kInvalidArgument,
            "no such operation: it was released already, or is watched, or tells of itself"};
  if (engine_.outcome(id) != nullptr) {
    ended_watched_.push_back(id);
    any_turn_.notify_one();
  } else {
    watched_.insert(id);
  }
  return Status::ok();
}

bool Runner::wait_any(Time timeout, std::size_t capacity, std::vector<Ended>& out) {
  Lock lock = enter();
  const Stay stay(*this);
  const Time until = timeout < 0 ? kNever : after(now(), timeout);
  while (ended_watched_.empty()) {
    if (closing_) return false;
    const Time t = now();
    if (t >= until) return true;
    any_turn_.wait_for(lock, span(std::min<Time>(until - t, kSecond)));
  }
  while (!ended_watched_.empty() && capacity-- > 0) {
    OpId id = ended_watched_.front();
    ended_watched_.pop_front();
    live_.erase(id);
    out.push_back({id, take(id)});
  }
  return true;
}

std::string Runner::error_of(OpId id) {
  Lock lock = enter();
  auto found = failures_.find(id);
  return found == failures_.end() ? std::string() : found->second;
}

Result<GroupId> Runner::create_group(std::span<const Rank> ranks) {
  Lock lock = quiet();
  return engine_.create_group(ranks);
}
Status Runner::destroy_group(GroupId id) {
  Lock lock = quiet();
  return engine_.destroy_group(id);
}
void Runner::abort(const Status& why) {
  Lock lock = quiet();
  engine_.abort(why);
  kick();
  if (polling_ > 0) channel_.wake();
}
void Runner::adopt(const Status& failure) {
  Lock lock = quiet();
  engine_.adopt(failure);
  kick();
  if (polling_ > 0) channel_.wake();
}
Status Runner::health() {
  Lock lock = quiet();
  return engine_.health();
}
Statistics Runner::statistics() {
  Lock lock = quiet();
  return engine_.statistics();
}
wire::Counters Runner::counters() {
  Lock lock = quiet();
  return channel_.counters();
}
Result<plan::PlanRequest> Runner::request_for(const Operation& operation) {
  Lock lock = quiet();
  return engine_.request_for(operation);
}
void Runner::trim() {
  Lock lock = quiet();
  engine_.trim();
}
void Runner::commit_residuals() {
  Lock lock = quiet();
  engine_.commit_residuals();
}
void Runner::rollback_residuals() {
  Lock lock = quiet();
  engine_.rollback_residuals();
}
void Runner::commit_residuals(std::span<const uint64_t> keys) {
  Lock lock = quiet();
  engine_.commit_residuals(keys);
}
void Runner::rollback_residuals(std::span<const uint64_t> keys) {
  Lock lock = quiet();
  engine_.rollback_residuals(keys);
}
Status Runner::scale_residuals(double factor) {
  Lock lock = quiet();
  return engine_.scale_residuals(factor);
}
Status Runner::read_residual(uint64_t key, std::span<float> data) {
  Lock lock = quiet();
  return engine_.read_residual(key, data);
}
Status Runner::write_residual(uint64_t key, std::span<const float> data) {
  Lock lock = quiet();
  return engine_.write_residual(key, data);
}

Status Runner::close(Time timeout) {
  Status how;
  {
    Lock lock = quiet();
    if (stopping_) return Status::ok();
    closing_ = true;
    any_turn_.notify_all();
    const Time deadline = after(now(), timeout);
    const auto finished = [&] { return engine_.finish(now(), deadline); };
    // At its deadline and a while after it the engine gives up by itself, when it is asked; no timer of its own says so.
    for (const Time more : {Time{0}, kGivesUp, kGivesUp + kSecond})
      if (wait_until(lock, after(deadline, more), finished)) break;
    computed_.wait(lock, [this] { return !computing_; });
    how = engine_.health();
    stopping_ = true;
    channel_.wake();
    runner_turn_.notify_all();
    any_turn_.notify_all();
    turn_.notify_all();
    // Who still waits in here wakes up before this object goes.
    all_left_.wait_for(lock, span(kSecond), [this] { return inside_ == 0; });
  }
  thread_.join();
  engine_.set_interlude(nullptr);  // the channel outlives this object and the engine
  tell_rest();
  return how;
}

}  // namespace paceline::engine
