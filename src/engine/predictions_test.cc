// What is predicted of the links: for plans that are kept and for those that leave the cache, in the wire's own numbers.
#include <gtest/gtest.h>

#include <vector>

#include "base/packets.h"
#include "base/testing/allocated.h"
#include "engine/engine_test_util.h"
#include "plan/plan.h"
#include "wire/protocol.h"

namespace paceline::engine {
namespace {

// Plans of more kinds than the cache holds leave it while they are under way.
TEST(Plans, ManyKindsAtOnceAreCountedAndLeaveNoMemoryBehind) {
  constexpr uint64_t kKinds = 400;
  Cluster cluster(2);
  std::vector<float> data[2] = {std::vector<float>(2000), std::vector<float>(2000)};
  const auto operation = [&](Rank r, uint64_t kind) {
    auto& mine = data[static_cast<std::size_t>(r)];
    Operation o;
    o.input = o.output = mine.data();
    o.count = 1000 + kind;
    return o;
  };
  const auto step = [&] {
    std::vector<std::vector<OpId>> ids(kKinds);
    for (uint64_t k = 0; k < kKinds; ++k) {
      for (Rank r = 0; r < 2; ++r)
        ids[k].push_back(*cluster[r].submit(operation(r, k), cluster.now));
    }
    for (const auto& both : ids) cluster.expect_ok(both);
  };
  uint64_t predicted = 0;  // of one step
  for (uint64_t k = 0; k < kKinds; ++k)
    predicted += plan::predict(*cluster[0].request_for(operation(0, k)), 1e9)->link_bytes;
  for (int i = 0; i < 2; ++i) step();
  const std::size_t before = paceline::testing::allocated();
  for (int i = 0; i < 4; ++i) step();
  const std::size_t after = paceline::testing::allocated();
  EXPECT_LE(after, before + before / 20);
  EXPECT_EQ(cluster[0].statistics().predicted_link_bytes, 6 * predicted);
}

// Not in agreement with others: each rank's own channel tells how its packets are cut, and may tell better later.
TEST(Plans, PredictionsCountThePacketsThatTheWireTells) {
  Cluster cluster(2);
  std::vector<float> data[2] = {std::vector<float>(1 << 20), std::vector<float>(1 << 20)};
  const auto operation = [&](Rank r) {
    auto& mine = data[static_cast<std::size_t>(r)];
    Operation o;
    o.input = o.output = mine.data();
    o.count = mine.size();
    return o;
  };
  const auto predicted = [&](Rank r) { return cluster[r].statistics().predicted_link_bytes; };
  const auto expected = [&](const Packets& packets) {
    return plan::predict(*cluster[0].request_for(operation(0)), 1e9, packets)->link_bytes;
  };
  const Packets jumbo = Packets::of_mtu(9000);
  cluster.network().channel(1).set_packets(jumbo);
  cluster.expect_ok({*cluster[0].submit(operation(0), 0), *cluster[1].submit(operation(1), 0)});
  EXPECT_EQ(predicted(0), expected({}));
  EXPECT_EQ(predicted(1), expected(jumbo));
  EXPECT_LT(predicted(1), 0.97 * static_cast<double>(predicted(0)));
  const Packets more_headers = Packets::of_mtu(9000, true);
  cluster.network().channel(1).set_packets(more_headers);
  EXPECT_EQ(predicted(1), expected(more_headers));
  EXPECT_GT(predicted(1), expected(jumbo));
}

// Plans know the wire's numbers without its headers.
TEST(Plans, PredictionsCountTheFramesThatTheWireSends) {
  const wire::ProtocolOptions wire;
  const auto link_bytes = [](uint64_t elements) {
    plan::PlanRequest q;
    q.collective = plan::Collective::kAllToAll;
    q.dtype = DType::kUInt8;
    q.send_counts = {0, elements, elements, 0};
    q.shape = {2, {0, 1}};
    q.piece_bytes = 1 << 30;
    return plan::predict(q, 1e9, Packets::of_mtu(65535))->link_bytes;
  };
  const uint64_t packet = 66;  // the headers of one more, at most
  const auto step = [&](uint64_t limit) { return link_bytes(limit + 1) - link_bytes(limit); };
  EXPECT_LE(step(wire.eager_limit / 2), 1 + packet);
  // A longer message is asked for and confirmed.
  EXPECT_GE(step(wire.eager_limit), 1 + 2 * wire::kFrameHeader);
  EXPECT_LE(step(wire.eager_limit), 1 + 2 * wire::kFrameHeader + packet);
  // And is cut into pieces.
  EXPECT_GE(step(wire.piece_bytes), 1 + wire::kFrameHeader);
  EXPECT_LE(step(wire.piece_bytes), 1 + wire::kFrameHeader + 2 * packet);
  EXPECT_LE(step(wire.piece_bytes / 2), 1 + packet);
}

}  // namespace
}  // namespace paceline::engine
