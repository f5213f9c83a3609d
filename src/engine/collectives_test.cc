// Every collective over the engine and real plans, random inputs, against references computed here.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <numeric>

#include "engine/engine_test_util.h"

namespace paceline::engine {
namespace {

using plan::Algorithm;
using plan::Collective;

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, double>) return DType::kFloat64;
  if constexpr (std::is_same_v<T, int8_t>) return DType::kInt8;
  if constexpr (std::is_same_v<T, int16_t>) return DType::kInt16;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kInt32;
  if constexpr (std::is_same_v<T, int64_t>) return DType::kInt64;
  return DType::kUInt8;
}

struct Layout {
  Rank size;
  int slots;
};
void PrintTo(const Layout& l, std::ostream* out) {
  *out << l.size << " ranks, " << l.slots << " a node";
}

plan::PlanRequest bucket(uint64_t bytes, plan::Codec codec) {
  plan::PlanRequest q;
  q.count = bytes / sizeof(float);
  q.codec.codec = codec;
  return q;
}

TEST(SettledAlgorithm, ARingThatWouldEncodeInsideANodeGivesWay) {
  const plan::GroupShape alone{.size = 2, .node_of = {0, 1}};
  const plan::GroupShape shared{.size = 4, .node_of = {0, 0, 1, 1}};
  EngineOptions o;
  o.algorithm = Algorithm::kRing;
  auto q = bucket(1 << 20, plan::Codec::kFp16);
  EXPECT_EQ(settled_algorithm(o, q, shared), Algorithm::kAuto);
  EXPECT_EQ(settled_algorithm(o, q, alone), Algorithm::kRing);
  EXPECT_EQ(settled_algorithm(o, bucket(1 << 20, plan::Codec::kNone), shared), Algorithm::kRing);
  q.codec.inside_node = true;
  EXPECT_EQ(settled_algorithm(o, q, shared), Algorithm::kRing);
}

TEST(SettledAlgorithm, BeyondTheThresholdNothingHasTwoLevels) {
  const plan::GroupShape shared{.size = 4, .node_of = {0, 0, 1, 1}};
  for (auto asked : {Algorithm::kAuto, Algorithm::kTwoLevel}) {
    EngineOptions o;
    o.algorithm = asked;
    o.hierarchical_threshold = 1 << 20;
    const auto exact = plan::Codec::kNone;
    EXPECT_EQ(settled_algorithm(o, bucket(1 << 20, exact), shared), asked);
    EXPECT_EQ(settled_algorithm(o, bucket((1 << 20) + 4, exact), shared), Algorithm::kRing);
    EXPECT_EQ(settled_algorithm(o, bucket(1 << 21, plan::Codec::kFp16), shared),
              Algorithm::kDirect);
  }
}

// Encodings and sums between groups are one plan, whose groups follow from the codec's scope.
TEST(SettledAlgorithm, TopKHasNoOtherPlanWhateverIsAsked) {
  const plan::GroupShape shared{.size = 4, .node_of = {0, 0, 1, 1}};
  for (auto asked : {Algorithm::kAuto, Algorithm::kTwoLevel, Algorithm::kSparse, Algorithm::kRing,
                     Algorithm::kDirect}) {
    EngineOptions o;
    o.algorithm = asked;
    o.hierarchical_threshold = 1 << 20;
    for (bool inside_node : {false, true}) {
      for (uint64_t bytes : {1U << 16, 1U << 20, 1U << 21}) {
        auto q = bucket(bytes, plan::Codec::kTopK);
        q.codec.inside_node = inside_node;
        EXPECT_EQ(settled_algorithm(o, q, shared), Algorithm::kAuto);
      }
    }
  }
}

class Windows : public testing::Test {
 protected:
  static constexpr std::size_t kElements = 20'000;
  static constexpr int kOperations = 7;

