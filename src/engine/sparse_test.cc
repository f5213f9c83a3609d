// Top-k through the engine: what travels plus what stays is what was put in; a step with an Inf ends as NaN on all
// ranks and can be taken back; residuals follow the parameter, not the bucket.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/engine_test_util.h"

namespace paceline::engine {
namespace {

constexpr std::size_t kElements = 20000;

/// Ranks, ranks a node, and whether ranks of a node see each other's memory.
struct Layout {
  Rank size;
  int slots;
  bool lends;
};

class Sparse : public testing::TestWithParam<Layout> {
 protected:
  Rank size() { return GetParam().size; }
  int slots() { return GetParam().slots; }
  void prepare(Cluster& cluster) {
    if (GetParam().lends) cluster.network().lend();
  }

  Operation operation(std::vector<float>& data, const std::vector<Segment>& segments) {
    Operation o;
    o.count = data.size();
    o.input = o.output = data.data();
    o.codec.codec = plan::Codec::kTopK;
    o.codec.ratio = 0.05;
    o.segments = segments;
    o.name = "bucket";
    return o;
  }
  std::vector<std::vector<float>> gradients() {
    std::vector<std::vector<float>> out;
    for (Rank r = 0; r < size(); ++r)
      out.push_back(random_values<float>(random_, kElements, -1000, 1000));
    return out;
  }
  std::vector<OpId> submit(Cluster& cluster, std::vector<std::vector<float>>& data,
                           const std::vector<Segment>& segments) {
    std::vector<OpId> ids;
    for (Rank r = 0; r < size(); ++r) {
      auto id =
          cluster[r].submit(operation(data[static_cast<std::size_t>(r)], segments), cluster.now);
      EXPECT_TRUE(id) << id.status().to_string();
      ids.push_back(id ? *id : 0);
    }
    return ids;
  }
  /// All ranks' residuals of both parameters, added up.
  std::vector<double> residual_sum(Cluster& cluster) {
    std::vector<double> sum(kElements);
    for (Rank r = 0; r < size(); ++r) {
      std::vector<float> a(kElements / 2);
      std::vector<float> b(kElements / 2);
      EXPECT_TRUE(cluster[r].read_residual(7, a));
      EXPECT_TRUE(cluster[r].read_residual(9, b));
      for (std::size_t i = 0; i < kElements / 2; ++i) {
        sum[i] += a[i];
        sum[i + kElements / 2] += b[i];
      }
    }
    return sum;
  }
  const std::vector<Segment> segments_{{7, 0, kElements / 2}, {9, 0, kElements / 2}};
  std::mt19937_64 random_{77};
};

TEST_P(Sparse, WhatTravelsAndWhatStaysAddUpExactly) {
  Cluster cluster(size(), slots());
  prepare(cluster);
  std::vector<double> residual(kElements);
  for (int step = 0; step < 4; ++step) {
    auto data = gradients();
    auto expected = residual;
    for (auto& d : data) {
      for (std::size_t i = 0; i < kElements; ++i) expected[i] += d[i];
    }
    cluster.expect_ok(submit(cluster, data, segments_));
    for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
    residual = residual_sum(cluster);
    for (std::size_t r = 1; r < data.size(); ++r)
      ASSERT_EQ(data[r], data[0]) << "ranks must end bit-identical";
    std::size_t sent = 0;
    for (std::size_t i = 0; i < kElements; ++i) {
      ASSERT_EQ(data[0][i] + residual[i], expected[i]) << "step " << step << ", element " << i;
      sent += data[0][i] != 0;
    }
    EXPECT_GT(sent, kElements / 50);
    EXPECT_LT(sent, kElements / 2);
  }
  EXPECT_GT(cluster[0].statistics().residual_bytes, 0U);
}

TEST_P(Sparse, WhereNeighboursAreReadNoBitDiffers) {
  if (!GetParam().lends) return;
  std::vector<std::vector<float>> results[2];
  std::vector<double> residuals[2];
  const auto start = gradients();
  for (const bool lends : {false, true}) {
    Cluster cluster(size(), slots());
    if (lends) cluster.network().lend();
    auto data = start;
    cluster.expect_ok(submit(cluster, data, segments_));
    for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
    results[lends] = data;
    residuals[lends] = residual_sum(cluster);
    // The last neighbour's part of what a rank encodes; alone in a shorter group, others encode more.
    const auto held = cluster.network().channel(0).counters().held;
    if (lends) {
      EXPECT_GE(held, kElements / static_cast<unsigned>(slots()) * sizeof(float));
    } else {
      EXPECT_EQ(held, 0U);
    }
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(residuals[0], residuals[1]);
}

TEST_P(Sparse, AnInfOnOneRankReachesAllAndTheStepIsTakenBack) {
  Cluster cluster(size(), slots());
  prepare(cluster);
  auto first = gradients();
  cluster.expect_ok(submit(cluster, first, segments_));
  for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
  auto before = residual_sum(cluster);
  auto bad = gradients();
  bad[static_cast<std::size_t>(size() - 1)][12345] = std::numeric_limits<float>::infinity();
  auto ids = submit(cluster, bad, segments_);
  ASSERT_TRUE(cluster.drive([&] {
    for (Rank r = 0; r < size(); ++r) {
      if (cluster[r].outcome(ids[static_cast<std::size_t>(r)]) == nullptr) return false;
    }
    return true;
  }));
  for (Rank r = 0; r < size(); ++r) {
    auto* outcome = cluster[r].outcome(ids[static_cast<std::size_t>(r)]);
    EXPECT_TRUE(outcome->status) << outcome->status.to_string();
    EXPECT_FALSE(outcome->finite);
    for (float v : bad[static_cast<std::size_t>(r)]) ASSERT_TRUE(std::isnan(v));
    cluster[r].rollback_residuals();
  }
  EXPECT_EQ(residual_sum(cluster), before);
}

TEST_P(Sparse, ResidualsFollowTheParameterIntoOtherBuckets) {
  Cluster cluster(size(), slots());
  prepare(cluster);
  auto first = gradients();
  auto sums = std::vector<double>(kElements);
  for (auto& d : first) {
    for (std::size_t i = 0; i < kElements; ++i) sums[i] += d[i];
  }
  cluster.expect_ok(submit(cluster, first, segments_));
  for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
  // The same parameters the other way round, with zero gradients: only residuals travel.
  std::vector<std::vector<float>> zeros(static_cast<std::size_t>(size()),
                                        std::vector<float>(kElements));
  cluster.expect_ok(submit(cluster, zeros, {{9, 0, kElements / 2}, {7, 0, kElements / 2}}));
  for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
  auto rest = residual_sum(cluster);
  for (std::size_t i = 0; i < kElements; ++i) {
    auto swapped = (i + kElements / 2) % kElements;
    ASSERT_EQ(first[0][i] + zeros[0][swapped] + rest[i], sums[i]) << "element " << i;
  }
}

// With its parameter a residual comes to another owner. Nothing of it may stay behind with a rank that sends it no more.
TEST_P(Sparse, WhatIsOwedIsPaidAfterAnotherCutOfTheBuckets) {
  Cluster cluster(size(), slots());
  prepare(cluster);
  const std::vector<Segment> swapped{{9, 0, kElements / 2}, {7, 0, kElements / 2}};
  const auto zeros = [&] {
    return std::vector<std::vector<float>>(static_cast<std::size_t>(size()),
                                           std::vector<float>(kElements));
  };
  const auto commit = [&] {
    for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
  };
  auto first = gradients();
  cluster.expect_ok(submit(cluster, first, segments_));
  commit();
  const auto owed = residual_sum(cluster);
  auto dropped = zeros();
  cluster.expect_ok(submit(cluster, dropped, swapped));
  for (Rank r = 0; r < size(); ++r) cluster[r].rollback_residuals();
  ASSERT_EQ(residual_sum(cluster), owed) << "a step that is taken back changes nothing";
  std::vector<double> paid(kElements);
  constexpr int kSteps = 30;  // of 5 % each
  for (int step = 0; step < kSteps; ++step) {
    auto data = zeros();
    if (step == kSteps / 2) {  // all of a bucket that is sent exactly
      std::vector<OpId> ids;
      for (Rank r = 0; r < size(); ++r) {
        auto exact = operation(data[static_cast<std::size_t>(r)], segments_);
        exact.codec = {};
        ids.push_back(*cluster[r].submit(exact, cluster.now));
      }
      cluster.expect_ok(ids);
    } else {
      cluster.expect_ok(submit(cluster, data, step % 2 == 0 ? swapped : segments_));
    }
    commit();
    const bool is_swapped = step % 2 == 0;
    for (std::size_t i = 0; i < kElements; ++i)
      paid[is_swapped ? (i + kElements / 2) % kElements : i] += data[0][i];
    const auto rest = residual_sum(cluster);
    for (std::size_t i = 0; i < kElements; ++i)
      ASSERT_EQ(paid[i] + rest[i], owed[i]) << "step " << step << ", element " << i;
    if (step < kSteps / 2) continue;
    ASSERT_EQ(rest, std::vector<double>(kElements)) << "step " << step;
  }
}

TEST_P(Sparse, WhatIsOwedIsPaidWithoutAnExactStepToo) {
  Cluster cluster(size(), slots());
  prepare(cluster);
  auto first = gradients();
  cluster.expect_ok(submit(cluster, first, segments_));
  for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
  for (int step = 0; step < 30; ++step) {
    std::vector<std::vector<float>> data(static_cast<std::size_t>(size()),
                                         std::vector<float>(kElements));
    cluster.expect_ok(submit(cluster, data, {{9, 0, kElements / 2}, {7, 0, kElements / 2}}));
    for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
  }
  EXPECT_EQ(residual_sum(cluster), std::vector<double>(kElements));
}

// A gradient that is only read can take nothing along: who keeps something of it goes on keeping it.
TEST_P(Sparse, NothingIsLostWhereAnotherCutIsNotInPlace) {
  Cluster cluster(size(), slots());
  prepare(cluster);
  auto first = gradients();
  cluster.expect_ok(submit(cluster, first, segments_));
  for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
  const auto owed = residual_sum(cluster);
  for (const auto codec : {plan::Codec::kTopK, plan::Codec::kNone}) {
    const std::vector<float> zeros(kElements);
    const auto before = residual_sum(cluster);
    std::vector<std::vector<float>> out(static_cast<std::size_t>(size()),
                                        std::vector<float>(kElements));
    std::vector<OpId> ids;
    for (Rank r = 0; r < size(); ++r) {
      auto o = operation(out[static_cast<std::size_t>(r)],
                         {{9, 0, kElements / 2}, {7, 0, kElements / 2}});
      o.input = zeros.data();
      o.codec.codec = codec;
      ids.push_back(*cluster[r].submit(o, cluster.now));
    }
    cluster.expect_ok(ids);
    for (Rank r = 0; r < size(); ++r) cluster[r].commit_residuals();
    const auto rest = residual_sum(cluster);
    for (std::size_t i = 0; i < kElements; ++i)
      ASSERT_EQ(out[0][(i + kElements / 2) % kElements] + rest[i], before[i]) << "element " << i;
  }
  EXPECT_NE(owed, std::vector<double>(kElements));
}

TEST(SparseFaults, WhoSentADamagedEncodingIsNamed) {
  Cluster cluster(3);
  std::vector<std::vector<float>> data(3, std::vector<float>(3000, 1));
  Operation o;
  o.count = 3000;
  o.codec.codec = plan::Codec::kTopK;
  o.codec.ratio = 0.1;
  o.name = "bucket";
  std::vector<OpId> ended;
  const auto submit = [&](Rank r) {
    o.input = o.output = data[static_cast<std::size_t>(r)].data();
    EXPECT_TRUE(cluster[r].submit(o, cluster.now));
    for (int i = 0; i < 10; ++i) cluster[r].progress(cluster.now, ended);
  };
  submit(2);
  cluster.network().cut_next(5);  // what rank 2 has for rank 0, once that is there
  submit(0);
  submit(1);
  ASSERT_TRUE(cluster.drive([&] { return !cluster[0].health() && !cluster[1].health(); }));
  for (Rank r = 0; r < 3; ++r) {
    EXPECT_EQ(cluster[r].health().code(), Code::kCorrupted);
    const auto text = cluster[r].health().message();
    EXPECT_NE(text.find("'bucket' on rank 0 (host host-a): a top-k message can't be decoded"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("sent by rank 2 (host host-c); with PACELINE_CHECKSUM=on"),
              std::string::npos)
        << text;
  }
}

// A buffer without a name is told from others by its length: 65 elements must not be the name "A".
TEST(SparseNames, NoNameIsNoName) {
  Cluster cluster(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(65, 1));
  const auto reduce = [&](const char* name) {
    std::vector<OpId> ids;
    for (Rank r = 0; r < 2; ++r) {
      Operation o;
      o.count = 65;
      o.input = o.output = data[static_cast<std::size_t>(r)].data();
      o.codec.codec = plan::Codec::kTopK;
      o.codec.ratio = 0.5;
      o.name = name;
      ids.push_back(*cluster[r].submit(o, cluster.now));
    }
    cluster.expect_ok(ids);
    for (Rank r = 0; r < 2; ++r) cluster[r].commit_residuals();
  };
  reduce("");
  data.assign(2, std::vector<float>(65));
  reduce("A");
  EXPECT_EQ(data[0], std::vector<float>(65)) << "what another buffer is owed";
  reduce("");
  EXPECT_NE(data[0], std::vector<float>(65)) << "its own comes";
}

// Rank 0 has all of an old bucket's encodings and a new bucket's gradient: the other rank waits for the latter alone.
TEST(SparseOrder, AnEncodingGoesBeforeTheSumOfAnOlderBucket) {
  constexpr std::size_t kLarge = 300'000;  // a step of it is all that one call of progress() does
  Cluster cluster(2);
  std::mt19937_64 random(3);
  std::vector<std::vector<float>> data;
  for (int i = 0; i < 4; ++i) data.push_back(random_values<float>(random, kLarge, -1000, 1000));
  const auto submit = [&](Rank r, std::size_t bucket) {
    auto& buffer = data[static_cast<std::size_t>(r) * 2 + bucket];
    Operation o;
    o.count = kLarge;
    o.input = o.output = buffer.data();
    o.codec.codec = plan::Codec::kTopK;
    o.codec.ratio = 0.01;
    o.segments = {{7 + bucket, 0, kLarge}};
    o.name = "bucket " + std::to_string(bucket);
    auto id = cluster[r].submit(o, cluster.now);
    EXPECT_TRUE(id) << id.status().to_string();
    return *id;
  };
  std::vector<OpId> ended;
  const auto progress = [&](Rank r, int calls) {
    while (calls-- > 0) cluster[r].progress(cluster.now, ended);
  };
  const OpId old_there = submit(1, 0), new_there = submit(1, 1);
  const OpId old_here = submit(0, 0);
  progress(1, 20);                          // both its encodings have left
  cluster[0].progress(cluster.now, ended);  // the old bucket's leaves
  EXPECT_EQ(cluster[0].outcome(old_here), nullptr);
  const OpId new_here = submit(0, 1);
  cluster[0].progress(cluster.now, ended);
  EXPECT_EQ(cluster[0].outcome(old_here), nullptr);
  progress(1, 20);
  EXPECT_NE(cluster[1].outcome(new_there), nullptr) << "it waits for a sum that is not its own";
  progress(0, 20);
  for (const OpId id : {old_here, new_here}) {
    ASSERT_NE(cluster[0].outcome(id), nullptr);
    EXPECT_TRUE(cluster[0].outcome(id)->status);
  }
  EXPECT_NE(cluster[1].outcome(old_there), nullptr);
  EXPECT_EQ(data[0], data[2]);
  EXPECT_EQ(data[1], data[3]);
}

// The same bits whoever lends a hand.
TEST(SparseOrder, WorkersShareTheCoding) {
  constexpr std::size_t kLarge = 400'000;
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 3}) {
    Cluster cluster(2);
    Workers workers(threads);
    std::mt19937_64 random(4);
    std::vector<std::vector<float>> data;
    std::vector<OpId> ids;
    for (Rank r = 0; r < 2; ++r) data.push_back(random_values<float>(random, kLarge, -1000, 1000));
    for (Rank r = 0; r < 2; ++r) {
      cluster[r].set_workers(&workers);
      auto& mine = data[static_cast<std::size_t>(r)];
      Operation o;
      o.count = kLarge;
      o.input = o.output = mine.data();
      o.codec.codec = plan::Codec::kTopK;
      o.codec.ratio = 0.01;
      o.segments = {{7, 0, kLarge}};
      o.name = "bucket";
      auto id = cluster[r].submit(o, cluster.now);
      ASSERT_TRUE(id) << id.status().to_string();
      ids.push_back(*id);
    }
    cluster.expect_ok(ids);
    EXPECT_EQ(data[0], data[1]);
    results.push_back(data[0]);
  }
  EXPECT_EQ(results[0], results[1]);
}

INSTANTIATE_TEST_SUITE_P(Layouts, Sparse,
                         testing::Values(Layout{2, 1, false}, Layout{4, 2, false},
                                         Layout{5, 2, false}, Layout{4, 2, true},
                                         Layout{5, 2, true}, Layout{8, 4, true}));

}  // namespace
}  // namespace paceline::engine
