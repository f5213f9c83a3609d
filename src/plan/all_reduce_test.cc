// All-reduce by every algorithm and codec, for random groups, sizes, types and operations.
#include <gtest/gtest.h>

#include <numeric>

#include "plan/plan_cases.h"

namespace paceline::plan {
namespace {

using testing::Case;
using testing::describe;
using testing::Dice;
using testing::expect_all_reduced;
using testing::Interpreter;
using testing::Memory;
using testing::memory_for;
using testing::random_request;
using testing::run;

void all_reduce_property(Algorithm algorithm, uint64_t seeds) {
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    Dice dice(seed * 977 + static_cast<uint64_t>(algorithm));
    PlanRequest q = random_request(dice);
    q.algorithm = algorithm;
    if (algorithm == Algorithm::kTwoLevel && dice.coin())
      q.inner_size = static_cast<int>(dice.between(1, 5));
    SCOPED_TRACE(describe(q, seed));
    expect_all_reduced(run(q, seed));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(AllReduce, Ring) { all_reduce_property(Algorithm::kRing, 60); }
TEST(AllReduce, Doubling) { all_reduce_property(Algorithm::kDoubling, 60); }
TEST(AllReduce, Tree) { all_reduce_property(Algorithm::kTree, 60); }
TEST(AllReduce, Direct) { all_reduce_property(Algorithm::kDirect, 60); }
TEST(AllReduce, TwoLevel) { all_reduce_property(Algorithm::kTwoLevel, 100); }
TEST(AllReduce, Auto) { all_reduce_property(Algorithm::kAuto, 60); }

// The long buffers among these take minutes under a sanitizer: fewer seeds there.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FEWER_SEEDS
#endif
#endif
#ifdef FEWER_SEEDS
constexpr uint64_t kDenseSeeds = 24;
#else
constexpr uint64_t kDenseSeeds = 160;
#endif

TEST(AllReduce, DenseCodecs) {
  for (uint64_t seed = 1; seed <= kDenseSeeds; ++seed) {
    Dice dice(seed);
    PlanRequest q = random_request(dice);
    q.dtype = DType::kFloat32;
    q.algorithm =
        dice.one_of({Algorithm::kDirect, Algorithm::kRing, Algorithm::kTwoLevel, Algorithm::kAuto});
    q.codec.codec = dice.one_of({Codec::kFp16, Codec::kBf16});
    q.codec.scale = dice.one_of({1.0, 10.0});
    q.codec.inside_node = dice.coin() || q.algorithm == Algorithm::kRing;
    // Long enough, now and then, for the rails of a two-level plan to be rings.
    if (dice.below(4) == 0) q.count = 300000 + dice.below(3000), q.piece_bytes = 64 * 1024;
    if (q.op == ReduceOp::kProduct) q.op = ReduceOp::kSum;  // may leave the range of fp16
    SCOPED_TRACE(describe(q, seed));
    expect_all_reduced(run(q, seed));
    if (HasFailure()) return;
  }
}

// What is gathered lies where the hops that reduce had theirs.
TEST(AllReduce, AnEncodedRingHasScratchForTheHopsThatReduce) {
  for (Rank n = 2; n <= 8; ++n) {
    PlanRequest q;
    q.shape.size = n;
    q.shape.node_of.resize(static_cast<std::size_t>(n));
    std::iota(q.shape.node_of.begin(), q.shape.node_of.end(), 0);
    q.count = 1 << 20;
    q.dtype = DType::kFloat32;
    q.algorithm = Algorithm::kRing;
    q.codec.codec = Codec::kFp16;
    for (Rank r = 0; r < n; ++r) {
      const auto plan = build(q, r);
      ASSERT_TRUE(plan.is_ok()) << plan.status().to_string();
      const auto hops = static_cast<uint64_t>(n - 1);
      const uint64_t sent = hops * (q.count * 2 / static_cast<uint64_t>(n));
      EXPECT_GE(plan->scratch_bytes, sent - 1024) << n << " ranks";
      EXPECT_LE(plan->scratch_bytes, sent + 1024) << n << " ranks";
    }
  }
}

TEST(AllReduce, InfinityAndNanReachAllRanksWithTheSameBits) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Dice dice(seed);
    PlanRequest q = random_request(dice);
    q.dtype = DType::kFloat32;
    q.count = 40;
    q.piece_bytes = 64;
    Dice inputs(seed);
    std::vector<Plan> plans;
    std::vector<Memory> memory;
    for (Rank r = 0; r < q.shape.size; ++r) {
      std::vector<std::byte> input(q.count * 4);
      for (uint64_t i = 0; i < q.count; ++i) {
        // Zeros of both signs, infinities, NaNs that can be told apart.
        uint32_t bits =
            inputs.one_of<uint32_t>({0, 0x80000000, 0x7f800000, 0xff800000, 0x3f800000,
                                     0x7fc00000 | static_cast<uint32_t>(inputs.below(1000))});
        testing::store(input.data() + 4 * i, bits);
      }
      memory.push_back(memory_for(q, static_cast<std::size_t>(r), input));
      auto plan = build(q, r);
      ASSERT_TRUE(plan) << plan.status().to_string();
      plans.push_back(*plan);
    }
    Interpreter interpreter(plans, memory, seed);
    auto wrong = interpreter.run();
    ASSERT_FALSE(wrong) << *wrong;
    for (const Memory& m : interpreter.memory()) {
      ASSERT_EQ(m.output, interpreter.memory()[0].output) << describe(q, seed);
    }
  }
}

// Top-k with a ratio of 1 keeps everything, so the sum is exact; below, it is what the same
// selection gives by hand.
TEST(AllReduce, SparseSumsEncodingsInNodeOrder) {
  for (uint64_t seed = 1; seed <= 80; ++seed) {
    Dice dice(seed);
    PlanRequest q = random_request(dice);
    q.dtype = DType::kFloat32;
    q.op = dice.one_of({ReduceOp::kSum, ReduceOp::kAverage});
    q.algorithm = dice.one_of({Algorithm::kSparse, Algorithm::kAuto});
    q.codec.codec = Codec::kTopK;
    q.codec.ratio = 1.0;
    q.codec.inside_node = dice.below(4) == 0;
    if (dice.coin()) q.inner_size = static_cast<int>(dice.between(1, 5));
    SCOPED_TRACE(describe(q, seed));
    expect_all_reduced(run(q, seed));
    if (HasFailure()) return;
    q.codec.ratio = 0.1;
    q.codec.fp16_values = dice.coin();
    Case c = run(q, seed);
    if (HasFailure()) return;
    for (const Memory& m : c.after) ASSERT_EQ(m.output, c.after[0].output);
  }
}

TEST(AllReduce, SparseKeepsTheLargestOfEachNodesSum) {
  PlanRequest q;
  q.shape = {4, {0, 0, 1, 1}};
  q.codec.codec = Codec::kTopK;
  q.codec.ratio = 1.0 / 64;
  q.count = 128;  // two shards of 64, one entry each
  std::vector<Memory> memory(4);
  std::vector<Plan> plans;
  std::vector<double> wanted(q.count);
  Dice dice(7);
  for (Rank r = 0; r < 4; ++r) {
    // Eighths, so that sums are exact: up to 1 of either sign, and large ones from 4 on.
    std::vector<float> input(q.count);
    for (auto& value : input) value = (static_cast<float>(dice.below(17)) - 8) / 8;
    // Shard 0: a different entry per node; shard 1: the same.
    for (const std::size_t large : {r < 2 ? std::size_t{5} : std::size_t{9}, std::size_t{100}}) {
      input[large] = 4 + static_cast<float>(dice.below(32)) / 8;
      wanted[large] += input[large];
    }
    auto& m = memory[static_cast<std::size_t>(r)];
    m.input.resize(q.count * 4);
    std::memcpy(m.input.data(), input.data(), m.input.size());
    m.output.resize(q.count * 4);
    plans.push_back(*build(q, r));
  }
  Interpreter interpreter(plans, memory, 1);
  auto wrong = interpreter.run();
  ASSERT_FALSE(wrong) << *wrong;
  for (const Memory& m : interpreter.memory()) {
    for (uint64_t i = 0; i < q.count; ++i)
      ASSERT_EQ(testing::load<float>(m.output.data() + 4 * i), wanted[i]) << i;
  }
}

}  // namespace
}  // namespace paceline::plan
