#include "gpu/host_ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace paceline::gpu {
namespace {

TEST(HostRing, WhatALaterRegionLeavesOfAnEarlierOneStillHasItsTenant) {
  HostRing ring(1000);
  EXPECT_EQ(ring.take(600, 1).tenant, 0U);
  EXPECT_EQ(ring.take(400, 2).tenant, 0U);
  const auto small = ring.take(10, 3);
  EXPECT_EQ(small.offset, 0U);
  EXPECT_EQ(small.tenant, 1U);
  const auto next = ring.take(300, 4);
  EXPECT_EQ(next.offset, 10U);
  EXPECT_EQ(next.tenant, 1U);
  EXPECT_EQ(ring.take(400, 5).tenant, 2U);  // the end of the first's, the begin of the second's
}

TEST(HostRing, ARegionOfNothingIsInNobodysWay) {
  HostRing ring(100);
  EXPECT_EQ(ring.take(0, 1).tenant, 0U);
  EXPECT_EQ(ring.take(100, 2).tenant, 0U);
  EXPECT_EQ(ring.take(0, 3).tenant, 0U);
  EXPECT_EQ(ring.take(100, 4).tenant, 2U);
}

TEST(HostRing, TenantsAreTheLastUsersOfEveryByte) {
  for (unsigned seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const uint64_t size = 1 + random() % 300;
    HostRing ring(size);
    std::vector<uint64_t> user(size, 0);
    for (uint64_t sequence = 1; sequence <= 200; ++sequence) {
      // Most regions are small: one must find parts of several others, and leave parts, too.
      const uint64_t bytes = random() % 4 == 0 ? random() % (size + 1) : random() % (size / 8 + 1);
      const auto region = ring.take(bytes, sequence);
      ASSERT_LE(region.offset + bytes, size);
      const auto begin = user.begin() + static_cast<std::ptrdiff_t>(region.offset);
      const auto end = begin + static_cast<std::ptrdiff_t>(bytes);
      ASSERT_EQ(region.tenant, bytes == 0 ? 0 : *std::max_element(begin, end));
      std::fill(begin, end, sequence);
    }
  }
}

}  // namespace
}  // namespace paceline::gpu
