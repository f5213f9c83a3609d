#include "engine/flow_meter.h"

#include <gtest/gtest.h>

namespace paceline::engine {
namespace {

/// `bytes_per_second` for `duration`, looked at every `step`.
struct Line {
  FlowMeter meter;
  Time t = kSecond;
  uint64_t carried = 12345;
  void carry(double bytes_per_second, Time duration, Time step) {
    for (const Time end = t + duration; t < end;) {
      t += step;
      carried += static_cast<uint64_t>(bytes_per_second * static_cast<double>(step) / kSecond);
      meter.look(t, carried);
    }
  }
};

constexpr double kGigabit = 125e6;

TEST(FlowMeter, IsNotSteadyBeforeAnythingWent) { EXPECT_FALSE(FlowMeter().is_steady()); }

TEST(FlowMeter, GradientsAreSteadyOnceEnoughOfThemWent) {
  Line line;
  line.carry(10 * kGigabit, 2 * kMillisecond, 20 * kMicrosecond);  // 2.5 MB
  EXPECT_FALSE(line.meter.is_steady());
  line.carry(10 * kGigabit, 3 * kMillisecond, 20 * kMicrosecond);
  EXPECT_TRUE(line.meter.is_steady());
}

TEST(FlowMeter, SlowLinksHaveSteadyFlowsToo) {
  Line line;
  line.carry(1.05 * kGigabit, 40 * kMillisecond, 50 * kMicrosecond);
  EXPECT_TRUE(line.meter.is_steady());
}

TEST(FlowMeter, AFlowThatEndsIsNotSteadyAnyMore) {
  Line line;
  line.carry(10 * kGigabit, 10 * kMillisecond, 20 * kMicrosecond);
  EXPECT_TRUE(line.meter.is_steady());
  line.carry(0, FlowMeter::kStretch, 50 * kMicrosecond);
  line.carry(0, FlowMeter::kStretch, 50 * kMicrosecond);
  EXPECT_FALSE(line.meter.is_steady());
}

TEST(FlowMeter, AMomentOfSilenceIsEnoughAlsoWhenNobodyLookedMeanwhile) {
  Line line;
  line.carry(10 * kGigabit, 10 * kMillisecond, 20 * kMicrosecond);
  line.t += 100 * kMillisecond;
  line.meter.look(line.t, line.carried);
  EXPECT_FALSE(line.meter.is_steady());
}

TEST(FlowMeter, ShortOperationsOneAfterTheOtherAreNoFlow) {
  Line line;
  for (int i = 0; i < 1000; ++i) {  // 16 KiB, and the caller computes for a millisecond
    line.carried += 16 * 1024;
    line.t += kMillisecond;
    line.meter.look(line.t, line.carried);
  }
  EXPECT_FALSE(line.meter.is_steady());
}

}  // namespace
}  // namespace paceline::engine
