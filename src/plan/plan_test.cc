// Every plan, for random groups, sizes, types and operations, carried out by the interpreter and
// compared with a sum in the obvious order.
#include "plan/plan.h"

#include <gtest/gtest.h>

#include <random>

#include "plan/cut.h"
#include "plan/plan_interpreter.h"

namespace paceline::plan {
namespace {

using testing::Interpreter;
using testing::Memory;

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  uint64_t below(uint64_t n) { return random_() % n; }
  uint64_t between(uint64_t a, uint64_t b) { return a + below(b - a + 1); }
  bool coin() { return below(2) != 0; }
  uint64_t bits() { return random_(); }
  template <class T>
  T one_of(std::initializer_list<T> of) {
    return *(of.begin() + below(of.size()));
  }

 private:
  std::mt19937_64 random_;
};

GroupShape random_shape(Dice& dice, Rank size) {
  GroupShape shape;
  shape.size = size;
  uint64_t style = dice.below(5);
  uint64_t slots = dice.between(1, 4);
  for (Rank r = 0; r < size; ++r) {
    auto rank = static_cast<uint64_t>(r);
    uint64_t node = style == 0   ? 7
                    : style == 1 ? rank
                    : style == 2 ? rank / slots
                    : style == 3 ? rank % slots
                                 : dice.below(slots);
    shape.node_of.push_back(static_cast<int32_t>(node));
  }
  return shape;
}

std::vector<std::byte> random_elements(Dice& dice, DType type, uint64_t count) {
  std::vector<std::byte> out(count * dtype_size(type));
  for (uint64_t i = 0; i < count; ++i) {
    std::byte* at = out.data() + i * dtype_size(type);
    // Small numbers of either sign, exact in half precision, not zero (for products).
    double value = (static_cast<double>(dice.below(32)) + 1) / 16 * (dice.coin() ? 1 : -1);
    switch (type) {
      case DType::kFloat32:
        testing::store(
            at, static_cast<float>(value * (1 + 1e-3 * static_cast<double>(dice.below(100)))));
        break;
      case DType::kFloat64:
        testing::store(at, value * (1 + 1e-9 * static_cast<double>(dice.below(100))));
        break;
      case DType::kFloat16:
        testing::store(at, testing::float_to_half(static_cast<float>(value)));
        break;
      case DType::kBFloat16:
        testing::store(at, testing::float_to_bf16(static_cast<float>(value)));
        break;
      case DType::kBool:
        testing::store(at, static_cast<uint8_t>(dice.below(2)));
        break;
      default: {
        uint64_t bits = dice.bits();
        std::memcpy(at, &bits, dtype_size(type));
      }
    }
  }
  return out;
}

double number(DType type, const std::byte* at) {
  switch (type) {
    case DType::kFloat32:
      return testing::load<float>(at);
    case DType::kFloat64:
      return testing::load<double>(at);
    case DType::kFloat16:
      return testing::half_to_float(testing::load<uint16_t>(at));
    case DType::kBFloat16:
      return testing::bf16_to_float(testing::load<uint16_t>(at));
    default:
      return 0;
  }
}

/// Relative to the sum of magnitudes: what `ranks` roundings may do.
double tolerance(const PlanRequest& q) {
  double rounding = q.dtype == DType::kFloat64   ? 1e-15
                    : q.dtype == DType::kFloat32 ? 1e-6
                    : q.dtype == DType::kFloat16 ? 1e-3
                                                 : 8e-3;
  if (q.codec.codec == Codec::kFp16) rounding = 1e-3;
  if (q.codec.codec == Codec::kBf16) rounding = 8e-3;
  // A direct exchange rounds each contribution once and the sum once, whatever the number of ranks.
  if (q.codec.codec != Codec::kNone && q.algorithm == Algorithm::kDirect) return rounding * 1.1;
  return rounding * (q.shape.size + 2);
}

/// Reduction of the same elements of all inputs in rank order, and the scale of its error.
struct Expected {
  std::vector<std::byte> value;
  double magnitude = 0;
};
Expected reduce_in_order(const PlanRequest& q, const std::vector<const std::byte*>& elements) {
  Expected e;
  std::size_t size = dtype_size(q.dtype);
  e.value.assign(elements[0], elements[0] + size);
  double product = 1;
  for (std::size_t r = 0; r < elements.size(); ++r) {
    if (r > 0) testing::combine_element(q.dtype, q.op, e.value.data(), e.value.data(), elements[r]);
    double m = std::fabs(number(q.dtype, elements[r]));
    e.magnitude += m;
    product *= std::max(m, 1.0);
  }
  if (q.op == ReduceOp::kProduct) e.magnitude = product;
  if (q.op == ReduceOp::kAverage) {
    testing::divide_element(q.dtype, e.value.data(), q.shape.size);
    e.magnitude /= q.shape.size;
  }
  return e;
}

::testing::AssertionResult near(const PlanRequest& q, const std::byte* got, const Expected& want) {
  if (!dtype_is_float(q.dtype)) {
    if (std::memcmp(got, want.value.data(), dtype_size(q.dtype)) == 0)
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "integers differ";
  }
  double g = number(q.dtype, got);
  double w = number(q.dtype, want.value.data());
  if (std::fabs(g - w) <= tolerance(q) * want.magnitude + 1e-30)
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << g << " instead of " << w;
}

struct Case {
  PlanRequest request;
  std::vector<std::vector<std::byte>> inputs;
  std::vector<Memory> after;
  std::vector<Plan> plans;
};

/// Elements of rank r's input and output.
uint64_t input_elements(const PlanRequest& q, std::size_t r) {
  auto n = static_cast<std::size_t>(q.shape.size);
  auto root = static_cast<std::size_t>(q.root);
  auto sum = [](const std::vector<uint64_t>& v) {
    uint64_t s = 0;
    for (uint64_t c : v) s += c;
    return s;
  };
  switch (q.collective) {
    case Collective::kAllGather:
    case Collective::kGather:
      return q.counts[r];
    case Collective::kReduceScatter:
      return sum(q.counts);
    case Collective::kScatter:
      return r == root ? sum(q.counts) : 0;
    case Collective::kBroadcast:
      return r == root ? q.count : 0;
    case Collective::kAllToAll: {
      uint64_t s = 0;
      for (std::size_t k = 0; k < n; ++k) s += q.send_counts[r * n + k];
      return s;
    }
    case Collective::kBarrier:
      return 0;
    default:
      return q.count;
  }
}
uint64_t output_elements(const PlanRequest& q, std::size_t r) {
  auto n = static_cast<std::size_t>(q.shape.size);
  auto root = static_cast<std::size_t>(q.root);
  uint64_t s = 0;
  switch (q.collective) {
    case Collective::kAllGather:
      for (uint64_t c : q.counts) s += c;
      return s;
    case Collective::kGather:
      if (r != root) return 0;
      for (uint64_t c : q.counts) s += c;
      return s;
    case Collective::kReduceScatter:
    case Collective::kScatter:
      return q.counts[r];
    case Collective::kReduce:
      return r == root ? q.count : 0;
    case Collective::kAllToAll:
      for (std::size_t k = 0; k < n; ++k) s += q.send_counts[k * n + r];
      return s;
    case Collective::kBarrier:
      return 0;
    default:
      return q.count;
  }
}

/// Puts each rank's input where the plan expects it.
Memory memory_for(const PlanRequest& q, std::size_t r, const std::vector<std::byte>& input) {
  Memory m;
  m.input = input;
  m.output.assign(output_elements(q, r) * dtype_size(q.dtype), std::byte{0x5a});
  if (!q.in_place) return m;
  bool keeps_input = q.collective == Collective::kReduce && static_cast<Rank>(r) != q.root;
  if (q.collective == Collective::kAllGather) {
    uint64_t before = 0;
    for (std::size_t k = 0; k < r; ++k) before += q.counts[k];
    std::copy(input.begin(), input.end(),
              m.output.begin() + static_cast<std::ptrdiff_t>(before * dtype_size(q.dtype)));
  } else if (!keeps_input && !input.empty()) {
    m.output = input;
  }
  if (!keeps_input) m.input.clear();
  return m;
}

Case run(const PlanRequest& q, uint64_t seed) {
  Dice dice(seed);
  Case c;
  c.request = q;
  std::vector<Memory> memory;
  for (Rank r = 0; r < q.shape.size; ++r) {
    auto at = static_cast<std::size_t>(r);
    c.inputs.push_back(random_elements(dice, q.dtype, input_elements(q, at)));
    memory.push_back(memory_for(q, at, c.inputs.back()));
    auto plan = build(q, r);
    if (!plan) {
      ADD_FAILURE() << plan.status().to_string();
      return c;
    }
    c.plans.push_back(std::move(*plan));
  }
  Interpreter interpreter(c.plans, memory, seed);
  if (auto wrong = interpreter.run()) {
    ADD_FAILURE() << *wrong;
    return c;
  }
  c.after = interpreter.memory();
  return c;
}

void expect_all_reduced(const Case& c) {
  const PlanRequest& q = c.request;
  if (c.after.empty()) return;
  for (const Memory& m : c.after) {
    ASSERT_EQ(m.output, c.after[0].output) << "ranks end with different bits";
  }
  std::size_t size = dtype_size(q.dtype);
  for (uint64_t i = 0; i < q.count; ++i) {
    std::vector<const std::byte*> elements;
    for (const auto& input : c.inputs) elements.push_back(input.data() + i * size);
    ASSERT_TRUE(near(q, c.after[0].output.data() + i * size, reduce_in_order(q, elements)))
        << "element " << i;
  }
}

PlanRequest random_request(Dice& dice) {
  PlanRequest q;
  q.shape = random_shape(dice, static_cast<Rank>(dice.between(1, 17)));
  q.dtype = static_cast<DType>(dice.below(kDTypeCount));
  q.op = static_cast<ReduceOp>(dice.below(5));
  if (q.op == ReduceOp::kAverage && !dtype_is_float(q.dtype)) q.op = ReduceOp::kSum;
  q.count = dice.one_of<uint64_t>({0, 1, dice.below(100), dice.below(3000)});
  q.piece_bytes = dice.one_of<uint64_t>({64, 100, 1024, 512 * 1024});
  while (q.count * dtype_size(q.dtype) / q.piece_bytes > 40) q.piece_bytes *= 2;
  q.lanes = static_cast<int>(dice.between(1, 4));
  q.in_place = dice.coin();
  q.root = static_cast<Rank>(dice.below(static_cast<uint64_t>(q.shape.size)));
  return q;
}

std::string describe(const PlanRequest& q, uint64_t seed) {
  std::string nodes;
  for (int32_t n : q.shape.node_of) nodes += std::to_string(n) + " ";
  return "seed " + std::to_string(seed) + ": " + collective_name(q.collective) + " " +
         algorithm_name(q.algorithm) + " count " + std::to_string(q.count) + " nodes " + nodes +
         (q.in_place ? "in place" : "");
}

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
  for (Rank r = 0; r < 4; ++r) {
    std::vector<float> input(q.count, 0.25F);
    input[static_cast<std::size_t>(r < 2 ? 5 : 9)] = 4;     // shard 0: a different entry per node
    input[static_cast<std::size_t>(100)] = r < 2 ? 8 : 16;  // shard 1: the same
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
    for (uint64_t i = 0; i < q.count; ++i) {
      float want = i == 5 || i == 9 ? 8.0F : i == 100 ? 48.0F : 0.0F;
      ASSERT_EQ(testing::load<float>(m.output.data() + 4 * i), want) << i;
    }
  }
}

