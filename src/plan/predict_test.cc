// What plans cost: bytes of every link, messages that follow each other, and time.
#include <gtest/gtest.h>

#include "plan/hops.h"
#include "plan/plan.h"
#include "plan/plan_cases.h"

namespace paceline::plan {
namespace {

using testing::all_reduce;

TEST(Predict, HeadersOfEveryPacketAndOurFrames) {
  PlanRequest q = all_reduce(4, 1, 64 << 20);
  auto p = predict(q, 1e9);
  ASSERT_TRUE(p);
  EXPECT_NEAR(static_cast<double>(p->payload_bytes), 1.5 * (64 << 20), 4096);
  double over = static_cast<double>(p->link_bytes) / static_cast<double>(p->payload_bytes);
  // 66 bytes on each 1,448; our frames' 64 per piece, and the acknowledgements, are little beside
  // it.
  EXPECT_GT(over, 1514.0 / 1448);
  EXPECT_LT(over, 1514.0 / 1448 + 0.004);
  EXPECT_NEAR(p->seconds, static_cast<double>(p->link_bytes) * 8 / 1e9, 1e-9);
  auto jumbo = predict(q, 1e9, Packets::of_mtu(9000));
  EXPECT_LT(jumbo->link_bytes, p->link_bytes);
  EXPECT_EQ(jumbo->payload_bytes, p->payload_bytes);
}

// Two nodes, 8 MiB in messages of 512 KiB, worked out by hand.
TEST(Predict, EveryByteOfTheLinkIsAccountedFor) {
  PlanRequest q = all_reduce(2, 1, 8 << 20);
  q.algorithm = Algorithm::kRing;
  q.piece_bytes = 512 << 10;
  // A node sends half of it to be summed and half of it as sums: 16 messages, each of two pieces with a header of 64.
  const uint64_t wire = 8'388'608 + 32 * 64;
  // And "ready" and "done" for each of the 16 that come.
  const uint64_t stream = wire + 32 * 64;
  const uint64_t packets = 5797;          // of 1,448 bytes
  const uint64_t acknowledgements = 129;  // of 64 KiB each of what comes
  EXPECT_EQ(predict(q, 1e9)->link_bytes, stream + (packets + acknowledgements) * 66);
  EXPECT_EQ(predict(q, 1e9)->link_bytes, 8'783'820U);
  // 8,948 bytes a packet of 9,000; and IPv6's header takes 20 more out of it.
  EXPECT_EQ(predict(q, 1e9, Packets::of_mtu(9000))->link_bytes, stream + (938 + 129) * 66);
  EXPECT_EQ(predict(q, 1e9, Packets::of_mtu(9000, true))->link_bytes, stream + (941 + 129) * 86);
}

TEST(Predict, AgreesWithThePlans) {
  for (Rank n : {3, 8}) {
    for (auto codec : {Codec::kNone, Codec::kFp16, Codec::kTopK}) {
      PlanRequest q = all_reduce(n, 2, 3 << 20);
      q.codec.codec = codec;
      std::vector<uint64_t> out(static_cast<std::size_t>(n)), in(out);
      uint64_t busiest = 0;
      for (Rank r = 0; r < n; ++r) {
        const Plan plan = *build(q, r);
        for (const Step& s : plan.steps) {
          if (s.kind != StepKind::kSend || r / 2 == s.peer / 2) continue;
          out[static_cast<std::size_t>(r / 2)] += s.src.bytes;
          in[static_cast<std::size_t>(s.peer / 2)] += s.src.bytes;
        }
      }
      for (std::size_t i = 0; i < out.size(); ++i) busiest = std::max({busiest, out[i], in[i]});
      EXPECT_EQ(predict(q, 1e9)->payload_bytes, busiest);
    }
  }
}

TEST(Predict, NothingLeavesASingleNode) {
  PlanRequest q = all_reduce(4, 4, 1 << 20);
  EXPECT_EQ(predict(q, 1e9)->link_bytes, 0U);
}

/// Elements of a rank's block, by rank.
PlanRequest of_blocks(Collective collective, int slots, std::vector<uint64_t> counts) {
  PlanRequest q = all_reduce(static_cast<Rank>(counts.size()), slots, 0);
  q.collective = collective;
  q.counts = std::move(counts);
  return q;
}

// Three nodes of two: bytes of the stream by hand, where messages are too short for answers.
TEST(Predict, EveryLinkHasItsOwnBytes) {
  constexpr uint64_t kPacket = 66, kFrame = 64;
  const auto p = predict(of_blocks(Collective::kGather, 2, {100, 200, 300, 400, 500, 600}), 1e9);
  ASSERT_TRUE(p);
  // To rank 0: the first node sends nothing but acknowledgements.
  const auto to_root = [&](uint64_t elements) { return elements * 4 + 2 * kFrame; };
  const uint64_t second = to_root(700), third = to_root(1100);
  const auto packets = [&](uint64_t bytes) { return (bytes + 1447) / 1448 * kPacket; };
  const uint64_t received = second + third;
  EXPECT_EQ(p->links, (std::vector<LinkBytes>{{kPacket, received + packets(received)},
                                              {second + packets(second), kPacket},
                                              {third + packets(third), kPacket}}));
  EXPECT_EQ(p->link_bytes, p->links[0].received);
  EXPECT_EQ(p->payload_bytes, 1800 * 4U);
}

// A rank knows its own counts alone; with equal ones its prediction is what all ranks' counts give.
TEST(Predict, AllToAllCountsEveryRankOfTheNode) {
  for (const int slots : {1, 2, 4}) {
    PlanRequest q = all_reduce(8, slots, 0);
    q.collective = Collective::kAllToAll;
    q.send_counts.assign(64, 50'000);
    const auto whole = predict(q, 1e9);
    q.send_counts.assign(8, 50'000);
    q.receive_counts = q.send_counts;
    const auto own = predict(q, 1e9, {}, 5);
    ASSERT_TRUE(whole && own);
    EXPECT_EQ(own->links, whole->links) << slots;
    EXPECT_EQ(own->payload_bytes, static_cast<uint64_t>(slots * (8 - slots)) * 200'000);
    q.receive_counts.assign(8, 90'000);  // more comes in than goes out
    const auto more = predict(q, 1e9, {}, 5);
    ASSERT_TRUE(more);
    EXPECT_LT(more->links[0].sent, more->links[0].received);
    EXPECT_EQ(more->payload_bytes, static_cast<uint64_t>(slots * (8 - slots)) * 360'000) << slots;
  }
}

TEST(Predict, AnAllToAllOfEqualCountsIsThatOfAllRanksOnUnevenNodes) {
  PlanRequest q = all_reduce(4, 1, 0);
  q.shape.node_of = {0, 0, 1, 2};
  q.collective = Collective::kAllToAll;
  q.send_counts.assign(16, 50'000);
  const auto whole = predict(q, 1e9);
  ASSERT_TRUE(whole);
  EXPECT_GT(whole->links[0].sent, whole->links[1].sent) << "two ranks there, one here";
  q.send_counts.assign(4, 50'000);
  q.receive_counts = q.send_counts;
  for (const Rank me : {0, 2}) {
    const auto own = predict(q, 1e9, {}, me);
    ASSERT_TRUE(own);
    EXPECT_EQ(own->links, whole->links) << me;
    EXPECT_EQ(own->payload_bytes, whole->payload_bytes) << me;
  }
}

// Hops.

TEST(Predict, TimeIsEveryHopsLatencyAndTheBusiestLinksBytes) {
  PlanRequest q = all_reduce(4, 1, 1 << 20);
  q.algorithm = Algorithm::kRing;
  const auto far = predict(q, 1e9, {}, 0, 1e-3);
  ASSERT_TRUE(far);
  EXPECT_EQ(far->hops, 6);
  EXPECT_NEAR(far->seconds, 6e-3 + static_cast<double>(far->link_bytes) * 8 / 1e9, 1e-12);
  const auto unknown = predict(q, 1e9);
  EXPECT_EQ(unknown->hops, 0);
  EXPECT_NEAR(unknown->seconds, far->seconds - 6e-3, 1e-12);
  EXPECT_EQ(unknown->links, far->links);
  EXPECT_EQ(predict(q, 1e9, {}, 0, -1e-3).status().code(), Code::kInvalidArgument);
}

int hops(const PlanRequest& q, Rank me = 0) { return predict(q, 1e9, {}, me, 1e-6)->hops; }

TEST(Predict, HopsOfEveryAlgorithm) {
  const auto of = [](Rank ranks, int slots, Algorithm algorithm, Codec codec = Codec::kNone) {
    PlanRequest q = all_reduce(ranks, slots, 8 << 20);
    q.algorithm = algorithm;
    q.codec.codec = codec;
    return hops(q);
  };
  EXPECT_EQ(of(5, 1, Algorithm::kRing), 8);
  EXPECT_EQ(of(5, 1, Algorithm::kRing, Codec::kFp16), 8);
  EXPECT_EQ(of(8, 1, Algorithm::kDoubling), 3);
  EXPECT_EQ(of(7, 1, Algorithm::kDoubling),
            4);  // three hand theirs to others, who hand them the sum
  EXPECT_EQ(of(8, 1, Algorithm::kTree), 6);
  EXPECT_EQ(of(7, 1, Algorithm::kDirect), 2);
  EXPECT_EQ(of(8, 2, Algorithm::kTwoLevel), 6);  // a ring between nodes
  EXPECT_EQ(of(8, 2, Algorithm::kSparse, Codec::kTopK), 1);
  EXPECT_EQ(of(4, 4, Algorithm::kDirect), 0);
  EXPECT_EQ(of(1, 1, Algorithm::kAuto), 0);
}

TEST(Predict, HopsOfEveryCollective) {
  PlanRequest q = all_reduce(6, 1, 8 << 20);
  q.algorithm = Algorithm::kRing;
  for (const auto in_a_chain : {Collective::kBroadcast, Collective::kReduce}) {
    q.collective = in_a_chain;
    EXPECT_EQ(hops(q), 5);
  }
  for (const auto of_blocks_of_each : {Collective::kAllGather, Collective::kReduceScatter}) {
    q = of_blocks(of_blocks_of_each, 1, std::vector<uint64_t>(6, 1 << 18));
    q.algorithm = Algorithm::kRing;
    EXPECT_EQ(hops(q), 5);
  }
  q = of_blocks(Collective::kScatter, 2, std::vector<uint64_t>(6, 7));
  EXPECT_EQ(hops(q), 1);
  q.collective = Collective::kBarrier;
  q.counts.clear();
  EXPECT_EQ(hops(q), 3);
  q.collective = Collective::kAllToAll;
  q.send_counts.assign(6, 1 << 18);
  q.receive_counts = q.send_counts;
  EXPECT_EQ(hops(q, 3), 1);
}

// They are counted in plans of few pieces; those that are run have many, which go side by side.
TEST(Predict, HopsAreThoseOfThePlansThatAreRun) {
  const unsigned seed = std::random_device{}();
  testing::Dice dice(seed);
  for (int i = 0; i < 60; ++i) {
    PlanRequest q;
    q.shape = testing::random_shape(dice, static_cast<Rank>(dice.between(1, 9)));
    q.count = dice.between(1, 1 << 20);
    q.piece_bytes = dice.one_of<uint64_t>({4096, 65536, 524288});
    q.codec.codec = dice.one_of({Codec::kNone, Codec::kFp16, Codec::kTopK});
    Hops whole(q.shape);
    for (Rank r = 0; r < q.shape.size; ++r) {
      const auto plan = build(q, r);
      ASSERT_TRUE(plan) << "seed " << seed << ": " << plan.status().to_string();
      whole.add(*plan);
    }
    EXPECT_EQ(hops(q), whole.longest()) << "seed " << seed << ": " << build(q, 0)->summary();
  }
}

TEST(Predict, HopsOfManyRanksAreCounted) {
  PlanRequest q = all_reduce(256, 1, 64 << 20);
  q.algorithm = Algorithm::kRing;
  EXPECT_EQ(hops(q), 510);
}

}  // namespace
}  // namespace paceline::plan
