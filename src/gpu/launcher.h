// A thread that puts an operation's way in on the streams, if it can, once it has come. (With one GPU a node: NCCL's kernels
// must stand in one order on all ranks of a node, whatever comes when; see Path::ahead().)
//
// Streams that wait are not free: with two or more of them a GPU starts every kernel, of every stream, about a microsecond
// later (H200: +0.8 µs with two or three, +1.1 with five, +1.4 with eight, none with one). So while a backward pass goes on
// nothing that waits for the network is enqueued: operations go through here one after the other, in order, and what they
// wait for is looked at by the host.
//
// A stream that has joined an operation must not wait for what is not enqueued yet: calls of the driver that wait for the
// GPU (memory given back, the first use of a kernel) keep other threads from launching, this one too. So a join comes
// first: catch_up() lets the waits of what is left be put on the streams.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"

namespace paceline::gpu {

class Launcher {
 public:
  struct Options {
    std::function<void()> enter;                ///< first, on the thread
    std::function<void(const Status&)> failed;  ///< a step has failed
  };
  explicit Launcher(Options options);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  ~Launcher() { stop(); }

  /// What need not wait for its turn.
  struct Early {
    uint64_t sequence = 0;
    std::function<bool()> ready;
    std::function<Status()> step;
    uint64_t after = 0;  ///< on its stream: not before this operation's steps are over,
    std::function<bool()> may_wait = [] { return true; };  ///< nor unless this is so then
  };

  /// `steps` runs after all that were pushed before; `sequence` grows. What is `early` runs in its order too, while the
  /// thread waits for something else, once it is ready or a stream may wait for it; at the latest where `steps` say
  /// run_early().
  void push(uint64_t sequence, std::function<Status()> steps, std::vector<Early> early = {});
  /// For steps: what is early and not over, up to operation `sequence`. It waits for itself.
  Status run_early(uint64_t sequence);
  /// For steps: waits until `flag` has reached `value`. False: somebody wants to join; a stream has to wait for it.
  /// kAborted once halt() was called.
  Result<bool> wait_for(const uint32_t* flag, uint32_t value);
  /// The last operation whose steps are over.
  [[nodiscard]] uint64_t launched() const { return launched_.load(std::memory_order_acquire); }
  /// Blocks until that has reached `sequence`, or halt().
  void wait_launched(uint64_t sequence);
  /// The same, without waiting for the network: what is left until `sequence` waits on the streams.
  void catch_up(uint64_t sequence);
  /// The last operation that somebody wanted so.
  [[nodiscard]] uint64_t ahead_through() const { return ahead_through_.load(); }
  /// Blocks until `flag` has reached `value`, or halt().
  void wait_until(const uint32_t* flag, uint32_t value) const;
  /// No more steps: the path has failed. Waits until none runs any more, at most `seconds` (one may hang in a library).
  void halt(double seconds);
  void stop();

 private:
  void work();
  Result<bool> run_ready();
  Status run_ahead();
  Status run_first(std::unique_lock<std::mutex>& lock);

  Options options_;
  std::mutex mutex_;
  std::condition_variable turn_;      ///< for the thread
  std::condition_variable progress_;  ///< for wait_launched()
  std::deque<std::pair<uint64_t, std::function<Status()>>> steps_;
  std::deque<Early> early_;
  std::atomic<size_t> early_left_{0};
  bool stopping_ = false, running_ = false;
  std::atomic<bool> halted_{false};
  std::atomic<uint64_t> launched_{0};
  std::atomic<uint64_t> ahead_through_{0};  ///< whose waits are the streams'
  uint64_t current_ = 0;                    ///< the thread's: the operation whose steps run
  bool early_runs_ = false;                 ///< the thread's
  std::thread thread_;
};

}  // namespace paceline::gpu
