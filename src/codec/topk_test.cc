// Top-k: the identity in bits, the selection against a sort, the count, Inf and NaN, and what each
// SIMD target writes.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/positions.h"
#include "codec/topk_format.h"
#include "codec/topk_sample.h"
#include "device/cpu/each_target.h"

namespace paceline::codec {
namespace {

using Floats = std::vector<float>;

plan::CodecSpec topk_spec(double ratio, bool fp16 = false) {
  plan::CodecSpec spec;
  spec.codec = plan::Codec::kTopK;
  spec.ratio = ratio;
  spec.fp16_values = fp16;
  return spec;
}

Status decode_one(std::span<const std::byte> encoded, std::span<float> dst, double divisor = 1.0) {
  return decode_sum_topk({&encoded, 1}, dst, divisor);
}

/// One encoder's state: a residual in `cuts` runs of their own memory.
struct Encoder {
  Floats before, after;
  std::vector<std::byte> bytes;
  EncodedTopK result;

  void encode(const plan::CodecSpec& spec, const Floats& gradient,
              const std::vector<std::size_t>& cuts = {}, Workers* workers = nullptr) {
    before.resize(gradient.size());
    after.assign(gradient.size(), -12345.0f);
    std::vector<ResidualRun> runs;
    std::size_t at = 0;
    for (std::size_t i = 0; i <= cuts.size(); ++i) {
      const std::size_t end = i < cuts.size() ? cuts[i] : gradient.size();
      if (end > at || gradient.empty())
        runs.push_back({before.data() + at, after.data() + at, end - at});
      at = end;
    }
    const uint64_t bound = encoded_bytes(spec, DType::kFloat32, gradient.size());
    bytes.assign(bound + 16, std::byte{0xEE});
    result = encode_topk(spec, gradient, runs, bytes.data(), workers);
    ASSERT_LE(result.bytes, bound) << "the bound is broken";
    for (std::size_t i = bound; i < bytes.size(); ++i)
      ASSERT_EQ(bytes[i], std::byte{0xEE}) << "wrote beyond the bound";
    bytes.resize(result.bytes);
  }
  [[nodiscard]] Floats decode(std::size_t elements) const {
    Floats out(elements, 6.0f);
    const Status status = decode_one(bytes, out);
    EXPECT_TRUE(status.is_ok()) << status.to_string();
    Floats quarter(elements, 7.0F);
    EXPECT_TRUE(decode_one(bytes, quarter, 4.0).is_ok());
    for (std::size_t i = 0; i < elements && result.finite; ++i)
      EXPECT_EQ(quarter[i], out[i] * 0.25F);
    return out;
  }
};

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
/// Bits with the sign of zero forgotten (adding an unsent element's 0 to a rest of -0 gives +0).
uint32_t number(float x) { return bits(x + 0.0f); }

/// decode + r' == g + r in bits; what travelled are the `kept` largest; a float32 value travels
/// unchanged.
void check_encoding(const plan::CodecSpec& spec, const Floats& gradient, const Floats& residual,
                    const Encoder& e) {
  const std::size_t n = gradient.size();
  Floats sum(n);
  for (std::size_t i = 0; i < n; ++i) sum[i] = gradient[i] + residual[i];
  const Floats decoded = e.decode(n);
  std::size_t nonzero = 0;
  for (std::size_t i = 0; i < n; ++i) {
    ASSERT_EQ(number(decoded[i] + e.after[i]), number(sum[i]))
        << "element " << i << " of " << n << ": sent " << decoded[i] << ", rest " << e.after[i]
        << ", sum " << sum[i];
    if (sum[i] != 0) ++nonzero;
  }
  const std::size_t keep = top_k_count(spec, n);
  ASSERT_EQ(e.result.kept, std::min(keep, nonzero));
  // The reference: by magnitude, then by position.
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return std::abs(sum[a]) > std::abs(sum[b]); });
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t at = order[i];
    if (i >= e.result.kept) {
      ASSERT_EQ(bits(decoded[at]), 0U) << "not among the largest, but sent";
      ASSERT_EQ(bits(e.after[at]), bits(sum[at]));
    } else if (!spec.fp16_values) {
      ASSERT_EQ(bits(decoded[at]), bits(sum[at])) << "among the largest, but not sent";
      ASSERT_EQ(bits(e.after[at]), 0U);
    } else {
      ASSERT_LE(std::abs(e.after[at]), std::abs(sum[at]) / 2048 + std::abs(sum[order[0]]) * 0x1p-34)
          << "an fp16 value leaves at most half a unit of its last place, or all of what is 2^-34 "
             "of the largest";
    }
  }
}

