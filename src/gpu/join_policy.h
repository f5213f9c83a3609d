// Whether the host waits at the end of a backward pass until the GPU has come to the pass's last operations.
//
// It has a price either way. With waits for the network on streams a GPU starts every kernel later (launcher.h), so a model
// of many kernels wants the host to wait. But a host that is the slower of the two, which has yet to launch the optimizer and
// a forward pass of many small layers while the GPU is still busy with the backward pass, loses what it waits. Which weighs more
// depends on the model, the GPU and the host, and on the other ranks, which are waited for; so both are tried, and timed.
//
// Passes count alike on all ranks, so they all try the same at a time. Each then goes by its own clock: what it chooses is
// a matter of its own speed.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/clock.h"

namespace paceline::gpu {

class JoinPolicy {
 public:
  static constexpr uint64_t kFirst =
      4;  ///< passes before the first trial: buckets are new, code is loaded
  static constexpr uint64_t kTurn =
      4;  ///< passes in a row that wait, or do not; the first of them is no measure
  static constexpr uint64_t kTurns = 6;    ///< of a trial
  static constexpr uint64_t kHold = 2000;  ///< passes until the next trial
  /// By so much a pass must be shorter without waits.
  static constexpr double kGain = 0.99;

  explicit JoinPolicy(uint64_t first = kFirst) : hold_(first) {}

  /// Of the join that ends a pass, at `now`: whether it waits.
  bool waits(Time now);

  /// Of the last trial: the median time from pass to pass, in nanoseconds; 0: none yet.
  [[nodiscard]] Time pass_waiting() const { return medians_[1]; }
  [[nodiscard]] Time pass_ahead() const { return medians_[0]; }
  [[nodiscard]] bool chosen() const { return chosen_; }

 private:
  void settle();

  uint64_t pass_ = 0;  ///< since the last trial ended
  uint64_t hold_;
  Time last_ = 0;
  bool before_ = true, chosen_ = true;
  std::array<std::vector<Time>, 2> taken_;  ///< [waits]
  std::array<Time, 2> medians_{};
};

}  // namespace paceline::gpu