  /// All-reduces of every rank, in the order given; [rank][operation] ids.
  std::vector<std::vector<OpId>> submit(Cluster& cluster, uint64_t window,
                                        const std::function<GroupId(Rank, int)>& group) {
    std::vector<std::vector<OpId>> ids(static_cast<std::size_t>(cluster.size()));
    data_.assign(ids.size(), {});
    for (Rank r = 0; r < cluster.size(); ++r) {
      auto& mine = data_[static_cast<std::size_t>(r)];
      mine.assign(kOperations, std::vector<float>(kElements, static_cast<float>(r + 1)));
      for (int i = 0; i < kOperations; ++i) {
        Operation o;
        o.op = ReduceOp::kSum;
        o.algorithm = Algorithm::kRing;
        o.group = group(r, i);
        o.input = o.output = mine[static_cast<std::size_t>(i)].data();
        o.count = kElements;
        o.window_bytes = window;
        auto id = cluster[r].submit(o, cluster.now);
        EXPECT_TRUE(id.is_ok());
        ids[static_cast<std::size_t>(r)].push_back(*id);
      }
    }
    return ids;
  }
  bool ended(Cluster& cluster, const std::vector<std::vector<OpId>>& ids, std::size_t operation) {
    for (Rank r = 0; r < cluster.size(); ++r) {
      if (cluster[r].outcome(ids[static_cast<std::size_t>(r)][operation]) == nullptr) return false;
    }
    return true;
  }
  void expect_sums(float sum) {
    for (const auto& rank : data_) {
      for (const auto& operation : rank) {
        for (auto v : operation) ASSERT_EQ(v, sum);
      }
    }
  }
  std::vector<std::vector<std::vector<float>>> data_;
};

TEST_F(Windows, OneAtATimeArriveInTheirOrder) {
  for (const uint64_t window : {uint64_t{1}, kElements * sizeof(float) * 3 / 2}) {
    Cluster cluster(3, 1, {.piece_bytes = 4096});
    auto ids = submit(cluster, window, [](Rank, int) { return kWorld; });
    for (std::size_t i = 0; i < kOperations; ++i) {
      ASSERT_TRUE(cluster.drive([&] { return ended(cluster, ids, i); }));
      // What has not begun can't have ended: one at a time, or two.
      const std::size_t ahead = window == 1 ? 1 : 2;
      if (i + 1 + ahead < kOperations) {
        for (Rank r = 0; r < 3; ++r)
          EXPECT_EQ(cluster[r].outcome(ids[static_cast<std::size_t>(r)].back()), nullptr) << i;
      }
    }
    EXPECT_LT(cluster.now, kMillisecond) << "one's end lets the next begin, not time";
    expect_sums(6);
  }
}

TEST_F(Windows, GroupsInOppositeOrdersDoNotWaitForEachOther) {
  Cluster cluster(2, 1, {.piece_bytes = 4096});
  std::array<std::array<GroupId, 2>, 2> groups{};
  for (Rank r = 0; r < 2; ++r) {
    for (auto& g : groups.at(static_cast<std::size_t>(r)))
      g = *cluster[r].create_group(std::array<Rank, 2>{0, 1});
  }
  auto ids = submit(cluster, 1, [&](Rank r, int i) {
    return groups.at(static_cast<std::size_t>(r)).at(static_cast<std::size_t>((i + r) % 2));
  });
  // Seven operations: the groups' counts differ by one, so the last one of each rank has no partner.
  ASSERT_TRUE(cluster.drive([&] { return ended(cluster, ids, kOperations - 2); }));
}

// What waits behind operations of its own group gets nothing beyond the bound: they end without it.
TEST_F(Windows, ALateRankMakesTheOthersTakeNoMoreMemory) {
  constexpr std::size_t kLarge = 1 << 20;
  Cluster cluster(3);
  std::vector<std::vector<float>> data(21, std::vector<float>(kLarge));
  std::vector<std::vector<OpId>> ids(3);
  const auto submit = [&](Rank r) {
    for (std::size_t i = 0; i < 7; ++i) {
      auto& mine = data[static_cast<std::size_t>(r) * 7 + i];
      std::fill(mine.begin(), mine.end(), static_cast<float>(r + 1));
      Operation o;
      o.algorithm = Algorithm::kRing;
      o.codec.codec = plan::Codec::kFp16;
      o.op = ReduceOp::kSum;
      o.input = o.output = mine.data();
      o.count = kLarge;
      ids[static_cast<std::size_t>(r)].push_back(*cluster[r].submit(o, cluster.now));
    }
  };
  submit(0);
  submit(1);
  cluster.drive([&] { return cluster.now > 5 * kSecond; });
  submit(2);
  for (std::size_t i = 0; i < 7; ++i) cluster.expect_ok({ids[0][i], ids[1][i], ids[2][i]});
  for (Rank r = 0; r < 3; ++r) {
    EXPECT_GT(cluster[r].statistics().scratch_bytes, 0U);
    EXPECT_LE(cluster[r].statistics().scratch_bytes, kLarge * sizeof(float) * 3 / 2);
  }
  for (const auto& d : data)
    EXPECT_TRUE(std::all_of(d.begin(), d.end(), [](float v) { return v == 6; }));
}