template <class Check>
void property(Collective collective, std::initializer_list<Algorithm> algorithms, uint64_t seeds,
              Check check) {
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    Dice dice(seed * 31 + static_cast<uint64_t>(collective));
    PlanRequest q = random_request(dice);
    q.collective = collective;
    q.algorithm = dice.one_of(algorithms);
    auto n = static_cast<uint64_t>(q.shape.size);
    bool often_empty = dice.coin();
    for (uint64_t r = 0; r < n; ++r)
      q.counts.push_back(often_empty && dice.coin() ? 0 : dice.below(300));
    if (collective == Collective::kAllToAll) {
      for (uint64_t i = 0; i < n * n; ++i)
        q.send_counts.push_back(dice.below(often_empty ? 3 : 100));
      q.in_place = false;
    }
    if (collective == Collective::kGather || collective == Collective::kScatter) q.in_place = false;
    SCOPED_TRACE(describe(q, seed));
    Case c = run(q, seed);
    if (!::testing::Test::HasFailure()) check(c);
    if (::testing::Test::HasFailure()) return;
  }
}

std::vector<std::byte> block(const std::vector<std::byte>& bytes,
                             const std::vector<uint64_t>& counts, std::size_t r,
                             std::size_t element) {
  uint64_t before = 0;
  for (std::size_t k = 0; k < r; ++k) before += counts[k];
  auto from = bytes.begin() + static_cast<std::ptrdiff_t>(before * element);
  return {from, from + static_cast<std::ptrdiff_t>(counts[r] * element)};
}

