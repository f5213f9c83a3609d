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

void check_round_trip(plan::Codec codec, const std::vector<float>& in) {
  const auto spec = spec_of(codec);
  const DType wire = codec == plan::Codec::kFp16 ? DType::kFloat16 : DType::kBFloat16;
  std::vector<std::byte> bytes(encoded_bytes(spec, DType::kFloat32, in.size()));
  RC_ASSERT(bytes.size() == in.size() * 2);
  std::vector<float> out(in.size());
  encode_dense(spec, in, bytes.data());
  decode_dense(spec, bytes.data(), out);
  for (std::size_t i = 0; i < in.size(); ++i) {
    uint16_t half = 0;
    float want = 0;
    cpu::store_rounded(wire, in[i], &half);
    cpu::store_rounded(DType::kFloat32, cpu::load_wide(wire, &half), &want);
    RC_ASSERT(std::bit_cast<uint32_t>(out[i]) == std::bit_cast<uint32_t>(want));
  }
}

TEST(Dense, RoundTripIsOneRoundingOfTheWireType) {
  EXPECT_TRUE(rc::check([](uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto in = any_floats(random, *rc::gen::inRange<std::size_t>(0, 300));
    check_round_trip(plan::Codec::kFp16, in);
    check_round_trip(plan::Codec::kBf16, in);
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