enum class Shape {
  kNormal,
  kLaplace,
  kHeavy,
  kMostlyZero,
  kJump,
  kEqual,
  kTies,
  kZero,
  kDenormal,
  kWild,
  kRising,
  kPeriodic
};
constexpr Shape kShapes[] = {Shape::kNormal,   Shape::kLaplace, Shape::kHeavy,  Shape::kMostlyZero,
                             Shape::kJump,     Shape::kEqual,   Shape::kTies,   Shape::kZero,
                             Shape::kDenormal, Shape::kWild,    Shape::kRising, Shape::kPeriodic};

Floats make(Shape shape, std::size_t n, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  std::exponential_distribution<double> exponential;
  std::cauchy_distribution<double> cauchy;
  std::uniform_real_distribution<double> uniform;
  Floats x(n);
  const double constant = normal(random);
  for (std::size_t i = 0; i < n; ++i) {
    const double sign = (random() & 1) != 0 ? 1.0 : -1.0;
    switch (shape) {
      case Shape::kNormal:
        x[i] = static_cast<float>(1e-3 * normal(random));
        break;
      case Shape::kLaplace:
        x[i] = static_cast<float>(sign * exponential(random));
        break;
      case Shape::kHeavy:
        x[i] = static_cast<float>(std::clamp(cauchy(random), -1e12, 1e12));
        break;
      case Shape::kMostlyZero:
        x[i] = uniform(random) < 0.9 ? 0.0f : static_cast<float>(normal(random));
        break;
      case Shape::kJump:
        x[i] = static_cast<float>(normal(random) * (i < n / 2 ? 1 : 10));
        break;
      case Shape::kEqual:
        x[i] = static_cast<float>(sign * constant);
        break;
      case Shape::kTies:
        x[i] = static_cast<float>(sign * static_cast<double>(random() % 3));
        break;
      case Shape::kZero:
        x[i] = sign > 0 ? 0.0f : -0.0f;
        break;
      case Shape::kDenormal:
        x[i] = std::bit_cast<float>(static_cast<uint32_t>(random() & 0x807FFFFF));
        break;
      case Shape::kWild: {  // any finite bits; halved, so that sums stay finite
        const auto raw = std::bit_cast<float>(static_cast<uint32_t>(random()));
        x[i] = std::isfinite(raw) ? raw / 2 : 1.0f;
        break;
      }
      case Shape::kRising:
        x[i] = static_cast<float>(i + 1);
        break;  // the worst order for a rising threshold
      case Shape::kPeriodic:
        x[i] = (i % 128) < 16 ? static_cast<float>(normal(random)) : 0.0f;
        break;
    }
  }
  return x;
}

TEST(TopK, TheIdentityAndTheSelectionHoldForEveryShape) {
  EXPECT_TRUE(rc::check([](uint64_t seed, bool fp16) {
    std::mt19937_64 random(seed);
    const auto shape =
        *rc::gen::elementOf(std::vector<Shape>(std::begin(kShapes), std::end(kShapes)));
    const auto n = *rc::gen::oneOf(rc::gen::inRange<std::size_t>(0, 70),
                                   rc::gen::inRange<std::size_t>(70, 9000));
    const auto spec = topk_spec(*rc::gen::element(0.001, 0.01, 0.1, 0.5, 1.0), fp16);
    std::vector<std::size_t> cuts(*rc::gen::inRange<std::size_t>(0, 5));
    for (auto& c : cuts) c = n == 0 ? 0 : random() % n;
    std::sort(cuts.begin(), cuts.end());
    Encoder e;
    e.before.assign(n, 0.0f);
    for (int step = 0; step < 3; ++step) {  // the residual of one step feeds the next
      const Floats gradient = make(shape, n, random);
      const Floats residual = e.before;
      e.encode(spec, gradient, cuts);
      check_encoding(spec, gradient, residual, e);
      RC_ASSERT_FALSE(::testing::Test::HasFatalFailure());
      e.before = e.after;
    }
  }));
}