std::vector<std::byte> joined(const std::vector<std::vector<std::byte>>& parts) {
  std::vector<std::byte> out;
  for (const auto& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

TEST(Broadcast, EveryRankHasTheRootsBuffer) {
  property(Collective::kBroadcast, {Algorithm::kRing, Algorithm::kTree, Algorithm::kAuto}, 100,
           [](const Case& c) {
             for (const Memory& m : c.after)
               ASSERT_EQ(m.output, c.inputs[static_cast<std::size_t>(c.request.root)]);
           });
}

TEST(AllGather, BlocksInRankOrder) {
  property(Collective::kAllGather,
           {Algorithm::kRing, Algorithm::kDirect, Algorithm::kTwoLevel, Algorithm::kAuto}, 150,
           [](const Case& c) {
             for (const Memory& m : c.after) ASSERT_EQ(m.output, joined(c.inputs));
           });
}

void expect_reduce_scattered(const Case& c) {
  const PlanRequest& q = c.request;
  std::size_t size = dtype_size(q.dtype);
  uint64_t at = 0;
  for (std::size_t r = 0; r < c.after.size(); ++r) {
    for (uint64_t i = 0; i < q.counts[r]; ++i) {
      std::vector<const std::byte*> elements;
      for (const auto& input : c.inputs) elements.push_back(input.data() + (at + i) * size);
      uint64_t place = q.in_place ? at + i : i;
      ASSERT_TRUE(near(q, c.after[r].output.data() + place * size, reduce_in_order(q, elements)))
          << "rank " << r;
    }
    at += q.counts[r];
  }
}

TEST(ReduceScatter, EachRankHasItsBlockOfTheReduction) {
  property(Collective::kReduceScatter,
           {Algorithm::kRing, Algorithm::kDirect, Algorithm::kTwoLevel, Algorithm::kAuto}, 150,
           expect_reduce_scattered);
}

TEST(ReduceScatter, WithCodec) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Dice dice(seed);
    PlanRequest q = random_request(dice);
    q.collective = Collective::kReduceScatter;
    q.algorithm = dice.one_of({Algorithm::kDirect, Algorithm::kTwoLevel, Algorithm::kAuto});
    q.dtype = DType::kFloat32;
    q.codec.codec = dice.one_of({Codec::kFp16, Codec::kBf16});
    if (q.op == ReduceOp::kProduct) q.op = ReduceOp::kMax;
    for (Rank r = 0; r < q.shape.size; ++r) q.counts.push_back(dice.below(200));
    SCOPED_TRACE(describe(q, seed));
    expect_reduce_scattered(run(q, seed));
    if (HasFailure()) return;
  }
}

