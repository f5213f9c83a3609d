// Which of two ways of going through a pass is the shorter: the usual one, or the other, where that saves more than noise.
//
// What a way is worth depends on the model, the GPU, the host and what else the script does, and on the other ranks, which
// are waited for; so both are tried in turn, and timed from pass to pass. Passes count alike on all ranks, so they all try the
// same at a time. Each then goes by its own clock: what it chooses is a matter of its own speed.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/clock.h"

namespace paceline::gpu {

class PassTrial {
 public:
  /// Passes before the first trial: buckets are new, code is loaded.
  static constexpr uint64_t kFirst = 4;
  /// Passes in a row that go one way; the first of them is no measure.
  static constexpr uint64_t kTurn = 4;
  static constexpr uint64_t kTurns = 6;    ///< of a trial
  static constexpr uint64_t kHold = 2000;  ///< passes until the next trial
  /// By so much a pass must be shorter the other way.
  static constexpr double kGain = 0.99;

  explicit PassTrial(uint64_t first = kFirst) : hold_(first) {}

  /// Once a pass, at `now`, at the point where the ways part: whether it goes the usual way.
  bool usual(Time now);

  /// Of the last trial: the median time from pass to pass, in nanoseconds; 0: none yet.
  [[nodiscard]] Time pass_usual() const { return medians_[1]; }
  [[nodiscard]] Time pass_other() const { return medians_[0]; }
  /// Whether that was for the usual way.
  [[nodiscard]] bool chosen() const { return chosen_; }

 private:
  void settle();

  uint64_t pass_ = 0;  ///< since the last trial ended
  uint64_t hold_;
  Time last_ = 0;
  bool before_ = true, chosen_ = true;      ///< the usual way
  std::array<std::vector<Time>, 2> taken_;  ///< [usual]
  std::array<Time, 2> medians_{};
};

}  // namespace paceline::gpu
