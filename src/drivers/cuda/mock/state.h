// The inside of the simulated machine: devices, streams, queues.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

#include "drivers/cuda/mock/machine.h"

namespace paceline::drivers::cuda {

struct ContextTag;

struct StreamTag {
  ContextTag* device = nullptr;
  size_t queue = 0;
  uint64_t enqueued = 0, completed = 0;  // under the device's mutex
  uint64_t pending_waits = 0;            // for values
  bool capturing = false;                // under the device's mutex
};

struct EventTag {
  ContextTag* device = nullptr;
  uint64_t recorded = 0, completed = 0;  // under the device's mutex
};

struct FunctionTag {
  mock::KernelBody body;
};

struct ModuleTag {
  ContextTag* device = nullptr;
};

namespace mock {

struct Item {
  StreamTag* stream = nullptr;
  /// Called with the device's mutex held; empty: always.
  std::function<bool()> ready;
  /// Called without it.
  std::function<void()> run;
  /// Called with it, after run().
  std::function<void()> finish;
  bool waits_for_value = false;
  bool barrier = false;  ///< see Machine::add_barrier()
  uint64_t number = 0;   ///< among all of its device, in the order of issue
};

}  // namespace mock

/// A device with its primary context.
struct ContextTag {
  int ordinal = 0;
  const mock::Options* options = nullptr;
  std::mutex driver;  ///< the lock of a driver that waits for room in a queue; taken before `mutex`
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<mock::Item>> queues;
  uint64_t issued = 0;                              ///< items
  std::set<uint64_t> unfinished, barriers;          ///< their numbers
  std::vector<std::unique_ptr<StreamTag>> streams;  ///< all that were ever made
  StreamTag* legacy = nullptr;                      ///< stream 0
  std::vector<std::unique_ptr<EventTag>> events;
  std::unordered_map<uintptr_t, size_t> memory, pinned, registered;  ///< registered: the caller's
  mock::Machine::Counts counts;
  CudaResult lost = 0;
  bool stopping = false;
  bool running = false;  ///< an item is, which may write memory, on a lost device too
  std::mt19937_64 random;
  std::thread thread;

  StreamTag* add_stream();
  void enqueue(mock::Item item);
  [[nodiscard]] bool may_run(const mock::Item& item) const;  ///< with the mutex held
  void work();
  /// Until everything is done, or the device lost, at most `patience`; with the mutex held.
  bool wait_idle(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] StreamTag* resolve(Stream s) { return s == nullptr ? legacy : s; }
};

namespace mock {

struct Fault {
  std::string function;
  int device = -1;
  int countdown = 0;
  CudaResult error = 0;
};

struct Machine::State {
  Options options;
  uint64_t number = 0;  ///< of this machine in the process, from 1
  std::vector<std::unique_ptr<ContextTag>> devices;
  mutable std::mutex mutex;
  std::map<std::string, FunctionTag> kernels;
  std::vector<std::unique_ptr<ModuleTag>> modules;
  std::vector<Fault> faults;
  std::multiset<DevicePtr> open;    ///< what ipc_open_mem_handle() gave
  std::atomic<bool> faulty{false};  ///< see expect_faults()
  std::map<std::pair<std::string, int>, uint64_t> calls;
  std::map<std::pair<std::thread::id, std::string>, uint64_t> calls_by_thread;
  std::map<std::string, uint64_t> calls_by_name;  ///< of threads

  /// Counts the call; the error that was asked for.
  CudaResult enter(const char* function, ContextTag* device);
};

/// The machine that the functions act on.
Machine::State* machine();
const Api& functions();

}  // namespace mock
}  // namespace paceline::drivers::cuda
