// What operations of other sizes have called for is given back when it is asked for, and in the end.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <vector>

#include "base/testing/allocated.h"
#include "codec/codec.h"
#include "engine/engine_test_util.h"

namespace paceline::engine {
namespace {

using paceline::testing::allocated;

constexpr std::size_t kElements = 4 << 20;
constexpr std::size_t kKept = kElements / 100;

class Trim : public ::testing::Test {
 protected:
  Trim() {
    std::mt19937_64 random(5);
    for (auto& rank : data_) rank = random_values<float>(random, kElements);
    codec::forget_topk_sizes();  // other tests'
  }
  /// One all-reduce.
  void run(Cluster& cluster, plan::Codec codec) {
    std::vector<OpId> ids;
    for (Rank r = 0; r < 2; ++r) {
      Operation o;
      o.count = kElements;
      o.input = o.output = data_.at(static_cast<std::size_t>(r)).data();
      o.codec.codec = codec;
      o.codec.ratio = static_cast<double>(kKept) / kElements;
      const auto id = cluster[r].submit(o, cluster.now);
      ASSERT_TRUE(id) << id.status().to_string();
      ids.push_back(*id);
    }
    cluster.expect_ok(ids);
  }
  static std::size_t scratch(Cluster& cluster) {
    return cluster[0].statistics().scratch_bytes + cluster[1].statistics().scratch_bytes;
  }
  /// How much trim() frees.
  static std::size_t freed(Cluster& cluster) {
    const std::size_t before = allocated();
    for (Rank r = 0; r < 2; ++r) cluster[r].trim();
    return before - allocated();
  }
  std::array<std::vector<float>, 2> data_;
};

TEST_F(Trim, FreesScratch) {
  Cluster cluster(2);
  run(cluster, plan::Codec::kFp16);
  EXPECT_GE(scratch(cluster), 2 * kElements);  // or it would show nothing
  EXPECT_GE(freed(cluster), scratch(cluster));
}

TEST_F(Trim, FreesWhatTopKWorkedWith) {
  Cluster cluster(2);
  run(cluster, plan::Codec::kTopK);
  EXPECT_GE(freed(cluster), scratch(cluster) + 16 * kKept);
}

TEST_F(Trim, AnEnginesEndIsOneToo) {
  const std::size_t before = allocated();
  {
    Cluster cluster(2);
    run(cluster, plan::Codec::kTopK);
    EXPECT_GT(allocated(), before + 16 * kKept);
  }
  EXPECT_LT(allocated(), before + 8 * kKept);
}

}  // namespace
}  // namespace paceline::engine
