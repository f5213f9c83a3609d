// What ranks compare: everything that makes two operations different ones, and nothing else.
#include "engine/describe.h"

#include <gtest/gtest.h>

#include <functional>

#include "engine/engine_test_util.h"

namespace paceline::engine {
namespace {

TEST(Digest, TellsApartWhatRanksMustShare) {
  Description plain;
  plain.count = 100;
  plain.shape = "[10, 10]";
  plain.codec.codec = plan::Codec::kTopK;
  const std::vector<std::function<void(Description&)>> changes = {
      [](Description& d) { d.kind = 1; },
      [](Description& d) { d.dtype = DType::kInt32; },
      [](Description& d) { d.op = ReduceOp::kMax; },
      [](Description& d) { d.algorithm = plan::Algorithm::kRing; },
      [](Description& d) { d.root = 1; },
      [](Description& d) { d.count = 101; },
      [](Description& d) { d.shape = "[100]"; },
      [](Description& d) { d.counts_hash = 7; },
      [](Description& d) { d.counts_hash = 9; },
      [](Description& d) { d.codec.codec = plan::Codec::kFp16; },
      [](Description& d) { d.codec.ratio = 0.02; },
      [](Description& d) { d.codec.scale = 2; },
      [](Description& d) { d.codec.fp16_values = true; },
      [](Description& d) { d.codec.inside_node = true; },
  };
  std::vector<uint32_t> digests = {digest_of(plain)};
  for (const auto& change : changes) {
    Description other = plain;
    change(other);
    for (const uint32_t digest : digests)
      EXPECT_NE(digest_of(other), digest) << "change " << digests.size();
    digests.push_back(digest_of(other));
  }
}

// One rank's messages are as long as the other expects them: only the digest tells.
TEST(Digest, ABroadcastIsNoAllReduceInARing) {
  Cluster cluster(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(16, 1));
  for (Rank r = 0; r < 2; ++r) {
    Operation o;
    o.collective = r == 0 ? plan::Collective::kBroadcast : plan::Collective::kAllReduce;
    o.algorithm = r == 0 ? plan::Algorithm::kAuto : plan::Algorithm::kRing;
    o.input = o.output = data[static_cast<std::size_t>(r)].data();
    o.count = 16;
    ASSERT_TRUE(cluster[r].submit(o, cluster.now));
  }
  ASSERT_TRUE(cluster.drive([&] { return !cluster[0].health() && !cluster[1].health(); }));
  EXPECT_LT(cluster.now, 3 * kSecond);
  for (Rank r = 0; r < 2; ++r)
    EXPECT_EQ(cluster[r].health().code(), Code::kMismatch) << cluster[r].health().to_string();
}

TEST(Digest, LeavesOutWhatRanksMayDifferIn) {
  Description a, b;
  a.count = b.count = 5;
  b.name = "for messages";
  EXPECT_EQ(digest_of(a), digest_of(b));
  // Each rank's own, where the counts of all of them are compared; and what no codec looks at.
  a.counts_hash = b.counts_hash = 3;
  b.count = 6;
  b.shape = "[6]";
  b.codec.ratio = 0.5;
  EXPECT_EQ(digest_of(a), digest_of(b));
}

TEST(Disagreement, TellsTheTypeOnceAndWhatDiffers) {
  Description a, b;
  a.name = b.name = "loss";
  a.shape = "[4]";
  b.shape = "[5]";
  a.count = 4;
  b.count = 5;
  const std::string title = a.title();
  EXPECT_EQ(disagreement(a, "rank 0", b, "rank 1"),
            title + ": rank 0 has float32 [4], rank 1 has float32 [5]");
  a.shape = "float32 [4]";  // a caller that names its own type
  b.shape = "bool [4]";
  b.dtype = DType::kUInt8;
  EXPECT_EQ(disagreement(a, "rank 0", b, "rank 1"),
            title + ": rank 0 has float32 [4], rank 1 has bool [4]");
  a.shape = b.shape;  // the same by its words, and not the same on the wire
  a.count = b.count;
  EXPECT_EQ(disagreement(a, "rank 0", b, "rank 1"),
            title + ": rank 0 has bool [4] as float32, rank 1 has bool [4] as uint8");
}

}  // namespace
}  // namespace paceline::engine
