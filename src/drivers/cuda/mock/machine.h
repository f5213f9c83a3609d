// A simulated machine with GPUs, for tests of host logic: behind the driver's table of functions.
//
// Device memory is host memory. Streams are queues that a thread per device works off; which of several heads that can
// run goes first is random by seed. With `hardware_queues` = 1 all streams of a device share one queue in the order of
// issue, as under CUDA_DEVICE_MAX_CONNECTIONS=1: an order that waits for itself hangs here as it does on a GPU.
// stream_synchronize(), mem_free() and the like wait for the device, and give up after `patience` with
// CUDA_ERROR_UNKNOWN, so that such a test ends.
//
// One machine at a time; its functions act on the current context's device (as CUDA's do), so that threads of one test
// can be ranks with a device each. Faults: fail() makes a call return an error, lose() takes a device off the bus.
// Memory, modules, streams and events made or freed while a wait for a value is pending are counted: on a GPU they may
// wait for the device, and the wait for them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "drivers/cuda/api.h"

namespace paceline::drivers::cuda::mock {

struct Options {
  int devices = 1;
  int hardware_queues = 0;  ///< per device; 0: one per stream
  /// Not 0: a queue holds so many items, and whoever has one more waits inside the driver, its lock held: every other call
  /// on the device waits too.
  size_t queue_room = 0;
  uint64_t seed = 1;
  /// Pauses of up to so many microseconds before some items, at random.
  int delays_us = 0;
  uint64_t memory = 1ULL << 30;  ///< bytes per device
  int driver_version = 12040;
  double patience_s = 20;
};

struct Grid {
  unsigned grid_x = 1, grid_y = 1, grid_z = 1, block_x = 1, block_y = 1, block_z = 1;
  unsigned shared_bytes = 0;
};

/// What a kernel's arguments are copied as, and what it does.
struct KernelBody {
  std::vector<size_t> argument_sizes;
  std::function<void(const Grid&, void* const* arguments)> run;
};

/// A piece of work of another simulated library (NCCL) on a stream. `ready` may be asked often.
struct Task {
  std::function<bool()> ready;
  std::function<void()> run;
};

class Machine {
 public:
  explicit Machine(const Options& options);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  ~Machine();

  [[nodiscard]] const Api& api() const;

  /// Every module has it from now on.
  void add_kernel(const std::string& name, KernelBody body);
  /// A kernel as a plain function: `void f(const Grid&, Arguments…)`.
  template <class... Arguments>
  void add_kernel(const std::string& name, void (*body)(const Grid&, Arguments...)) {
    add_kernel(name, KernelBody{{sizeof(Arguments)...}, [body](const Grid& g, void* const* a) {
                                  call(body, g, a, std::index_sequence_for<Arguments...>{});
                                }});
  }

  /// The `nth` call (from 1, counted from now) of `function` ("mem_alloc", the table's name) gives `error`;
  /// on `device`, or on any (-1).
  void fail(const std::string& function, int nth, CudaResult error, int device = -1);
  /// Something goes wrong on purpose, here or elsewhere: what copies find is not looked at for races any more. fail() and
  /// lose() do it too.
  void expect_faults();
  [[nodiscard]] bool expects_faults() const;
  /// From now on every call on the device gives `error`, and its streams stand still.
  void lose(int device, CudaResult error);
  [[nodiscard]] uint64_t calls(const std::string& function, int device = -1) const;
  [[nodiscard]] uint64_t calls_of_this_thread(const std::string& function) const;
  /// All calls of threads that have this name.
  [[nodiscard]] uint64_t calls_of_threads(const std::string& name) const;
  /// The names of all functions that have been called.
  [[nodiscard]] std::vector<std::string> called() const;

  struct Counts {
    uint64_t memory = 0;       ///< bytes of device memory in use
    uint64_t pinned = 0;       ///< bytes of pinned memory in use
    uint64_t allocations = 0;  ///< calls that took or gave back memory, modules, streams, events
    uint64_t allocations_in_wait = 0;  ///< of these, while a wait for a value was pending
    uint64_t pending_waits = 0;
    uint64_t streams_in_wait = 0, most_streams_in_wait = 0;  ///< that have waits for a value
    uint64_t objects = 0;  ///< streams, events, modules and other processes' memory that exist
    uint64_t freed_while_open = 0;  ///< pieces of memory, that another rank still had open
    uint64_t captured = 0;  ///< pieces of work that were given to a stream while it was captured
  };
  [[nodiscard]] Counts counts(int device) const;
  /// Waits until the device has nothing to do, or is lost; false: not within `patience`.
  bool wait_idle(int device);
  /// Of the device that the stream is on.
  static bool wait_idle(Stream stream);
  void add_task(Stream stream, Task task);
  /// Holds up all that the device is given later, whatever its stream, until all that it was given before has ended: as the
  /// driver does when a kernel's first use makes local memory grow, or its code is loaded (the calling thread waits too then).
  void add_barrier(Stream stream, int device);
  /// From now on the stream is captured into a graph, or no longer. What it is given meanwhile is counted and done all the same.
  static void capture(Stream stream, bool capturing);

  struct State;

 private:
  template <class... A, size_t... I>
  static void call(void (*body)(const Grid&, A...), const Grid& g, void* const* a,
                   std::index_sequence<I...>) {
    body(g, *static_cast<std::remove_reference_t<A>*>(a[I])...);
  }
  std::unique_ptr<State> state_;
};

}  // namespace paceline::drivers::cuda::mock
