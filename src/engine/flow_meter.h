// Tells a steady flow (a step's gradients) from messages that somebody waits for.
//
// In a steady flow the wire's thread need not look for what comes next: it sleeps, and what gathers meanwhile takes fewer
// calls. Where a short operation ends in some tens of microseconds, to be woken is what takes the time.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace paceline::engine {

class FlowMeter {
 public:
  /// A flow carries so much at least, both directions together, in every stretch of time, ...
  static constexpr uint64_t kBytesPerSecond = 125'000'000;  // 1 Gb/s
  static constexpr Time kStretch = kMillisecond;
  /// ... and is steady once so much has gone: what a caller waits for is over by then, or long.
  static constexpr uint64_t kSteadyBytes = 4U << 20;

  /// `carried`: bytes through the network so far. Times and bytes don't go back.
  void look(Time t, uint64_t carried) {
    const Time elapsed = t - since_;
    if (elapsed < kStretch) return;
    const uint64_t bytes = carried - carried_;
    const double least =
        static_cast<double>(kBytesPerSecond) * static_cast<double>(elapsed) / kSecond;
    flow_ = static_cast<double>(bytes) >= least ? flow_ + bytes : 0;
    since_ = t;
    carried_ = carried;
  }
  [[nodiscard]] bool is_steady() const { return flow_ >= kSteadyBytes; }

 private:
  Time since_ = 0;
  uint64_t carried_ = 0;
  uint64_t flow_ = 0;
};

}  // namespace paceline::engine
