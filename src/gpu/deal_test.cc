#include "gpu/deal.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace paceline::gpu {
namespace {

TEST(Deal, EveryByteGoesOnceAndNoWireTwice) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 20000; ++i) {
    const int wires = 1 + static_cast<int>(random() % kMostWires);
    const uint64_t least = i % 2 == 0 ? kLeastSlice : kMostWires * kSliceAlign;
    const uint64_t bytes = random() % (least * 24) / (1 + random() % 64);
    const Deal deal(bytes, random(), wires, least);
    uint64_t at = 0;
    std::set<int> used;
    for (const auto& s : deal) {
      ASSERT_EQ(s.first, at);
      ASSERT_EQ(s.first % kSliceAlign, 0U);
      ASSERT_GT(s.bytes, 0U);
      ASSERT_TRUE(used.insert(s.wire).second);
      ASSERT_TRUE(s.wire >= 0 && s.wire < wires);
      at += s.bytes;
    }
    ASSERT_EQ(at, bytes);
    ASSERT_EQ(deal.count(), static_cast<int>(used.size()));
    const auto most = static_cast<uint64_t>(wires);
    ASSERT_EQ(deal.count(),
              bytes == 0 ? 0 : static_cast<int>(std::clamp<uint64_t>(bytes / least, 1, most)));
  }
}

TEST(Deal, LongAndShortMessagesLoadAllWiresAlike) {
  for (int wires = 1; wires <= kMostWires; ++wires) {
    for (uint64_t bytes : {uint64_t{1000}, uint64_t{300} << 10, uint64_t{4} << 20}) {
      std::vector<uint64_t> load(static_cast<size_t>(wires));
      constexpr uint64_t kMessages = 840;  // divided by every number of wires
      for (uint64_t n = 0; n < kMessages; ++n) {
        for (const auto& s : Deal(bytes, n, wires)) load[static_cast<size_t>(s.wire)] += s.bytes;
      }
      for (auto l : load) EXPECT_EQ(l, kMessages * bytes / static_cast<uint64_t>(wires));
    }
  }
}

TEST(Deal, AThreadMoreWhereEachRankHasFourCores) {
  EXPECT_EQ(fitting_wires(1, 3), 1);
  EXPECT_EQ(fitting_wires(1, 4), 2);
  EXPECT_EQ(fitting_wires(1, 7), 2);
  EXPECT_EQ(fitting_wires(1, 8), 4);
  EXPECT_EQ(fitting_wires(1, 192), 4);
  EXPECT_EQ(fitting_wires(2, 7), 1);
  EXPECT_EQ(fitting_wires(2, 8), 2);
  EXPECT_EQ(fitting_wires(8, 192), 2);
}

}  // namespace
}  // namespace paceline::gpu
