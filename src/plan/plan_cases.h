// What the tests of plans share: random requests and inputs, a run of all ranks' plans by the
// interpreter, and the reduction in the obvious order to compare with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "plan/cut.h"
#include "plan/plan.h"
#include "plan/plan_interpreter.h"

namespace paceline::plan::testing {

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

/// Of float32, as many ranks a node as `slots`.
inline PlanRequest all_reduce(Rank ranks, int slots, uint64_t bytes) {
  PlanRequest q;
  q.count = bytes / 4;
  q.shape.size = ranks;
  for (Rank r = 0; r < ranks; ++r) q.shape.node_of.push_back(r / slots);
  return q;
}

inline GroupShape random_shape(Dice& dice, Rank size) {
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

inline std::vector<std::byte> random_elements(Dice& dice, DType type, uint64_t count) {
  std::vector<std::byte> out(count * dtype_size(type));
  for (uint64_t i = 0; i < count; ++i) {
    std::byte* at = out.data() + i * dtype_size(type);
    // Small numbers of either sign, exact in half precision, not zero (for products).
    double value = (static_cast<double>(dice.below(32)) + 1) / 16 * (dice.coin() ? 1 : -1);
    switch (type) {
      case DType::kFloat32:
        store(at, static_cast<float>(value * (1 + 1e-3 * static_cast<double>(dice.below(100)))));
        break;
      case DType::kFloat64:
        store(at, value * (1 + 1e-9 * static_cast<double>(dice.below(100))));
        break;
      case DType::kFloat16:
        store(at, testing::float_to_half(static_cast<float>(value)));
        break;
      case DType::kBFloat16:
        store(at, testing::float_to_bf16(static_cast<float>(value)));
        break;
      case DType::kBool:
        store(at, static_cast<uint8_t>(dice.below(2)));
        break;
      default: {
        uint64_t bits = dice.bits();
        std::memcpy(at, &bits, dtype_size(type));
      }
    }
  }
  return out;
}

inline double number(DType type, const std::byte* at) {
  switch (type) {
    case DType::kFloat32:
      return load<float>(at);
    case DType::kFloat64:
      return load<double>(at);
    case DType::kFloat16:
      return testing::half_to_float(load<uint16_t>(at));
    case DType::kBFloat16:
      return testing::bf16_to_float(load<uint16_t>(at));
    default:
      return 0;
  }
}

/// Relative to the sum of magnitudes: what `ranks` roundings may do.
inline double tolerance(const PlanRequest& q) {
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
inline Expected reduce_in_order(const PlanRequest& q,
                                const std::vector<const std::byte*>& elements) {
  Expected e;
  std::size_t size = dtype_size(q.dtype);
  e.value.assign(elements[0], elements[0] + size);
  double product = 1;
  for (std::size_t r = 0; r < elements.size(); ++r) {
    if (r > 0) combine_element(q.dtype, q.op, e.value.data(), e.value.data(), elements[r]);
    double m = std::fabs(number(q.dtype, elements[r]));
    e.magnitude += m;
    product *= std::max(m, 1.0);
  }
  if (q.op == ReduceOp::kProduct) e.magnitude = product;
  if (q.op == ReduceOp::kAverage) {
    divide_element(q.dtype, e.value.data(), q.shape.size);
    e.magnitude /= q.shape.size;
  }
  return e;
}

inline ::testing::AssertionResult near(const PlanRequest& q, const std::byte* got,
                                       const Expected& want) {
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
inline uint64_t input_elements(const PlanRequest& q, std::size_t r) {
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
inline uint64_t output_elements(const PlanRequest& q, std::size_t r) {
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
inline Memory memory_for(const PlanRequest& q, std::size_t r, const std::vector<std::byte>& input) {
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

inline Case run(const PlanRequest& q, uint64_t seed) {
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

inline void expect_all_reduced(const Case& c) {
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

inline PlanRequest random_request(Dice& dice) {
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

inline std::string describe(const PlanRequest& q, uint64_t seed) {
  std::string nodes;
  for (int32_t n : q.shape.node_of) nodes += std::to_string(n) + " ";
  return "seed " + std::to_string(seed) + ": " + collective_name(q.collective) + " " +
         algorithm_name(q.algorithm) + " count " + std::to_string(q.count) + " nodes " + nodes +
         (q.in_place ? "in place" : "");
}

}  // namespace paceline::plan::testing