// Nor while something else never rests: who waits for memory or its turn is held up by who has it, not by that.
TEST_F(Windows, NorAmidMessagesThatNeverRest) {
  Cluster cluster(2, 1, {.piece_bytes = 4096});
  std::array<std::array<GroupId, 2>, 2> groups{};
  for (Rank r = 0; r < 2; ++r) {
    for (auto& g : groups.at(static_cast<std::size_t>(r)))
      g = *cluster[r].create_group(std::array<Rank, 2>{0, 1});
  }
  auto ids = submit(cluster, 1, [&](Rank r, int i) {
    return groups.at(static_cast<std::size_t>(r)).at(static_cast<std::size_t>((i + r) % 2));
  });
  std::array<char, 2> letters{};
  std::array<OpId, 2> messages{};
  const auto send_one = [&] {
    for (Rank r = 0; r < 2; ++r) {
      auto& message = messages.at(static_cast<std::size_t>(r));
      if (message != 0) cluster[r].forget(message);
      Transfer t;
      t.peer = 1 - r;
      t.data = &letters.at(static_cast<std::size_t>(r));
      t.bytes = 1;
      message = r == 0 ? *cluster[r].send(t, cluster.now) : *cluster[r].receive(t, cluster.now);
    }
  };
  send_one();
  const auto done = [&] {
    if (ended(cluster, ids, kOperations - 2)) return true;
    if (cluster[0].outcome(messages[0]) != nullptr && cluster[1].outcome(messages[1]) != nullptr)
      send_one();
    cluster.now += kMillisecond;
    return cluster.now > 10 * kSecond;
  };
  ASSERT_TRUE(cluster.drive(done));
  EXPECT_LE(cluster.now, 10 * kSecond) << "the operations wait for each other";
}

class Collectives : public testing::TestWithParam<Layout> {
 protected:
  EngineOptions options() {
    EngineOptions o;
    o.piece_bytes = 4096;  // so that small buffers are cut, too
    return o;
  }
  Rank size() { return GetParam().size; }
  std::mt19937_64 random_{20240611};

  template <class T>
  void all_reduce(Cluster& cluster, ReduceOp op, std::size_t n, Algorithm algorithm,
                  bool in_place) {
    // Small values, so that sums and products are exact in every order.
    int high = op == ReduceOp::kProduct ? 1 : 7;
    std::vector<std::vector<T>> in;
    for (Rank r = 0; r < size(); ++r)
      in.push_back(
          random_values<T>(random_, n, std::numeric_limits<T>::is_signed ? -high : 0, high));
    auto expected = reduced(op, in);
    std::vector<std::vector<T>> out(in.size());
    auto kept = in;
    std::vector<OpId> ids;
    for (Rank r = 0; r < size(); ++r) {
      auto i = static_cast<std::size_t>(r);
      out[i].resize(n, T(99));
      Operation o;
      o.dtype = dtype_of<T>();
      o.op = op;
      o.count = n;
      o.algorithm = algorithm;
      o.input = in[i].data();
      o.output = in_place ? in[i].data() : out[i].data();
      auto id = cluster[r].submit(o, cluster.now);
      ASSERT_TRUE(id) << id.status().to_string();
      ids.push_back(*id);
    }
    cluster.expect_ok(ids);
    for (std::size_t i = 0; i < in.size(); ++i) {
      ASSERT_EQ(in_place ? in[i] : out[i], expected)
          << "rank " << i << ", " << reduce_op_name(op) << ", " << n << " elements, "
          << plan::algorithm_name(algorithm);
      if (!in_place) {
        ASSERT_EQ(in[i], kept[i]) << "an input was written to";
      }
    }
  }
};

