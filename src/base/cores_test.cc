// How many threads suit the cores that a rank has.
#include "base/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

namespace paceline {
namespace {

TEST(Cores, ARankCodesWithHalfOfItsShare) {
  EXPECT_EQ(fitting_codec_threads(4, 16, 16), 2);
  EXPECT_EQ(fitting_codec_threads(1, 16, 16), 4);  // four at most
  EXPECT_EQ(fitting_codec_threads(4, 2, 2), 1);    // one at least
  EXPECT_EQ(fitting_codec_threads(2, 2, 2), 1);
  EXPECT_EQ(fitting_codec_threads(0, 8, 8), 4);
}

TEST(Cores, RanksThatAreBoundApartShareNothing) {
  EXPECT_EQ(fitting_codec_threads(4, 4, 16), 2);
  EXPECT_EQ(fitting_codec_threads(4, 8, 16), 1);  // not apart: eight for all of them
}

TEST(Cores, UsableAreThoseThatTheThreadMayRunOn) {
  EXPECT_GE(machine_cores(), usable_cores());
  std::thread([] {
    cpu_set_t set, one;
    ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++i)
      if (CPU_ISSET(i, &set)) CPU_SET(i, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(usable_cores(), 1);
  }).join();
}

}  // namespace
}  // namespace paceline
