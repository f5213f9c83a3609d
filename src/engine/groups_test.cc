// Groups over the same ranks, and the end of a group that is in use.
#include <gtest/gtest.h>

#include <array>

#include "engine/engine_test_util.h"
#include "engine/scratch.h"

namespace paceline::engine {
namespace {

class SameRanks : public testing::Test {
 protected:
  void SetUp() override {
    for (Rank r = 0; r < 2; ++r) {
      for (auto& group : groups_.at(static_cast<std::size_t>(r)))
        group = *cluster_[r].create_group(std::array<Rank, 2>{0, 1});
    }
  }
  OpId submit(Rank r, std::size_t group, std::vector<float>& data) {
    Operation o;
    o.group = groups_.at(static_cast<std::size_t>(r)).at(group);
    o.input = o.output = data.data();
    o.count = data.size();
    auto id = cluster_[r].submit(o, cluster_.now);
    EXPECT_TRUE(id) << id.status().to_string();
    return id ? *id : 0;
  }
  /// One buffer a rank.
  std::vector<std::vector<float>> values() {
    return {random_values<float>(random_, 3000), random_values<float>(random_, 3000)};
  }
  static std::vector<std::vector<float>> sums(const std::vector<std::vector<float>>& of) {
    return {2, reduced(ReduceOp::kSum, of)};
  }
  std::mt19937_64 random_{21};
  Cluster cluster_{2};
  std::array<std::array<GroupId, 2>, 2> groups_{};
};

TEST_F(SameRanks, TwoGroupsAreTwo) {
  auto first = values(), second = values();
  const auto first_sums = sums(first), second_sums = sums(second);
  const OpId a0 = submit(0, 0, first[0]), b0 = submit(0, 1, second[0]);
  const OpId b1 = submit(1, 1, second[1]), a1 = submit(1, 0, first[1]);
  cluster_.expect_ok({a0, a1});
  cluster_.expect_ok({b0, b1});
  EXPECT_EQ(first, first_sums);
  EXPECT_EQ(second, second_sums);
}

TEST_F(SameRanks, AGroupIsNotDestroyedUnderItsOperations) {
  auto data = values();
  const auto wanted = sums(data);
  const OpId here = submit(0, 0, data[0]);
  const auto refused = cluster_[0].destroy_group(groups_[0][0]);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_NE(refused.message().find("has not ended"), std::string::npos) << refused.message();
  EXPECT_TRUE(cluster_[0].destroy_group(groups_[0][1])) << "the other one is not in use";
  cluster_.expect_ok({here, submit(1, 0, data[1])});
  EXPECT_EQ(data, wanted);
  EXPECT_TRUE(cluster_[0].destroy_group(groups_[0][0]));
}

// Five operations whose scratch would not fit at once in what one group's small operations share.
TEST(SeveralGroups, OppositeOrdersWaitForNobody) {
  constexpr std::size_t kGroups = 5, kElements = 1 << 18;
  Cluster cluster(2);
  std::vector<std::array<GroupId, kGroups>> groups(2);
  for (Rank r = 0; r < 2; ++r)
    for (auto& group : groups.at(static_cast<std::size_t>(r)))
      group = *cluster[r].create_group(std::array<Rank, 2>{0, 1});
  std::array<std::array<std::vector<float>, kGroups>, 2> data;
  std::array<std::array<OpId, kGroups>, 2> ids{};
  for (Rank r = 0; r < 2; ++r) {
    const auto rank = static_cast<std::size_t>(r);
    for (std::size_t i = 0; i < kGroups; ++i) {
      const std::size_t at = r == 0 ? i : kGroups - 1 - i;
      data[rank][at].assign(kElements, 1);
      Operation o;
      o.group = groups[rank][at];
      o.count = kElements;
      o.input = o.output = data[rank][at].data();
      o.codec.codec = plan::Codec::kFp16;
      const auto id = cluster[r].submit(o, cluster.now);
      ASSERT_TRUE(id) << id.status().to_string();
      ids[rank][at] = *id;
    }
  }
  for (std::size_t at = 0; at < kGroups; ++at) {
    cluster.expect_ok({ids[0][at], ids[1][at]});
    EXPECT_EQ(data[0][at], std::vector<float>(kElements, 2));
    EXPECT_EQ(data[1][at], data[0][at]);
  }
  EXPECT_GT(cluster[0].statistics().scratch_bytes,
            ScratchPool::kFloor);  // or it would show nothing
  EXPECT_EQ(cluster.now, 0) << "nothing had to wait for a patience to end";
}

}  // namespace
}  // namespace paceline::engine