TEST_P(Collectives, AllReduceByEveryAlgorithmAndOperation) {
  Cluster cluster(size(), GetParam().slots, options());
  for (auto algorithm : {Algorithm::kAuto, Algorithm::kRing, Algorithm::kDoubling, Algorithm::kTree,
                         Algorithm::kDirect, Algorithm::kTwoLevel}) {
    for (auto op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      for (std::size_t n : {0, 1, 7, 1000, 5003}) {
        all_reduce<float>(cluster, op, n, algorithm, n % 2 == 0);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Collectives, AllReduceOfEveryType) {
  Cluster cluster(size(), GetParam().slots, options());
  for (std::size_t n : {3, 4099}) {
    all_reduce<double>(cluster, ReduceOp::kAverage, n, Algorithm::kAuto, false);
    all_reduce<int8_t>(cluster, ReduceOp::kMax, n, Algorithm::kAuto, true);
    all_reduce<int16_t>(cluster, ReduceOp::kSum, n, Algorithm::kAuto, false);
    all_reduce<int32_t>(cluster, ReduceOp::kProduct, n, Algorithm::kAuto, false);
    all_reduce<int64_t>(cluster, ReduceOp::kSum, n, Algorithm::kAuto, true);
    all_reduce<uint8_t>(cluster, ReduceOp::kMin, n, Algorithm::kAuto, false);
  }
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  Cluster cluster(size(), GetParam().slots, options());
  for (Rank root = 0; root < size(); ++root) {
    for (std::size_t n : {1, 5000}) {
      auto value = random_values<int32_t>(random_, n);
      std::vector<std::vector<int32_t>> out(static_cast<std::size_t>(size()),
                                            std::vector<int32_t>(n, -1));
      std::vector<OpId> ids;
      for (Rank r = 0; r < size(); ++r) {
        Operation o;
        o.collective = Collective::kBroadcast;
        o.dtype = DType::kInt32;
        o.count = n;
        o.root = root;
        o.input = r == root ? value.data() : nullptr;
        o.output = out[static_cast<std::size_t>(r)].data();
        auto id = cluster[r].submit(o, cluster.now);
        ASSERT_TRUE(id) << id.status().to_string();
        ids.push_back(*id);
      }
      cluster.expect_ok(ids);
      for (auto& v : out) ASSERT_EQ(v, value);
    }
  }
}

TEST_P(Collectives, UnevenAllGatherReduceScatterGatherScatter) {
  Cluster cluster(size(), GetParam().slots, options());
  for (int round = 0; round < 6; ++round) {
    std::vector<uint64_t> counts(static_cast<std::size_t>(size()));
    for (auto& c : counts) c = random_() % 3 == 0 ? 0 : random_() % 3000;
    auto total = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
    auto collective = round % 4 == 0   ? Collective::kAllGather
                      : round % 4 == 1 ? Collective::kReduceScatter
                      : round % 4 == 2 ? Collective::kGather
                                       : Collective::kScatter;
    Rank root = static_cast<Rank>(random_() % static_cast<uint64_t>(size()));
    bool collects = collective == Collective::kAllGather || collective == Collective::kGather;
    std::vector<std::vector<int64_t>> in;
    std::vector<std::vector<int64_t>> out;
    for (auto c : counts) {
      in.push_back(random_values<int64_t>(random_, collects ? c : total));
      out.emplace_back(collects ? total : c, -777);
    }
    std::vector<int64_t> all;
    for (std::size_t r = 0; r < in.size(); ++r) all.insert(all.end(), in[r].begin(), in[r].end());
    auto sum = collects                             ? all
               : collective == Collective::kScatter ? in[static_cast<std::size_t>(root)]
                                                    : reduced(ReduceOp::kSum, in);
    std::vector<OpId> ids;
    for (Rank r = 0; r < size(); ++r) {
      auto i = static_cast<std::size_t>(r);
      Operation o;
      o.collective = collective;
      o.dtype = DType::kInt64;
      o.counts = counts;
      o.root = root;
      o.input = in[i].data();
      o.output = out[i].data();
      auto id = cluster[r].submit(o, cluster.now);
      ASSERT_TRUE(id) << id.status().to_string();
      ids.push_back(*id);
    }
    cluster.expect_ok(ids);
    uint64_t at = 0;
    for (std::size_t r = 0; r < out.size(); ++r) {
      if (collects) {
        if (collective == Collective::kAllGather || static_cast<Rank>(r) == root) {
          ASSERT_EQ(out[r], sum);
        }
      } else {
        ASSERT_EQ(out[r], std::vector<int64_t>(sum.begin() + static_cast<long>(at),
                                               sum.begin() + static_cast<long>(at + counts[r])))
            << "rank " << r;
      }
      at += counts[r];
    }
  }
}

TEST_P(Collectives, ReduceScatterIntoAViewOfItsInput) {
  Cluster cluster(size(), GetParam().slots, options());
  std::size_t n = 700;
  std::vector<std::vector<float>> in;
  for (Rank r = 0; r < size(); ++r)
    in.push_back(random_values<float>(random_, n * static_cast<std::size_t>(size())));
  auto sum = reduced(ReduceOp::kSum, in);
  std::vector<OpId> ids;
  for (Rank r = 0; r < size(); ++r) {
    auto i = static_cast<std::size_t>(r);
    Operation o;
    o.collective = Collective::kReduceScatter;
    o.count = n;
    o.input = in[i].data();
    o.output = in[i].data() + i * n;
    auto id = cluster[r].submit(o, cluster.now);
    ASSERT_TRUE(id) << id.status().to_string();
    ids.push_back(*id);
  }
  cluster.expect_ok(ids);
  for (std::size_t r = 0; r < in.size(); ++r) {
    for (std::size_t k = 0; k < n; ++k) ASSERT_EQ(in[r][r * n + k], sum[r * n + k]);
  }
}

TEST_P(Collectives, UnevenAllToAll) {
  Cluster cluster(size(), GetParam().slots, options());
  auto n = static_cast<std::size_t>(size());
  std::vector<std::vector<uint64_t>> counts(n, std::vector<uint64_t>(n));
  for (auto& row : counts) {
    for (auto& c : row) c = random_() % 4 == 0 ? 0 : random_() % 2500;
  }
  std::vector<std::vector<uint8_t>> in(n);
  std::vector<std::vector<uint8_t>> out(n);
  std::vector<std::vector<uint8_t>> expected(n);
  std::vector<OpId> ids;
  for (std::size_t r = 0; r < n; ++r)
    in[r] = random_values<uint8_t>(
        random_, std::accumulate(counts[r].begin(), counts[r].end(), uint64_t{0}), 0, 255);
  for (std::size_t r = 0; r < n; ++r) {
    Operation o;
    o.collective = Collective::kAllToAll;
    o.dtype = DType::kUInt8;
    o.send_counts = counts[r];
    for (std::size_t s = 0; s < n; ++s) {
      o.receive_counts.push_back(counts[s][r]);
      auto at =
          std::accumulate(counts[s].begin(), counts[s].begin() + static_cast<long>(r), uint64_t{0});
      expected[r].insert(expected[r].end(), in[s].begin() + static_cast<long>(at),
                         in[s].begin() + static_cast<long>(at + counts[s][r]));
    }
    out[r].resize(expected[r].size());
    o.input = in[r].data();
    o.output = out[r].data();
    auto id = cluster[static_cast<Rank>(r)].submit(o, cluster.now);
    ASSERT_TRUE(id) << id.status().to_string();
    ids.push_back(*id);
  }
  cluster.expect_ok(ids);
  EXPECT_EQ(out, expected);
}

TEST_P(Collectives, BarrierWaitsForTheLast) {
  if (size() == 1) return;
  Cluster cluster(size(), GetParam().slots, options());
  std::vector<OpId> ids;
  Operation o;
  o.collective = Collective::kBarrier;
  for (Rank r = 0; r + 1 < size(); ++r) ids.push_back(*cluster[r].submit(o, cluster.now));
  std::vector<OpId> ended;
  for (int i = 0; i < 100; ++i) {
    for (Rank r = 0; r < size(); ++r) cluster[r].progress(cluster.now, ended);
  }
  EXPECT_TRUE(ended.empty());
  ids.push_back(*cluster[size() - 1].submit(o, cluster.now));
  cluster.expect_ok(ids);
}

TEST_P(Collectives, HalfPrecisionOnTheWireStaysWithinItsRounding) {
  Cluster cluster(size(), GetParam().slots, options());
  for (auto codec : {plan::Codec::kFp16, plan::Codec::kBf16}) {
    for (std::size_t n : {5, 20011}) {
      std::vector<std::vector<float>> in;
      for (Rank r = 0; r < size(); ++r) in.push_back(random_values<float>(random_, n));
      auto expected = reduced(ReduceOp::kAverage, in);
      std::vector<OpId> ids;
      for (Rank r = 0; r < size(); ++r) {
        Operation o;
        o.op = ReduceOp::kAverage;
        o.count = n;
        o.codec.codec = codec;
        o.input = o.output = in[static_cast<std::size_t>(r)].data();
        auto id = cluster[r].submit(o, cluster.now);
        ASSERT_TRUE(id) << id.status().to_string();
        ids.push_back(*id);
      }
      cluster.expect_ok(ids);
      double unit = codec == plan::Codec::kFp16 ? 1.0 / 2048 : 1.0 / 256;
      for (Rank r = 0; r < size(); ++r) {
        auto& mine = in[static_cast<std::size_t>(r)];
        ASSERT_EQ(mine, in[0]) << "ranks must end bit-identical";
        for (std::size_t k = 0; k < n; ++k)
          ASSERT_NEAR(mine[k], expected[k], 50.0 * unit * (size() + 2)) << "element " << k;
      }
    }
  }
}

TEST_P(Collectives, ManyAtOnceInSubmissionOrder) {
  Cluster cluster(size(), GetParam().slots, options());
  constexpr int kOps = 40;
  std::vector<std::vector<std::vector<float>>> buffers(static_cast<std::size_t>(size()));
  std::vector<std::vector<float>> expected;
  std::vector<std::size_t> lengths;
  for (int k = 0; k < kOps; ++k) lengths.push_back(random_() % 6000);
  for (auto& b : buffers) {
    for (auto n : lengths) b.push_back(random_values<float>(random_, n));
  }
  for (std::size_t k = 0; k < lengths.size(); ++k) {
    std::vector<std::vector<float>> in;
    for (auto& b : buffers) in.push_back(b[k]);
    expected.push_back(reduced(ReduceOp::kSum, in));
  }
  std::vector<std::vector<OpId>> ids(kOps);
  for (Rank r = 0; r < size(); ++r) {
    for (std::size_t k = 0; k < kOps; ++k) {
      Operation o;
      o.count = lengths[k];
      o.input = o.output = buffers[static_cast<std::size_t>(r)][k].data();
      ids[k].push_back(*cluster[r].submit(o, cluster.now));
    }
  }
  for (auto& i : ids) cluster.expect_ok(i);
  for (auto& b : buffers) EXPECT_EQ(b, expected);
  auto s = cluster[0].statistics();
  EXPECT_EQ(s.operations, static_cast<uint64_t>(kOps));
}

INSTANTIATE_TEST_SUITE_P(Layouts, Collectives,
                         testing::Values(Layout{1, 1}, Layout{2, 1}, Layout{3, 1}, Layout{4, 2},
                                         Layout{5, 2}, Layout{8, 4}));

// An operation that ends while it is submitted is there at once, and may be taken before progress() tells of it: the next
// one, in the same place, has not ended then.
TEST(Operations, WhatEndsAtOnceLeavesItsPlaceToAnother) {
  Cluster cluster(2);
  std::vector<float> none, data(100'000, 1.0F);
  Operation empty;
  empty.input = empty.output = none.data();
  empty.name = "empty";
  Operation large = empty;
  large.input = large.output = data.data();
  large.count = data.size();
  large.name = "large";
  const auto first = *cluster[0].submit(empty, 0);
  ASSERT_NE(cluster[0].outcome(first), nullptr);
  cluster[0].forget(first);
  const auto second = *cluster[0].submit(large, 0);
  ASSERT_EQ(first & 0xffffff, second & 0xffffff) << "the place is another: nothing is tested";
  std::vector<OpId> ended;
  cluster[0].progress(0, ended);
  EXPECT_EQ(ended, std::vector<OpId>{first});
  EXPECT_EQ(cluster[0].outcome(second), nullptr);
}

}  // namespace
}  // namespace paceline::engine
