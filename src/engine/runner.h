// Drives an engine on real channels: one thread that keeps everything moving, and callers that move
// it themselves while they wait, so that a small collective costs no thread switch.
//
// One thread at a time is the driver. The runner's own thread drives while operations are pending
// and nobody waits for them; a thread in run() or wait() takes the role from it. Without anything
// pending, the runner's thread sleeps on the channel's descriptor; between small operations that
// follow each other closely it naps instead, so that peers need not wake it for messages that the
// next caller will fetch anyway.
//
// All members are thread-safe. The engine and the channel are touched under one mutex only, and
// nothing of the caller's runs under it: notices are called between two steps. The driver lets go of it while the engine
// computes or the channel copies to and from sockets (an interlude): a submitter waits neither for a bucket to be encoded
// nor for megabytes to be read, and does not starve behind a driver that takes the mutex again at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/engine.h"
#include "engine/flow_meter.h"

namespace paceline::engine {

struct RunnerOptions {
  /// How long a waiting thread polls before it sleeps in the kernel; the runner's own does not while much goes
  /// through the network.
  Time spin = 50 * kMicrosecond;
  /// Polling gives the core away between looks (more busy threads than cores): the runner's own thread, and callers. A
  /// caller waits anyway; the runner's thread would leave its core to what other ranks compute.
  bool yield = false;
  bool callers_yield = false;
};
/// What fits a node with so many ranks on it, on a machine with `sharing` ranks of the job (its containers share the cores).
RunnerOptions runner_options_for(int local_size, int sharing = 0);

/// Called once with the Code that an operation ended with, which releases it; error_of() has the sentence. On the driver's
/// thread without the mutex; where the operation never ends, as the runner does. That thread carries all other operations:
/// the call must be short, may submit, and must not wait.
struct Notice {
  void (*call)(void* context, OpId id, int code) = nullptr;
  void* context = nullptr;
};

class Runner final : private Interlude {
 public:
  /// An ended operation, as wait_any() reports it.
  struct Ended {
    OpId id = 0;
    Outcome outcome;
  };

  /// Both must outlive the runner.
  Runner(Engine& engine, wire::Channel& channel, RunnerOptions options);
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;
  ~Runner() override;

  /// notice: not where these return an error.
  Result<OpId> submit(const Operation& operation, Notice notice = {});
  Result<OpId> send(const Transfer& transfer, Notice notice = {});
  Result<OpId> receive(const Transfer& transfer, Notice notice = {});
  /// Submits and waits. Error: it was not submitted.
  Result<Outcome> run(const Operation& operation);
  bool test(OpId id);
  /// Waits and releases. `timeout` < 0: until the operation's own deadline. kInvalidArgument: no
  /// such operation; kTimeout: it still runs (and is kept).
  Result<Outcome> wait(OpId id, Time timeout);
  /// Sleeps while `crowded` and some rank of this node has not reached the operation, at most for `patience`: the core
  /// goes to who is behind. True: all have reached it, or it is no operation (any more).
  bool give_way(OpId id, Time patience, const std::function<bool()>& crowded);
  Status watch(OpId id);
  /// Appends ended watched operations to `out`, at most `capacity`; false once the runner is being
  /// closed.
  bool wait_any(Time timeout, std::size_t capacity, std::vector<Ended>& out);
  /// The sentence of an operation that failed, also after it was released (the last 1,024).
  std::string error_of(OpId id);

  Result<GroupId> create_group(std::span<const Rank> ranks);
  Status destroy_group(GroupId id);
  void abort(const Status& why);
  void adopt(const Status& failure);
  Status health();
  Statistics statistics();
  wire::Counters counters();
  Result<plan::PlanRequest> request_for(const Operation& operation);
  void trim();
  void commit_residuals();
  void rollback_residuals();
  void commit_residuals(std::span<const uint64_t> keys);
  void rollback_residuals(std::span<const uint64_t> keys);
  Status scale_residuals(double factor);
  Status read_residual(uint64_t key, std::span<float> data);
  Status write_residual(uint64_t key, std::span<const float> data);

  /// The orderly end: waits until all ranks have asked for it (at most `timeout`), then stops the
  /// thread and lets go of everyone who waits. Ok, or why the job ended otherwise.
  Status close(Time timeout);

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// A thread that waits in here, for as long as this lives: within its hold on the mutex.
  class Stay {
   public:
    explicit Stay(Runner& runner) : runner_(runner) { ++runner_.inside_; }
    ~Stay() {
      if (--runner_.inside_ == 0) runner_.all_left_.notify_all();
    }
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;

   private:
    Runner& runner_;
  };

  void begin() override;
  void end() override;
  Lock enter();
  Lock quiet();
  void thread_main();
  void serve(Lock& lock);
  bool step(Lock& lock);
  void relax(Lock& lock, bool yield) const;
  void sleep(Lock& lock, Time until);
  template <class Done>
  bool wait_until(Lock& lock, Time until, Done done);
  void hand_over();
  void kick();
  void publish(OpId id);
  void forget_failures();
  void tell(Lock& lock);
  void tell_rest();
  [[nodiscard]] bool is_spoken_for(OpId id) const;
  Outcome take(OpId id);
  Result<OpId> added(Result<OpId> id, Notice notice);
  [[nodiscard]] static Time now();

  Engine& engine_;
  wire::Channel& channel_;
  RunnerOptions options_;

  std::mutex mutex_;
  std::condition_variable turn_;  ///< for waiting callers: the role is free, or something ended
  std::condition_variable runner_turn_;  ///< for the runner's thread, when it is not in poll()
  std::condition_variable any_turn_;     ///< for wait_any()
  std::condition_variable computed_;     ///< an interlude has ended
  std::condition_variable all_left_;     ///< for close(): inside_ is 0
  int inside_ = 0;                       ///< threads in run(), wait() and wait_any()
  std::atomic<int> entrants_{0};         ///< submitters at the mutex
  Lock* stepping_ = nullptr;             ///< the driver's hold on the mutex, within step()
  bool computing_ = false;               ///< an interlude is open: most of the engine is off limits
  std::atomic<int> outside_{0};          ///< threads in computed_
  bool driving_ = false;                 ///< some thread is the driver
  bool runner_drives_ = false;           ///< and it is the runner's thread
  bool long_nap_ = false;       ///< the runner's thread must be told when the last caller leaves
  int polling_ = 0;             ///< threads in poll()
  std::atomic<int> claims_{0};  ///< callers that wait: the runner's thread leaves the role to them
  int waiting_ = 0;             ///< of these, asleep in turn_
  int pending_ = 0;             ///< submitted, not ended
  FlowMeter flow_;              ///< the runner's thread's
  Time last_inline_ = 0;        ///< when a caller last drove
  bool closing_ = false;
  bool stopping_ = false;
  std::unordered_set<OpId> live_;  ///< submitted and not released
  std::unordered_set<OpId> watched_;
  std::deque<OpId> ended_watched_;
  std::unordered_map<OpId, Notice> notices_;
  struct Due {
    OpId id = 0;
    Notice notice;
    int code = 0;
  };
  std::vector<Due> due_;      ///< has ended, is not told
  std::vector<Due> telling_;  ///< reused, the driver's
  std::vector<OpId> ended_;   ///< reused
  std::unordered_map<OpId, std::string> failures_;
  std::deque<OpId> failure_order_;
  std::thread thread_;
};

}  // namespace paceline::engine
