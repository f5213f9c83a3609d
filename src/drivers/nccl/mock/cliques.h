// A simulated NCCL between threads of one process, on the simulated devices of drivers/cuda/mock.
//
// A collective (or a group of them) completes only when the kernels of all ranks have reached the head of their queues,
// as NCCL's do on a GPU: two ranks that issue on one communicator in different orders, or behind a wait that the other's
// kernel is needed for, hang. The first call of a kind and size on a communicator waits on the host until all ranks have made
// it, as NCCL does that connects ranks for an algorithm when it takes it first. A group of which one call failed launches
// nothing: the end of the group gives that call's error. Sums are taken in rank order, in float32.
#pragma once

#include <memory>
#include <string>

#include "drivers/cuda/mock/machine.h"
#include "drivers/nccl/api.h"

namespace paceline::drivers::nccl::mock {

/// One at a time; the machine must outlive it.
class Cliques {
 public:
  explicit Cliques(cuda::mock::Machine& machine);
  Cliques(const Cliques&) = delete;
  Cliques& operator=(const Cliques&) = delete;
  ~Cliques();

  [[nodiscard]] const Api& api() const;
  /// The `nth` call (from 1, counted from now) of `function` ("all_gather", the table's name) in the process gives
  /// `error`.
  void fail(const std::string& function, int nth, NcclResult error);
  [[nodiscard]] uint64_t calls(const std::string& function) const;
  /// What ranks issued against each other's expectation; empty: nothing.
  [[nodiscard]] std::string disagreement() const;
  /// Seconds that kernels of `function` (the first of a group counts) stood at the head of their queues and waited for
  /// other ranks, summed over ranks: on a GPU they hold thread blocks meanwhile.
  [[nodiscard]] double waited(const std::string& function) const;
  /// Communicators that were neither destroyed nor aborted.
  [[nodiscard]] int open() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace paceline::drivers::nccl::mock
