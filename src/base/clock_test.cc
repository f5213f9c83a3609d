#include "base/clock.h"

#include <gtest/gtest.h>

#include <cmath>

namespace paceline {
namespace {

TEST(Clock, SecondsThatNoClockHoldsAreForEverOrNone) {
  EXPECT_EQ(to_time(1.5), 1500 * kMillisecond);
  EXPECT_EQ(to_time(1e-9), 1);
  for (const double none : {0.0, -0.0, -1.0, -HUGE_VAL, std::nan("")}) EXPECT_EQ(to_time(none), 0);
  for (const double more : {9e9, 1e10, 1e300, HUGE_VAL}) EXPECT_EQ(to_time(more), kNever);
}

TEST(Clock, NothingIsLaterThanNever) {
  EXPECT_EQ(after(5, 7), 12);
  EXPECT_EQ(after(kSecond, kNever), kNever);
  EXPECT_EQ(after(kNever, 1), kNever);
  EXPECT_EQ(after(kNever - 5, 4), kNever - 1);
}

}  // namespace
}  // namespace paceline