TEST(TopK, LargeBuffersOfEveryShapeKeepExactlyK) {
  std::mt19937_64 random(42);
  for (const Shape shape : kShapes) {
    for (const double ratio : {0.01, 0.001}) {
      const std::size_t n = 110007;
      Encoder e;
      e.before = make(Shape::kNormal, n, random);
      if (shape == Shape::kEqual || shape == Shape::kZero) e.before.assign(n, 0.0f);
      const Floats gradient = make(shape, n, random);
      const Floats residual = e.before;
      e.encode(topk_spec(ratio), gradient, {100, 70000, 100001});
      SCOPED_TRACE(static_cast<int>(shape));
      check_encoding(topk_spec(ratio), gradient, residual, e);
      ASSERT_FALSE(HasFatalFailure());
    }
  }
}

enum class Trap { kHotStretch, kRisingQuarter, kFewNumbers, kHiddenSpike, kHiddenRow };

Floats make(Trap trap, std::size_t n, std::mt19937_64& random) {
  Floats x = make(Shape::kNormal, n, random);
  for (std::size_t i = 0; i < n; ++i) {
    switch (trap) {
      case Trap::kHotStretch:  // larger than k, seen by few samples
        if (i > n / 2 && i < n / 2 + n / 60) x[i] *= 1e6f;
        break;
      case Trap::kRisingQuarter:
        x[i] = i > n * 3 / 4 ? static_cast<float>(i) : 0.0f;
        break;
      case Trap::kFewNumbers:  // fewer than k
        x[i] = i % 997 == 0 ? x[i] : 0.0f;
        break;
      case Trap::kHiddenSpike:  // beyond what the sample says of fp16's range
        if (i == n / 3) x[i] = -1e20f;
        break;
      case Trap::kHiddenRow:  // small numbers where the sample says that there are none
        x[i] = i / 8 == n / 24 ? 1e-6f * x[i] : 0.0f;
        break;
    }
  }
  return x;
}

TEST(TopK, AWrongFirstGuessCostsOnlyTime) {
  // The sample sees groups of 16 elements. Values that hide between groups, or sit in few places only, make it miss
  // either way; the result is the exact one all the same.
  std::mt19937_64 random(1);
  const std::size_t n = (1 << 20) + 17;
  for (const Trap trap : {Trap::kHotStretch, Trap::kRisingQuarter, Trap::kFewNumbers,
                          Trap::kHiddenSpike, Trap::kHiddenRow}) {
    for (const bool fp16 : {false, true}) {
      Encoder e;
      e.before.assign(n, 0.0f);
      const Floats gradient = make(trap, n, random);
      const Floats residual = e.before;
      e.encode(topk_spec(0.01, fp16), gradient, {12345});
      SCOPED_TRACE(static_cast<int>(trap) * 2 + static_cast<int>(fp16));
      check_encoding(topk_spec(0.01, fp16), gradient, residual, e);
      ASSERT_FALSE(HasFatalFailure());
    }
  }
}

/// Which elements the sample looks at: one that is larger than all others is the largest of a sample that saw it.
std::vector<std::size_t> sampled_places(std::size_t n, uint64_t keep) {
  Floats probe(n, 1e-3f);
  const Floats zero(n, 0.0f);
  Floats rest(n);
  const ResidualRun run{zero.data(), rest.data(), n};
  std::vector<std::size_t> seen;
  topk::SampleMemory memory;
  for (std::size_t i = 0; i < n; ++i) {
    probe[i] = 1.0f;
    if (topk::guess_threshold({probe, {}}, {&run, 1}, keep, memory).largest == 1.0f)
      seen.push_back(i);
    probe[i] = 1e-3f;
  }
  return seen;
}

