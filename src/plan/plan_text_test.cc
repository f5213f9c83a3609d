// Small plans by heart, what requests are refused, and what the choice is.
#include <gtest/gtest.h>

#include <algorithm>

#include "plan/plan.h"
#include "plan/plan_cases.h"

namespace paceline::plan {
namespace {

using testing::all_reduce;

std::string text(const PlanRequest& q, Rank me) {
  auto plan = build(q, me);
  return plan ? plan->to_string() : plan.status().to_string();
}

TEST(Text, RingOfThreeAverages) {
  PlanRequest q = all_reduce(3, 1, 192);
  q.algorithm = Algorithm::kRing;
  q.op = ReduceOp::kAverage;
  EXPECT_EQ(text(q, 0), R"(rank 0 of 3: ring all-reduce 3×1
   0 send to 1#0 in[0+64]
   1 receive-reduce from 2#0 in[128+64] -> out[128+64]
   2 send to 1#1 out[128+64] after 1
   3 receive-reduce from 2#1 in[64+64] -> out[64+64]
   4 scale -> out[64+64] / 3 after 3
   5 send to 1#2 out[64+64] after 4
   6 receive from 2#2 -> out[0+64] the sum
   7 send to 1#3 out[0+64] after 6
   8 receive from 2#3 -> out[128+64] the sum
)");
}

TEST(Text, InPlaceASumWaitsForNoSendItOverwritesForItCanNotComeBefore) {
  PlanRequest q = all_reduce(2, 1, 128);
  q.algorithm = Algorithm::kDirect;
  q.in_place = true;
  EXPECT_EQ(text(q, 0), R"(rank 0 of 2: direct all-reduce 2×1
   0 send to 1#0 out[64+64]
   1 receive-reduce from 1#0 -> out[0+64]
   2 send to 1#1 out[0+64] after 1
   3 receive from 1#1 -> out[64+64] the sum
)");
}

TEST(Text, InsideANodeTheSumGoesStraightBack) {
  PlanRequest q = all_reduce(2, 2, 128);
  q.algorithm = Algorithm::kDirect;
  q.in_place = true;
  q.op = ReduceOp::kAverage;
  EXPECT_EQ(text(q, 0), R"(rank 0 of 2: direct all-reduce 1×2
   0 send to 1#0 out[64+64] answered at out[64+64]
   1 receive-reduce from 1#0 -> out[0+64] / 2 answering
   2 send to 1#1 out[0+64] unless 1 answered after 1
   3 receive from 1#1 -> out[64+64] the sum
)");
}

TEST(Text, OfThreeInANodeTheLastContributorIsAnswered) {
  PlanRequest q = all_reduce(3, 3, 192);
  q.algorithm = Algorithm::kDirect;
  EXPECT_EQ(text(q, 1), R"(rank 1 of 3: direct all-reduce 1×3
   0 send to 2#0 in[128+64]
   1 receive-reduce from 0#0 in[64+64] -> out[64+64]
   2 send to 0#0 in[0+64] answered at out[0+64]
   3 receive-reduce from 2#0 -> out[64+64] answering after 1
   4 send to 2#1 out[64+64] unless 3 answered after 3
   5 send to 0#1 out[64+64] after 3
   6 receive from 0#1 -> out[0+64] the sum
   7 receive from 2#1 -> out[128+64] the sum
)");
}

TEST(Text, DirectWithFp16) {
  PlanRequest q = all_reduce(2, 1, 128);
  q.algorithm = Algorithm::kDirect;
  q.codec.codec = Codec::kFp16;
  EXPECT_EQ(text(q, 1), R"(rank 1 of 2: direct all-reduce 2×1, fp16 between nodes
   0 encode in[0+64] -> scratch[0+32]
   1 send to 0#0 scratch[0+32] after 0
   2 receive-decode-reduce from 0#0 in[64+64] -> out[64+64]
   3 encode out[64+64] -> scratch[64+32] after 2
   4 send to 0#1 scratch[64+32] after 3
   5 decode scratch[64+32] -> out[64+64] after 3
   6 receive-decode from 0#1 -> out[0+64]
)");
}

TEST(Text, DoublingOfThreeReducesInRankOrder) {
  PlanRequest q = all_reduce(3, 1, 4);
  EXPECT_EQ(text(q, 1), R"(rank 1 of 3: doubling all-reduce 3×1
   0 receive from 0#0 -> scratch[0+4]
   1 reduce in[0+4] -> scratch[0+4] after 0
   2 send to 2#0 scratch[0+4] after 1
   3 receive-reduce from 2#0 scratch[0+4] -> out[0+4] after 1
   4 send to 0#0 out[0+4] after 3
)");
}

TEST(Text, SparseForwardsEncodingsInsideTheNode) {
  PlanRequest q = all_reduce(4, 2, 128);
  q.codec.codec = Codec::kTopK;
  q.codec.ratio = 0.1;
  EXPECT_EQ(text(q, 0), R"(rank 0 of 4: sparse all-reduce 2×2, top-k 10 % between groups
   0 send to 1#0 in[64+64]
   1 receive-reduce from 1#0 in[0+64] -> out[0+64]
   2 encode out[0+64] -> scratch[0+44] after 1
   3 send to 2#0 scratch[0+44] length of 2 after 2
   4 send to 1#1 scratch[0+44] length of 2 after 2
   5 receive from 2#0 -> scratch[64+44] or less
   6 send to 1#2 scratch[64+44] length of 5 after 5
   7 receive from 1#1 -> scratch[128+44] or less
   8 receive from 1#2 -> scratch[192+44] or less
   9 decode-sum scratch[0+108] -> out[0+64] 0+44 by 2 64+44 by 5 after 2,5
  10 decode-sum scratch[128+108] -> out[64+64] 128+44 by 7 192+44 by 8 after 7,8
)");
}

// In place the encoder can add the last neighbour's part itself; of four ranks a node the others' are added before.
TEST(Text, SparseEncodesWithTheLastNeighboursPart) {
  PlanRequest q = all_reduce(8, 4, 256);
  q.codec.codec = Codec::kTopK;
  q.codec.ratio = 0.1;
  q.in_place = true;
  const std::string plan = text(q, 0);
  EXPECT_EQ(plan.substr(0, plan.find("   7 ")),
            R"(rank 0 of 8: sparse all-reduce 2×4, top-k 10 % between groups
   0 send to 1#0 out[64+64]
   1 receive-reduce from 3#0 -> out[0+64]
   2 send to 2#0 out[128+64]
   3 receive-reduce from 2#0 -> out[0+64] after 1
   4 send to 3#0 out[192+64]
   5 receive-reduce from 1#0 -> out[0+64] or holding after 3
   6 encode out[0+64] -> scratch[0+44] with 5 after 5
)");
}

TEST(Text, Summaries) {
  PlanRequest q = all_reduce(8, 4, 1 << 20);
  EXPECT_EQ(build(q, 0)->summary(), "two-level all-reduce 2×4");
  q.codec.codec = Codec::kBf16;
  EXPECT_EQ(build(q, 0)->summary(), "two-level all-reduce 2×4, bf16 between groups");
  q.shape.node_of = {0, 0, 0, 0, 0, 1, 1, 2};
  EXPECT_EQ(build(q, 0)->summary(), "two-level all-reduce 3 groups of 1 to 5, bf16 between groups");
}

// Bytes.

uint64_t sent(const PlanRequest& q, Rank me) { return build(q, me)->bytes_sent(); }

TEST(Bytes, RingAndDirectSendTwiceNMinusOneNths) {
  for (Rank n : {2, 3, 4, 7, 16}) {
    for (auto algorithm : {Algorithm::kRing, Algorithm::kDirect}) {
      PlanRequest q = all_reduce(n, 1, 4 << 20);
      q.algorithm = algorithm;
      double ideal = 2.0 * (n - 1) / n * (4 << 20);
      for (Rank r = 0; r < n; ++r) {
        EXPECT_NEAR(static_cast<double>(sent(q, r)), ideal, 2 * 64 * n)
            << algorithm_name(algorithm);
      }
      q.codec.codec = Codec::kFp16;
      q.algorithm = Algorithm::kDirect;
      EXPECT_NEAR(static_cast<double>(sent(q, 0)), ideal / 2, 64 * n);
    }
  }
}

// Across nodes two-level sends 2 (N-1)/N of the buffer a node, whatever the ranks in it; a flat
// ring sends more.
TEST(Bytes, TwoLevelUsesEachNodesLinkOnce) {
  constexpr uint64_t kBytes = 8 << 20;
  for (int slots : {2, 3, 4}) {
    PlanRequest q = all_reduce(3 * slots, slots, kBytes);
    uint64_t node = 0;
    for (Rank r = 0; r < slots; ++r) node += build(q, r)->inter_node_bytes_sent();
    EXPECT_NEAR(static_cast<double>(node), 2.0 * 2 / 3 * kBytes, 4096) << slots;
  }
}

TEST(Bytes, BroadcastEntersEachNodeOnce) {
  for (auto algorithm : {Algorithm::kRing, Algorithm::kTree}) {
    PlanRequest q = all_reduce(12, 3, 1 << 20);
    q.collective = Collective::kBroadcast;
    q.algorithm = algorithm;
    q.root = 4;
    uint64_t all = 0;
    for (Rank r = 0; r < 12; ++r) all += build(q, r)->inter_node_bytes_sent();
    EXPECT_EQ(all, 3U << 20);
  }
}

TEST(Bytes, BlocksEnterAndLeaveEachNodeOnce) {
  for (auto collective : {Collective::kAllGather, Collective::kReduceScatter}) {
    PlanRequest q = all_reduce(6, 2, 4);
    q.collective = collective;
    q.count = 0;
    q.counts.assign(6, 1000);
    uint64_t all = 0;
    for (Rank r = 0; r < 6; ++r) all += build(q, r)->inter_node_bytes_sent();
    EXPECT_EQ(all, 6U * 2 * 4000) << collective_name(collective);
  }
}

TEST(Bytes, PiecesAreNoLongerThanAskedFor) {
  PlanRequest q = all_reduce(4, 2, 64 << 20);
  q.piece_bytes = 300'000;
  for (auto algorithm : {Algorithm::kRing, Algorithm::kDirect, Algorithm::kTwoLevel,
                         Algorithm::kTree, Algorithm::kDoubling}) {
    q.algorithm = algorithm;
    const Plan plan = *build(q, 1);
    for (const Step& s : plan.steps) EXPECT_LE(message_bytes(q, s), 300'000U);
  }
}

TEST(Bytes, BuffersOverFourGigabytes) {
  for (auto algorithm : {Algorithm::kRing, Algorithm::kTwoLevel, Algorithm::kAuto}) {
    PlanRequest q = all_reduce(4, 2, uint64_t{20} << 30);
    q.algorithm = algorithm;
    q.piece_bytes = 256 << 20;
    auto plan = build(q, 3);
    ASSERT_TRUE(plan);
    uint64_t last = 0;
    for (const Step& s : plan->steps) last = std::max(last, s.dst.offset + s.dst.bytes);
    EXPECT_EQ(last, uint64_t{20} << 30);
    EXPECT_GT(plan->bytes_sent(), uint64_t{9} << 30);
  }
}

TEST(Text, OfManyStepsTheFirstAreShown) {
  PlanRequest q = all_reduce(2, 1, 64 << 20);
  const auto plan = build(q, 0);
  ASSERT_TRUE(plan);
  const std::string whole = plan->to_string(), cut = plan->to_string(3);
  const std::string last = "     and " + std::to_string(plan->steps.size() - 3) + " steps more\n";
  EXPECT_EQ(std::count(whole.begin(), whole.end(), '\n'), plan->steps.size() + 1);
  EXPECT_EQ(std::count(cut.begin(), cut.end(), '\n'), 5);
  EXPECT_EQ(whole.find(cut.substr(0, cut.size() - last.size())), 0U);
  EXPECT_EQ(cut.substr(cut.size() - last.size()), last);
  EXPECT_EQ(plan->to_string(plan->steps.size()), whole);
}

TEST(Text, KindsAreCounted) {
  PlanRequest q = all_reduce(3, 1, 64);
  q.algorithm = Algorithm::kDoubling;
  EXPECT_EQ(build(q, 0)->kinds(), "1 send, 1 receive");
  EXPECT_EQ(build(q, 1)->kinds(), "1 reduce, 2 send, 1 receive, 1 receive-reduce");
}

TEST(Text, SizesAreShort) {
  EXPECT_EQ(size_text(0), "0 B");
  EXPECT_EQ(size_text(1023), "1023 B");
  EXPECT_EQ(size_text(1536), "1.5 KiB");
  EXPECT_EQ(size_text(64 << 20), "64 MiB");
  EXPECT_EQ(size_text(uint64_t{3} << 40), "3072 GiB");
}

// Choice.

TEST(Choose, AnAllToAllsBytesAreAllThatARankGives) {
  PlanRequest q = all_reduce(4, 1, 4 << 20);
  q.collective = Collective::kAllToAll;
  EXPECT_EQ(choose(q).why, "4 ranks on 4 nodes, 16 MiB");
  q.send_counts.assign(16, 1 << 20);  // of all ranks
  EXPECT_EQ(choose(q).why, "4 ranks on 4 nodes, 16 MiB");
  q.send_counts = {1 << 20, 0, 3 << 20, 0};
  q.receive_counts = {1 << 20, 5, 5, 5};
  EXPECT_EQ(choose(q).why, "4 ranks on 4 nodes, 16 MiB");
}

TEST(Choose, ByBytesAndNodes) {
  auto choice = [](Rank n, int slots, uint64_t bytes, Codec codec = Codec::kNone) {
    PlanRequest q = all_reduce(n, slots, bytes);
    q.codec.codec = codec;
    return choose(q).algorithm;
  };
  EXPECT_EQ(choice(2, 2, 4), Algorithm::kDoubling);
  EXPECT_EQ(choice(2, 2, 64 << 20), Algorithm::kDirect);
  EXPECT_EQ(choice(4, 1, 64 << 20), Algorithm::kRing);
  // Two nodes: both send the buffer once, but doubling reduces all of it on both.
  EXPECT_EQ(choice(2, 1, 4 << 20), Algorithm::kRing);
  EXPECT_EQ(choice(4, 1, 64 << 20, Codec::kFp16), Algorithm::kRing);
  EXPECT_EQ(choice(4, 1, 64 << 10, Codec::kFp16), Algorithm::kDirect);
  EXPECT_EQ(choice(16, 1, 64 << 20, Codec::kFp16), Algorithm::kDirect);
  EXPECT_EQ(choice(4, 2, 64 << 20), Algorithm::kTwoLevel);
  EXPECT_EQ(choice(4, 2, 64 << 20, Codec::kTopK), Algorithm::kSparse);
  EXPECT_EQ(choice(4, 4, 64 << 20, Codec::kTopK), Algorithm::kDirect);
  // A thousand ranks: a ring's hops cost more than what doubling sends in excess.
  EXPECT_EQ(choice(1024, 1, 256 << 10), Algorithm::kDoubling);
  EXPECT_EQ(choice(1024, 1, 1 << 30), Algorithm::kRing);
}

// Bad input.

void expect_refused(const PlanRequest& q, Rank me, Code code, const std::string& naming) {
  auto plan = build(q, me);
  ASSERT_FALSE(plan) << naming;
  EXPECT_EQ(plan.status().code(), code) << plan.status().to_string();
  EXPECT_NE(plan.status().message().find(naming), std::string::npos) << plan.status().to_string();
}

TEST(Validate, NamesTheField) {
  PlanRequest good = all_reduce(4, 2, 1024);
  auto with = [&](auto change) {
    PlanRequest q = good;
    change(q);
    return q;
  };
  using Q = PlanRequest&;
  expect_refused(good, 4, Code::kInvalidArgument, "rank 4");
  expect_refused(with([](Q q) { q.shape.node_of.pop_back(); }), 0, Code::kInvalidArgument,
                 "node_of");
  expect_refused(with([](Q q) { q.shape.size = 0; }), 0, Code::kInvalidArgument, "shape.size");
  expect_refused(with([](Q q) { q.root = -1; }), 0, Code::kInvalidArgument, "root");
  expect_refused(with([](Q q) { q.lanes = 0; }), 0, Code::kInvalidArgument, "lanes");
  expect_refused(with([](Q q) { q.piece_bytes = 3; }), 0, Code::kInvalidArgument, "piece_bytes");
  expect_refused(with([](Q q) { q.dtype = static_cast<DType>(77); }), 0, Code::kInvalidArgument,
                 "dtype");
  expect_refused(with([](Q q) { q.count = UINT64_MAX / 2; }), 0, Code::kInvalidArgument, "count");
  expect_refused(with([](Q q) { q.dtype = DType::kInt32, q.op = ReduceOp::kAverage; }), 0,
                 Code::kInvalidArgument, "average of int32");
  expect_refused(with([](Q q) { q.collective = Collective::kAllGather; }), 0,
                 Code::kInvalidArgument, "counts");
  expect_refused(
      with([](Q q) { q.collective = Collective::kAllToAll, q.send_counts.assign(4, 1); }), 0,
      Code::kInvalidArgument, "receive_counts");
  expect_refused(with([](Q q) { q.codec.codec = Codec::kFp16, q.dtype = DType::kFloat64; }), 0,
                 Code::kUnsupported, "float64");
  expect_refused(with([](Q q) { q.codec.codec = Codec::kFp16, q.algorithm = Algorithm::kRing; }), 0,
                 Code::kUnsupported, "ring");
  expect_refused(with([](Q q) { q.codec.codec = Codec::kTopK, q.op = ReduceOp::kMax; }), 0,
                 Code::kUnsupported, "max");
  expect_refused(with([](Q q) { q.codec.codec = Codec::kTopK, q.codec.ratio = 0; }), 0,
                 Code::kInvalidArgument, "ratio");
  expect_refused(with([](Q q) { q.algorithm = Algorithm::kSparse; }), 0, Code::kInvalidArgument,
                 "top-k");
  expect_refused(
      with([](Q q) { q.collective = Collective::kBroadcast, q.algorithm = Algorithm::kDirect; }), 0,
      Code::kUnsupported, "broadcast");
  for (auto c : {Collective::kAllToAll, Collective::kGather, Collective::kScatter}) {
    expect_refused(with([&](Q q) {
                     q.collective = c, q.in_place = true;
                     q.counts.assign(4, 1), q.send_counts.assign(16, 1);
                   }),
                   0, Code::kUnsupported, "in place");
  }
  expect_refused(with([](Q q) { q.codec.codec = Codec::kTopK, q.count = uint64_t{1} << 32; }), 0,
                 Code::kUnsupported, "top-k of 4294967296 elements");
}

// Plans are built in the submitting call, once per shape of request.
// Building takes time and memory by steps; a thousand ranks must not have a million.
TEST(Size, AThousandRanksHaveAFewStepsEach) {
  PlanRequest q = all_reduce(1024, 1, 64 << 20);
  q.algorithm = Algorithm::kRing;
  auto plan = build(q, 517);
  ASSERT_TRUE(plan);
  EXPECT_GE(plan->steps.size(), 4 * 1023U);
  EXPECT_LE(plan->steps.size(), 16 * 1023U);
}

}  // namespace
}  // namespace paceline::plan