TEST(AllToAll, Transposes) {
  property(Collective::kAllToAll, {Algorithm::kDirect, Algorithm::kAuto}, 80, [](const Case& c) {
    const PlanRequest& q = c.request;
    auto n = static_cast<std::size_t>(q.shape.size);
    for (std::size_t r = 0; r < n; ++r) {
      std::vector<std::vector<std::byte>> parts;
      PlanRequest mine = q;  // the form with this rank's counts alone gives the same plan
      mine.send_counts.clear();
      for (std::size_t s = 0; s < n; ++s) {
        auto begin = q.send_counts.begin() + static_cast<std::ptrdiff_t>(s * n);
        std::vector<uint64_t> row(begin, begin + static_cast<std::ptrdiff_t>(n));
        parts.push_back(block(c.inputs[s], row, r, dtype_size(q.dtype)));
        mine.send_counts.push_back(q.send_counts[r * n + s]);
        mine.receive_counts.push_back(row[r]);
      }
      ASSERT_EQ(c.after[r].output, joined(parts));
      auto plan = build(mine, static_cast<Rank>(r));
      ASSERT_TRUE(plan) << plan.status().to_string();
      ASSERT_EQ(plan->steps, c.plans[r].steps);
    }
  });
}

TEST(Reduce, RootHasTheReduction) {
  property(Collective::kReduce, {Algorithm::kRing, Algorithm::kTree, Algorithm::kAuto}, 100,
           [](const Case& c) {
             const PlanRequest& q = c.request;
             std::size_t size = dtype_size(q.dtype);
             const Memory& root = c.after[static_cast<std::size_t>(q.root)];
             for (uint64_t i = 0; i < q.count; ++i) {
               std::vector<const std::byte*> elements;
               for (const auto& input : c.inputs) elements.push_back(input.data() + i * size);
               ASSERT_TRUE(near(q, root.output.data() + i * size, reduce_in_order(q, elements)));
             }
           });
}

TEST(Gather, RootHasAllBlocks) {
  property(Collective::kGather, {Algorithm::kDirect, Algorithm::kAuto}, 50, [](const Case& c) {
    ASSERT_EQ(c.after[static_cast<std::size_t>(c.request.root)].output, joined(c.inputs));
  });
}

TEST(Scatter, EachRankHasItsBlock) {
  property(Collective::kScatter, {Algorithm::kDirect, Algorithm::kAuto}, 50, [](const Case& c) {
    const auto& source = c.inputs[static_cast<std::size_t>(c.request.root)];
    for (std::size_t r = 0; r < c.after.size(); ++r) {
      ASSERT_EQ(c.after[r].output, block(source, c.request.counts, r, dtype_size(c.request.dtype)));
    }
  });
}

