// The dense codecs' identity: what comes back differs from what went in by one rounding of the wire
// type.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "codec/codec.h"
#include "device/cpu/casts.h"
#include "device/cpu/each_target.h"

namespace paceline::codec {
namespace {

plan::CodecSpec spec_of(plan::Codec codec, double scale = 1.0) {
  plan::CodecSpec spec;
  spec.codec = codec;
  spec.scale = scale;
  return spec;
}

std::vector<float> any_floats(std::mt19937_64& random, std::size_t elements) {
  std::vector<float> values(elements);
  for (auto& x : values) x = std::bit_cast<float>(static_cast<uint32_t>(random()));
  return values;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
}

/// What a receiver sees of `x` by the contract: multiplied, rounded once to the wire's type, divided.
float seen(DType wire, float x, float scale) {
  uint16_t half = 0;
  cpu::store_rounded(wire, x * scale, &half);
  float wide = 0;
  cpu::store_rounded(DType::kFloat32, cpu::load_wide(wire, &half), &wide);
  return wide / scale;
}

void check_round_trip(plan::Codec codec, double scale, const std::vector<float>& in,
                      const std::vector<float>& before) {
  const auto spec = spec_of(codec, scale);
  const DType wire = codec == plan::Codec::kFp16 ? DType::kFloat16 : DType::kBFloat16;
  std::vector<std::byte> bytes(encoded_bytes(spec, DType::kFloat32, in.size()));
  RC_ASSERT(bytes.size() == in.size() * 2);
  std::vector<float> out(in.size()), sum = before;
  encode_dense(spec, in, bytes.data());
  decode_dense(spec, bytes.data(), out);
  decode_reduce_dense(spec, ReduceOp::kSum, bytes.data(), sum);
  const auto rounded = static_cast<float>(scale);
  for (std::size_t i = 0; i < in.size(); ++i) {
    const float want = seen(wire, in[i], rounded);
    if (std::isnan(want)) {  // which of the NaNs an operation gives is the processor's
      RC_ASSERT(std::isnan(out[i]) && std::isnan(sum[i]));
      continue;
    }
    RC_ASSERT(std::bit_cast<uint32_t>(out[i]) == std::bit_cast<uint32_t>(want));
    const float total = before[i] + want;
    if (std::isnan(total)) {
      RC_ASSERT(std::isnan(sum[i]));
      continue;
    }
    RC_ASSERT(std::bit_cast<uint32_t>(sum[i]) == std::bit_cast<uint32_t>(total));
  }
}

TEST(Dense, RoundTripIsOneRoundingOfTheWireTypeUnderAnyScale) {
  EXPECT_TRUE(rc::check([](uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto elements = *rc::gen::inRange<std::size_t>(0, 300);
    const auto in = any_floats(random, elements), before = any_floats(random, elements);
    // Powers of two, as loss scaling has, and what is none.
    const double power = std::ldexp(1.0, *rc::gen::inRange(-24, 25));
    const double scale = power * *rc::gen::element(1.0, 1.0, 1.1, 1.7, 10.0 / 3.0);
    for (const double s : {1.0, scale}) {
      check_round_trip(plan::Codec::kFp16, s, in, before);
      check_round_trip(plan::Codec::kBf16, s, in, before);
    }
  }));
}

/// In numbers, for gradients as they are: half a unit of eleven bits, or half of the smallest step that the scale
/// leaves of the wire's.
TEST(Dense, AScaleThatFitsLosesNoMoreThanOneRounding) {
  EXPECT_TRUE(rc::check([](uint64_t seed) {
    std::mt19937_64 random(seed);
    const double scale = std::ldexp(1.0, *rc::gen::inRange(0, 17));
    std::lognormal_distribution<double> sizes(-12.0, 4.0);
    const std::size_t elements = *rc::gen::inRange<std::size_t>(0, 300);
    std::vector<float> in, out(elements);
    while (in.size() < elements) {
      const double size = std::min(sizes(random), 65504.0 / scale);
      in.push_back(static_cast<float>((random() & 1) != 0 ? size : -size));
    }
    const auto spec = spec_of(plan::Codec::kFp16, scale);
    std::vector<std::byte> bytes(elements * 2);
    encode_dense(spec, in, bytes.data());
    decode_dense(spec, bytes.data(), out);
    for (std::size_t i = 0; i < elements; ++i) {
      const double off = std::abs(static_cast<double>(out[i]) - static_cast<double>(in[i]));
      const double half_step = std::ldexp(1.0, -25) / scale;
      RC_ASSERT(off <= std::max(std::ldexp(std::abs(static_cast<double>(in[i])), -11), half_step));
    }
  }));
}

TEST(Dense, PiecesEncodeAndDecodeAsTheWhole) {
  EXPECT_TRUE(rc::check([](uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto in = any_floats(random, 777);
    const auto spec = spec_of(
        *rc::gen::element(plan::Codec::kNone, plan::Codec::kFp16, plan::Codec::kBf16), 10.0);
    const std::size_t cut = *rc::gen::inRange<std::size_t>(0, 778);
    const uint64_t head = encoded_bytes(spec, DType::kFloat32, cut);
    const uint64_t all = encoded_bytes(spec, DType::kFloat32, in.size());
    std::vector<std::byte> whole(all), pieces(all);
    encode_dense(spec, in, whole.data());
    encode_dense(spec, std::span(in).first(cut), pieces.data());
    encode_dense(spec, std::span(in).subspan(cut), pieces.data() + head);
    RC_ASSERT(whole == pieces);
    std::vector<float> once = any_floats(random, in.size()), twice = once;
    decode_reduce_dense(spec, ReduceOp::kSum, whole.data(), once);
    decode_reduce_dense(spec, ReduceOp::kSum, whole.data(), std::span(twice).first(cut));
    decode_reduce_dense(spec, ReduceOp::kSum, whole.data() + head, std::span(twice).subspan(cut));
    RC_ASSERT(same_bits(once, twice));
  }));
}

TEST(Dense, GradientScaleMultipliesBeforeTheCastAndDividesAfter) {
  // 1e-8 vanishes in fp16 (its smallest number is 6e-8); with a scale of 1024 it survives.
  const std::vector<float> in = {1e-8f, -3e-8f, 2.0f, 6.0f};
  std::vector<float> plain(in.size()), scaled(in.size());
  std::vector<std::byte> bytes(in.size() * 2);
  encode_dense(spec_of(plan::Codec::kFp16), in, bytes.data());
  decode_dense(spec_of(plan::Codec::kFp16), bytes.data(), plain);
  EXPECT_EQ(plain[0], 0.0f);
  const auto spec = spec_of(plan::Codec::kFp16, 1024.0);
  encode_dense(spec, in, bytes.data());
  decode_dense(spec, bytes.data(), scaled);
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_NEAR(scaled[i], in[i], std::abs(in[i]) / 100);
  // Scaling is what overflows, and loss scaling must see that.
  const std::vector<float> big = {100.0f};
  encode_dense(spec, big, bytes.data());
  float out = 0;
  decode_dense(spec, bytes.data(), std::span(&out, 1));
  EXPECT_EQ(out, std::numeric_limits<float>::infinity());
}

TEST(Dense, TheSameBytesOnEveryTarget) {
  std::mt19937_64 random(3);
  const auto in = any_floats(random, 10007);
  for (const auto codec : {plan::Codec::kFp16, plan::Codec::kBf16}) {
    const auto spec = spec_of(codec, 10.0);
    std::vector<std::byte> first(in.size() * 2);
    std::vector<float> first_sum;
    encode_dense(spec, in, first.data());
    first_sum = in;
    decode_reduce_dense(spec, ReduceOp::kSum, first.data(), first_sum);
    cpu::on_each_target([&](const char* target) {
      std::vector<std::byte> bytes(in.size() * 2);
      encode_dense(spec, in, bytes.data());
      EXPECT_EQ(bytes, first) << target;
      auto sum = in;
      decode_reduce_dense(spec, ReduceOp::kSum, bytes.data(), sum);
      EXPECT_TRUE(same_bits(sum, first_sum)) << target;
    });
  }
}

}  // namespace
}  // namespace paceline::codec
