// Threads that lend a hand with one computation at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

/// A caller's computation is cut into parts, which its own thread and the helpers take one by one; who is held up by the
/// scheduler leaves the rest to the others. Helpers are started by the first computation that has work for them and sleep
/// between two.
class Workers {
 public:
  /// threads: the caller's included. With 1 everything runs on the caller's.
  explicit Workers(int threads) : threads_(threads) {}
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers();

  [[nodiscard]] int threads() const { return threads_; }
  /// The most threads that one computation had parts for since the last call; 0: there was none.
  int take_used() { return used_.exchange(0, std::memory_order_relaxed); }

  /// Calls task(part) once for each part from 0 to `parts` - 1, in any order and on any of the threads, and returns when
  /// all have ended. What they wrote is visible then. The task must not call run(), and what it throws (in effect: no
  /// memory) ends the process: the other threads are at its caller's variables. Callers from several threads take turns.
  template <class Task>
  void run(int parts, const Task& task) {
    run_all(parts, {&task, [](const void* of, int part) noexcept {
                      (*static_cast<const Task*>(of))(part);
                    }});
  }

 private:
  struct Call {
    const void* task = nullptr;
    void (*call)(const void*, int) noexcept = nullptr;
  };

  void run_all(int parts, Call call);
  void take_parts(std::unique_lock<std::mutex>& lock);
  void help();
  void start_helpers(int wanted);

  const int threads_;
  std::atomic<int> used_{0};
  std::mutex turn_;  ///< held by the caller whose computation runs
  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::vector<std::thread> helpers_;
  Call call_;
  int next_ = 0, parts_ = 0;  ///< parts that nobody has taken
  int left_ = 0;              ///< parts that have not ended
  bool stopping_ = false;
};

}  // namespace paceline
