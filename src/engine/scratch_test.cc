// Scratch is bounded by the largest operation, comes back, and is used again where it fits.
#include "engine/scratch.h"

#include <gtest/gtest.h>

#include <cstring>

namespace paceline::engine {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kBound = 24 * kMiB;  // of a bucket of 16 MiB

class Pool : public testing::Test {
 protected:
  Pool() { pool_.note_bucket(16 * kMiB); }
  Scratch take(uint64_t bytes) {
    auto scratch = pool_.acquire(bytes, false);
    EXPECT_TRUE(scratch.has_value() && scratch->data != nullptr);
    if (scratch) std::memset(scratch->data, 0x5a, bytes);
    return scratch.value_or(Scratch{});
  }
  ScratchPool pool_;
};

TEST_F(Pool, ItsBoundHoldsUnlessForced) {
  const Scratch first = take(kBound - kMiB);
  EXPECT_FALSE(pool_.acquire(2 * kMiB, false).has_value());
  const auto forced = pool_.acquire(2 * kMiB, true);
  ASSERT_TRUE(forced.has_value());
  EXPECT_FALSE(pool_.acquire(1, false).has_value());
  pool_.release(*forced);
  const Scratch second = take(kMiB);
  pool_.release(first);
  // An operation that takes more than the bound by itself is not held up for ever.
  pool_.release(second);
  pool_.release(take(2 * kBound));
}

TEST_F(Pool, IdleMemoryIsKeptUpToTheBound) {
  const Scratch a = take(kBound / 2), b = take(kBound / 2);
  const auto c = pool_.acquire(kBound / 2, true);
  ASSERT_TRUE(c.has_value());
  EXPECT_EQ(pool_.held(), 3 * kBound / 2);
  for (const Scratch& s : {a, b, *c}) pool_.release(s);
  EXPECT_EQ(pool_.held(), kBound);
  EXPECT_EQ(pool_.high_water(), 3 * kBound / 2);
  // What does not fit goes before more is asked for.
  const Scratch large = take(3 * kBound / 4);
  EXPECT_LE(pool_.held(), kBound);
  pool_.release(large);
}

TEST_F(Pool, ManySmallPiecesHaveLessThanTwoLargeOnes) {
  std::vector<Scratch> pieces;
  for (int i = 0; i < 4; ++i) pieces.push_back(take(4 * kMiB));
  EXPECT_FALSE(pool_.acquire(4 * kMiB, false).has_value());
  for (const Scratch& s : pieces) pool_.release(s);
  EXPECT_EQ(pool_.held(), 16 * kMiB);
  const Scratch a = take(12 * kMiB), b = take(12 * kMiB);
  EXPECT_EQ(pool_.held(), kBound);
  pool_.release(a);
  pool_.release(b);
  EXPECT_EQ(pool_.held(), kBound);  // for the next two
}

TEST(ScratchPool, ManyPiecesOfASmallBucketLeaveRoomForWhatElseAStepTakes) {
  const auto most = [](uint64_t bucket) {
    ScratchPool pool;
    pool.note_bucket(bucket);
    while (const auto piece = pool.acquire(ScratchPool::kAlign, false))
      EXPECT_NE(piece->data, nullptr);
    return pool.held();
  };
  EXPECT_EQ(most(kMiB / 4), ScratchPool::kFloor);
  EXPECT_EQ(most(kMiB), 2 * kMiB - ScratchPool::kOthers);
  EXPECT_EQ(most(9 * kMiB / 8), kMiB);
  EXPECT_EQ(most(2 * kMiB), 2 * kMiB);
}

TEST_F(Pool, APieceIsUsedAgainWhereItWastesAtMostHalf) {
  const Scratch large = take(8 * kMiB);
  pool_.release(large);
  const Scratch small = take(kMiB);
  EXPECT_NE(small.data, large.data);
  const Scratch fits = take(5 * kMiB);
  EXPECT_EQ(fits.data, large.data);
  EXPECT_EQ(fits.bytes, large.bytes);
  pool_.release(fits);
  pool_.release(small);
  EXPECT_EQ(pool_.held(), 9 * kMiB);
}

TEST_F(Pool, ALargeOperationIsForgottenWhenNoneComesForLong) {
  pool_.release(take(kBound));
  const auto pass = [&](uint64_t operations) {
    for (uint64_t i = 0; i < operations; ++i) pool_.note_bucket(kMiB);
  };
  for (int i = 0; i < 5; ++i) {  // one in each pass: its memory stays
    pass(ScratchPool::kRemembered - 1);
    EXPECT_EQ(pool_.held(), kBound);
    pool_.note_bucket(16 * kMiB);
  }
  pass(2 * ScratchPool::kRemembered);
  EXPECT_EQ(pool_.held(), 0U);
  const Scratch small = take(ScratchPool::kFloor);
  EXPECT_FALSE(pool_.acquire(kMiB, false).has_value());
  pool_.release(small);
}

TEST_F(Pool, NothingIdleStaysWhenTheBucketsBecomeOthers) {
  const Scratch idle = take(ScratchPool::kFloor / 2), lent = take(ScratchPool::kFloor / 4);
  pool_.release(idle);
  pool_.forget_buckets();
  EXPECT_EQ(pool_.held(), lent.bytes);
  pool_.release(lent);
  EXPECT_EQ(pool_.held(), ScratchPool::kFloor / 4);
}

}  // namespace
}  // namespace paceline::engine