TEST(TopK, WhatAGuessTooHighMissedIsFetched) {
  const std::size_t n = 10000;
  const auto spec = topk_spec(0.1);
  const uint64_t keep = top_k_count(spec, n);
  const auto seen = sampled_places(n, keep);
  ASSERT_GT(seen.size(), n / 10);
  ASSERT_LT(seen.size(), n);
  std::mt19937_64 random(5);
  for (const bool fp16 : {false, true}) {
    Floats gradient = make(Shape::kNormal, n, random);
    // Half as many large numbers as are to be kept, all of them where the sample looks: it takes them for twice as many.
    for (std::size_t i = 0; i < keep / 2; ++i)
      gradient[seen[i]] = 1e4f * (1.0f + static_cast<float>(random() % 1000) / 1000.0f);
    Encoder e;
    e.before.assign(n, 0.0f);
    const Floats residual = e.before;
    e.encode(topk_spec(0.1, fp16), gradient);
    EXPECT_EQ(e.result.kept, keep);
    check_encoding(topk_spec(0.1, fp16), gradient, residual, e);
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(TopK, InfAndNanAreSeenAnywhereAndReachEveryElement) {
  EXPECT_TRUE(rc::check([](uint64_t seed, bool fp16, bool in_residual) {
    std::mt19937_64 random(seed);
    const std::size_t n = *rc::gen::oneOf(rc::gen::inRange<std::size_t>(1, 60),
                                          rc::gen::inRange<std::size_t>(60, 40000));
    Floats gradient = make(Shape::kNormal, n, random);
    Encoder e;
    e.before = make(Shape::kNormal, n, random);
    const float inf = std::numeric_limits<float>::infinity();
    const float bad = *rc::gen::element(inf, -inf, std::numeric_limits<float>::quiet_NaN());
    (in_residual ? e.before : gradient)[random() % n] = bad;
    const Floats residual = e.before;
    e.encode(topk_spec(0.01, fp16), gradient);
    RC_ASSERT_FALSE(e.result.finite);
    RC_ASSERT(e.result.kept == 0U);
    for (const float x : e.decode(n)) RC_ASSERT(bits(x) == 0x7FC00000U);
    RC_ASSERT(std::memcmp(e.after.data(), residual.data(), n * 4) == 0);
  }));
}

TEST(TopK, ASumThatOverflowsIsNotFinite) {
  Encoder e;
  e.before.assign(100, 3e38f);
  e.encode(topk_spec(0.1), Floats(100, 3e38f));
  EXPECT_FALSE(e.result.finite);
}

TEST(TopK, EverySimdTargetWritesTheSameBytes) {
  std::mt19937_64 random(8);
  for (const bool fp16 : {false, true}) {
    for (const Shape shape : kShapes) {
      const std::size_t n = 100003;
      const Floats gradient = make(shape, n, random);
      const Floats residual = make(Shape::kNormal, n, random);
      Encoder first;
      first.before = residual;
      first.encode(topk_spec(0.02, fp16), gradient, {5, 5000});
      const Floats decoded = first.decode(n);
      cpu::on_each_target([&](const char* target) {
        Encoder e;
        e.before = residual;
        e.encode(topk_spec(0.02, fp16), gradient, {5, 5000});
        EXPECT_EQ(e.bytes, first.bytes) << target;
        EXPECT_EQ(0, std::memcmp(e.after.data(), first.after.data(), n * 4)) << target;
        EXPECT_EQ(0, std::memcmp(e.decode(n).data(), decoded.data(), n * 4)) << target;
      });
    }
  }
}

TEST(TopK, Fp16ValuesKeepSmallAndLargeGradientsAlive) {
  // Plain fp16 would send 0 for the first and infinity for the last.
  for (const float magnitude :
       {1e-42f, 1e-12f, 1e-8f, 1.0f, 1e6f, 1e30f, 3e38f, std::numeric_limits<float>::max()}) {
    std::mt19937_64 random(3);
    Floats gradient(1000);
    for (auto& x : gradient) x = magnitude * (static_cast<float>(random() % 1000) / 999.0f);
    gradient[500] = magnitude;
    Encoder e;
    e.before.assign(1000, 0.0f);
    e.encode(topk_spec(0.1, true), gradient);
    const Floats out = e.decode(1000);
    const auto largest = std::max_element(gradient.begin(), gradient.end()) - gradient.begin();
    EXPECT_GT(out[largest], gradient[largest] * 0.999f) << magnitude;
    EXPECT_TRUE(std::isfinite(out[largest]));
    check_encoding(topk_spec(0.1, true), gradient, Floats(1000, 0.0f), e);
  }
}

TEST(TopK, BytesPerEntryAreNearTheEntropy) {
  std::mt19937_64 random(12);
  const std::size_t n = 1 << 22;
  const Floats gradient = make(Shape::kNormal, n, random);
  for (const auto& [ratio, position_bits] : {std::pair{0.01, 8.25}, std::pair{0.001, 11.9}}) {
    Encoder e;
    e.before.assign(n, 0.0f);
    e.encode(topk_spec(ratio, true), gradient);
    const double each =
        8.0 * static_cast<double>(e.result.bytes) / static_cast<double>(e.result.kept) - 16;
    EXPECT_LT(each, position_bits) << "bits a position at " << ratio;
    EXPECT_LT(static_cast<double>(encoded_bytes(topk_spec(ratio, true), DType::kFloat32, n)),
              1.04 * static_cast<double>(e.result.bytes))
        << "the plan's prediction must stay near what is sent";
  }
}

TEST(TopK, PositionsComeBackForEveryDensity) {
  EXPECT_TRUE(rc::check([](uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto n = *rc::gen::inRange<uint64_t>(1, 300000);
    const double density = *rc::gen::element(0.00001, 0.001, 0.01, 0.3, 0.9, 1.0);
    std::vector<uint32_t> positions;
    std::uniform_real_distribution<double> uniform;
    for (uint32_t i = 0; i < n; ++i)
      if (uniform(random) < density) positions.push_back(i);
    const uint64_t bound =
        topk::encoded_bound(n, positions.size(), false) - positions.size() * 4 - topk::kHeaderBytes;
    std::vector<std::byte> bytes(bound);
    const uint64_t used = topk::encode_positions(positions, n, bytes.data());
    RC_ASSERT(used + topk::kSlackBytes <= bound);
    topk::PositionReader reader({bytes.data(), used}, n);
    std::vector<uint32_t> back;
    while (reader.next_block())
      for (uint32_t i = 0; i < reader.entries();) {
        uint64_t some[40];
        const auto wanted = static_cast<uint32_t>(random() % 40 + 1);
        const uint32_t count = std::min(wanted, reader.entries() - i);
        RC_ASSERT(reader.next(count, some));
        for (uint32_t j = 0; j < count; ++j) back.push_back(static_cast<uint32_t>(some[j]));
        i += count;
      }
    RC_ASSERT(std::string(reader.finish()).empty());
    RC_ASSERT(back == positions);
  }));
}

// Over three blocks of the format, one of them short; the last two encodings have none and few entries.
TEST(TopK, SeveralEncodingsAddUpInTheirOrder) {
  std::mt19937_64 random(77);
  const std::size_t n = 2 * topk::kBlockElements + 777;
  for (const double divisor : {1.0, 4.0, 5.0, 3.0}) {
    std::vector<Encoder> encoders(5);
    std::vector<std::span<const std::byte>> encodings;
    Floats want(n, 0.0F);
    for (std::size_t rank = 0; rank < encoders.size(); ++rank) {
      Encoder& e = encoders[rank];
      Floats gradient = make(Shape::kLaplace, n, random);
      if (rank == 3) gradient.assign(n, 0.0F);
      if (rank == 4) std::fill(gradient.begin() + 5, gradient.end(), 0.0F);
      e.before.assign(n, 0.0f);
      e.encode(topk_spec(0.05, rank == 1), gradient);
      encodings.emplace_back(e.bytes);
      const Floats decoded = e.decode(n);
      for (std::size_t i = 0; i < n; ++i) want[i] += decoded[i];
    }
    Floats sum(n, 9.0F);  // what was there doesn't matter
    ASSERT_TRUE(decode_sum_topk(encodings, sum, divisor).is_ok());
    for (std::size_t i = 0; i < n; ++i)
      ASSERT_EQ(bits(sum[i]), bits(static_cast<float>(want[i] / divisor))) << i << " / " << divisor;
  }
}

TEST(TopK, NoEncodingsAreASumOfZeros) {
  Floats sum(1000, 9.0F);
  ASSERT_TRUE(decode_sum_topk({}, sum, 3.0).is_ok());
  EXPECT_EQ(sum, Floats(1000, 0.0F));
}

TEST(TopK, OneNonFiniteEncodingMakesTheSumNaN) {
  std::mt19937_64 random(5);
  const std::size_t n = 70000;
  std::vector<Encoder> encoders(2);
  for (Encoder& e : encoders) {
    Floats gradient = make(Shape::kNormal, n, random);
    if (&e == &encoders[1]) gradient[n - 1] = INFINITY;
    e.before.assign(n, 0.0F);
    e.encode(topk_spec(0.01), gradient);
  }
  const std::span<const std::byte> encodings[] = {encoders[0].bytes, encoders[1].bytes};
  Floats sum(n, 0.0F);
  ASSERT_TRUE(decode_sum_topk(encodings, sum, 2.0).is_ok());
  for (const float x : sum) ASSERT_TRUE(std::isnan(x));
  // A damaged one is refused whatever the others say.
  const std::span<const std::byte> damaged[] = {std::span(encoders[0].bytes).first(100),
                                                encoders[1].bytes};
  EXPECT_EQ(decode_sum_topk(damaged, sum, 2.0).code(), Code::kCorrupted);
}

TEST(TopK, DamagedBytesAreRefused) {
  std::mt19937_64 random(4);
  const std::size_t n = 3000;
  for (const bool fp16 : {false, true}) {
    Encoder e;
    e.before.assign(n, 0.0f);
    e.encode(topk_spec(0.05, fp16), make(Shape::kNormal, n, random));
    Floats out(n);
    for (std::size_t length = 0; length < e.bytes.size(); ++length) {
      const Status status = decode_one(std::span(e.bytes).first(length), out);
      ASSERT_EQ(status.code(), Code::kCorrupted) << "truncated to " << length;
    }
    for (std::size_t at = 0; at < topk::kHeaderBytes; ++at) {
      if (at == 4 || at == 6 || at == 7) continue;  // flags and exponent have other legal values
      auto damaged = e.bytes;
      damaged[at] ^= std::byte{0x10};
      ASSERT_EQ(decode_one(damaged, out).code(), Code::kCorrupted) << "byte " << at;
    }
    // The values of the last entries are missing and the header knows it; the blocks go on counting them.
    const uint64_t fewer = e.result.kept - 3;
    const std::size_t width = fp16 ? 2 : 4;
    auto miscounted = e.bytes;
    std::memcpy(miscounted.data() + 16, &fewer, 8);
    const auto values_end = miscounted.begin() +
                            static_cast<std::ptrdiff_t>(topk::kHeaderBytes + e.result.kept * width);
    miscounted.erase(values_end - static_cast<std::ptrdiff_t>(3 * width), values_end);
    EXPECT_NE(decode_one(miscounted, out).message().find("more entries than its header"),
              std::string::npos);
    auto longer = e.bytes;
    longer.push_back(std::byte{0});
    EXPECT_EQ(decode_one(longer, out).code(), Code::kCorrupted);
    Floats other(n + 1);
    EXPECT_NE(decode_one(e.bytes, other).message().find("3000 elements"), std::string::npos);
  }
}

/// An encoding as a stranger may write it: float32 values, and positions of the given rice parameter and gaps by block.
std::vector<std::byte> written_by_hand(uint64_t elements, const Floats& values, int rice,
                                       const std::vector<std::vector<uint64_t>>& gaps) {
  std::vector<std::byte> out(topk::kHeaderBytes + values.size() * 4 + 4096);
  const uint32_t magic = topk::kMagic;
  const uint64_t entries = values.size();
  std::memcpy(out.data(), &magic, 4);
  std::memcpy(out.data() + 8, &elements, 8);
  std::memcpy(out.data() + 16, &entries, 8);
  std::memcpy(out.data() + topk::kHeaderBytes, values.data(), entries * 4);
  topk::BitWriter writer(out.data() + topk::kHeaderBytes + entries * 4);
  for (const auto& block : gaps) {
    writer.put(static_cast<uint64_t>(rice) | block.size() << topk::kRiceBits,
               topk::kRiceBits + topk::kCountBits);
    for (const uint64_t gap : block) {
      writer.put_unary(gap >> rice);
      writer.put(gap & ((uint64_t{1} << rice) - 1), rice);
    }
  }
  out.resize(topk::kHeaderBytes + entries * 4 + writer.finish());
  return out;
}

TEST(TopK, PositionsEndWithTheirBlock) {
  constexpr uint64_t kSecond = 5000;  // elements of the second block
  const uint64_t n = topk::kBlockElements + kSecond;
  const std::vector<uint64_t> many(20, 0);
  // The last position of a block, and the one behind it: amid the stream, and with its last bits.
  for (const uint64_t beyond : {uint64_t{0}, uint64_t{1}}) {
    for (const bool is_last : {false, true}) {
      auto first = many, second = many;
      (is_last ? second : first)
          .push_back((is_last ? kSecond : topk::kBlockElements) - many.size() - 1 + beyond);
      const auto bytes = written_by_hand(n, Floats(41, 1.0F), 12, {first, second});
      Floats out(n);
      const Status status = decode_one(bytes, out);
      EXPECT_EQ(status.is_ok(), beyond == 0) << status.to_string();
      if (beyond == 0) {
        EXPECT_EQ(out[is_last ? n - 1 : topk::kBlockElements - 1], 1.0F);
      } else {
        EXPECT_NE(status.message().find("outside of its block"), std::string::npos)
            << status.to_string();
      }
    }
  }
}

TEST(TopK, ValuesThatNobodyEncodesAreRefused) {
  Floats out(100);
  const auto refusal = [&](std::vector<std::byte> bytes) {
    return decode_one(bytes, out).message();
  };
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()})
    EXPECT_NE(refusal(written_by_hand(100, {1, bad}, 0, {{0, 0}})).find("not finite"),
              std::string::npos);
  // Two fp16 values, the largest there is and a one, in units of 2^113: 2^129 is no float32.
  auto halves = written_by_hand(100, {std::bit_cast<float>(0x3C007BFFU)}, 0, {{0, 0}});
  const int16_t exponent = topk::kMinExponent;
  const uint64_t entries = 2;
  halves[4] = std::byte{topk::kFlagFp16};
  std::memcpy(halves.data() + 6, &exponent, 2);
  std::memcpy(halves.data() + 16, &entries, 8);
  EXPECT_NE(refusal(halves).find("not finite"), std::string::npos);
  // 22 bits of a block's begin and two of positions leave none; three leave seven.
  auto padded = written_by_hand(100, {1, 2, 3}, 0, {{0, 0, 0}});
  EXPECT_EQ(refusal(padded), "");
  padded.back() |= std::byte{0x80};
  EXPECT_NE(refusal(padded).find("padding"), std::string::npos);
}

}  // namespace
}  // namespace paceline::codec