// Nobody can end before everybody has begun: each rank's last steps depend, over messages, on every
// rank's first.
TEST(Barrier, NobodyLeavesBeforeAllHaveCome) {
  for (Rank n = 1; n <= 17; ++n) {
    PlanRequest q;
    q.collective = Collective::kBarrier;
    q.shape.size = n;
    q.shape.node_of.assign(static_cast<std::size_t>(n), 0);
    Case c = run(q, static_cast<uint64_t>(n));
    ASSERT_FALSE(HasFailure());
    auto ranks = static_cast<std::size_t>(n);
    // heard[r][s]: whom rank r has heard of once its step s has ended.
    std::vector<std::vector<std::vector<bool>>> heard(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      heard[r].assign(c.plans[r].steps.size(), std::vector<bool>(ranks));
      for (auto& h : heard[r]) h[r] = true;
    }
    for (int sweep = 0; sweep < 8; ++sweep) {
      for (std::size_t r = 0; r < ranks; ++r) {
        const auto& steps = c.plans[r].steps;
        for (std::size_t i = 0; i < steps.size(); ++i) {
          auto merge = [&](const std::vector<bool>& other) {
            for (std::size_t k = 0; k < ranks; ++k) {
              if (other[k]) heard[r][i][k] = true;
            }
          };
          for (uint32_t d : steps[i].after) merge(heard[r][d]);
          if (steps[i].kind != StepKind::kReceive) continue;
          auto from = static_cast<std::size_t>(steps[i].peer);
          const auto& theirs = c.plans[from].steps;
          for (std::size_t k = 0; k < theirs.size(); ++k) {
            bool match = theirs[k].kind == StepKind::kSend &&
                         theirs[k].peer == static_cast<Rank>(r) && theirs[k].slot == steps[i].slot;
            if (match) merge(heard[from][k]);
          }
        }
      }
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      std::vector<bool> all(ranks);
      all[r] = true;
      for (const auto& h : heard[r]) {
        for (std::size_t k = 0; k < ranks; ++k) all[k] = all[k] || h[k];
      }
      ASSERT_EQ(std::count(all.begin(), all.end(), true), n) << "rank " << r << " of " << n;
    }
  }
}

// The interpreter finds what it is there to find.

std::optional<std::string> verdict(const std::vector<Plan>& plans) {
  std::vector<Memory> memory;
  for (const Plan& plan : plans) {
    std::vector<std::byte> input(plan.request.count * 4);
    memory.push_back(memory_for(plan.request, static_cast<std::size_t>(plan.me), input));
  }
  return Interpreter(plans, memory, 1).run();
}

std::vector<Plan> ring_in_place() {
  PlanRequest q;
  q.algorithm = Algorithm::kRing;
  q.shape = {3, {0, 1, 2}};
  q.count = 48;
  q.in_place = true;
  std::vector<Plan> plans;
  for (Rank r = 0; r < 3; ++r) plans.push_back(*build(q, r));
  return plans;
}

TEST(Interpreter, FindsForgottenDependencies) {
  ASSERT_FALSE(verdict(ring_in_place()));
  std::size_t steps = ring_in_place()[1].steps.size();
  for (std::size_t i = 0; i < steps; ++i) {
    auto plans = ring_in_place();
    if (plans[1].steps[i].after.empty()) continue;
    plans[1].steps[i].after.clear();
    auto wrong = verdict(plans);
    ASSERT_TRUE(wrong) << "step " << i;
    EXPECT_NE(wrong->find("races"), std::string::npos);
  }
}

TEST(Interpreter, FindsMessagesThatDoNotMatch) {
  auto plans = ring_in_place();
  plans[1].steps.pop_back();  // the last receive
  EXPECT_TRUE(verdict(plans));
  plans = ring_in_place();
  plans[1].steps[0].src.bytes -= 4;
  EXPECT_TRUE(verdict(plans));
  plans = ring_in_place();
  plans[1].steps[0].slot = 1;
  EXPECT_TRUE(verdict(plans));
}

TEST(Interpreter, FindsReadsOfWhatWasNeverWritten) {
  auto plans = ring_in_place();
  plans[1].scratch_bytes = 64;
  plans[1].steps[0].src.buffer = Buffer::kScratch;
  plans[1].steps[0].src.offset = 0;
  EXPECT_TRUE(verdict(plans));
}

}  // namespace
}  // namespace paceline::plan
