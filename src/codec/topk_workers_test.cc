// Top-k by several threads: every bit is that of one thread, whatever the buffer holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/workers.h"
#include "codec/codec.h"
#include "codec/topk_format.h"

namespace paceline::codec {
namespace {

using Floats = std::vector<float>;

// Twelve parts of the encoder's for three threads, and a rest; 13 blocks of the decoder's.
constexpr std::size_t kElements = 12 * topk::kBlockElements + 4321;

plan::CodecSpec spec_of(double ratio, bool fp16) {
  plan::CodecSpec spec;
  spec.codec = plan::Codec::kTopK;
  spec.ratio = ratio;
  spec.fp16_values = fp16;
  return spec;
}

enum class Shape { kNormal, kTies, kHotStretch, kRising, kFewNumbers, kHiddenSpike, kZero };
constexpr Shape kShapes[] = {Shape::kNormal, Shape::kTies,       Shape::kHotStretch,
                             Shape::kRising, Shape::kFewNumbers, Shape::kHiddenSpike,
                             Shape::kZero};

Floats make(Shape shape, std::mt19937_64& random) {
  std::normal_distribution<float> normal(0, 1e-3F);
  Floats x(kElements);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float value = normal(random);
    switch (shape) {
      case Shape::kNormal:
        x[i] = value;
        break;
      case Shape::kTies:  // few magnitudes, each in every part
        x[i] = static_cast<float>(static_cast<int>(random() % 5) - 2);
        break;
      case Shape::kHotStretch:  // all of the k largest lie in one part, and more than k of them
        x[i] = i > kElements / 2 && i < kElements / 2 + kElements / 50 ? value * 1e6F : value;
        break;
      case Shape::kRising:  // every part's threshold rises all the time
        x[i] = static_cast<float>(i + 1);
        break;
      case Shape::kFewNumbers:  // fewer than k
        x[i] = i % 9973 == 0 ? value : 0.0F;
        break;
      case Shape::kHiddenSpike:  // beyond what the sample says of fp16's range
        x[i] = i == kElements - 3 ? -1e20F : value;
        break;
      case Shape::kZero:
        x[i] = 0;
        break;
    }
  }
  return x;
}

struct Encoded {
  Floats after = Floats(kElements, -5.0F);
  std::vector<std::byte> bytes;
  EncodedTopK result;
};

Encoded encode(const plan::CodecSpec& spec, const Floats& gradient, const Floats& before,
               Workers* workers) {
  Encoded e;
  std::vector<ResidualRun> runs;
  std::size_t at = 0;
  for (const std::size_t end : {std::size_t{1000}, std::size_t{1000}, kElements / 3, kElements}) {
    runs.push_back({before.data() + at, e.after.data() + at, end - at});
    at = end;
  }
  e.bytes.resize(encoded_bytes(spec, DType::kFloat32, kElements));
  e.result = encode_topk(spec, gradient, runs, e.bytes.data(), workers);
  e.bytes.resize(e.result.bytes);
  return e;
}

void expect_same(const Encoded& a, const Encoded& b) {
  EXPECT_EQ(a.result.kept, b.result.kept);
  EXPECT_EQ(a.result.finite, b.result.finite);
  EXPECT_TRUE(a.bytes == b.bytes);
  EXPECT_EQ(0, std::memcmp(a.after.data(), b.after.data(), kElements * sizeof(float)));
}

TEST(TopKWorkers, EncodeTheSameBytesAndLeaveTheSameRest) {
  std::mt19937_64 random(11);
  Workers three(3), eight(8);
  for (const Shape shape : kShapes) {
    const Floats gradient = make(shape, random);
    const Floats before = shape == Shape::kNormal ? make(shape, random) : Floats(kElements, 0.0F);
    for (const bool fp16 : {false, true}) {
      for (const double ratio : {0.01, 0.3}) {
        SCOPED_TRACE(static_cast<int>(shape) * 10 + (fp16 ? 1 : 0));
        const auto spec = spec_of(ratio, fp16);
        const Encoded alone = encode(spec, gradient, before, nullptr);
        expect_same(encode(spec, gradient, before, &three), alone);
        expect_same(encode(spec, gradient, before, &eight), alone);
      }
    }
  }
}

TEST(TopKWorkers, AnInfinityInAnyPartIsSeen) {
  std::mt19937_64 random(12);
  Workers workers(3);
  const Floats before = make(Shape::kNormal, random);
  for (const std::size_t at : {std::size_t{0}, kElements / 2, kElements - 1}) {
    Floats gradient = make(Shape::kNormal, random);
    gradient[at] = std::numeric_limits<float>::infinity();
    const Encoded e = encode(spec_of(0.01, false), gradient, before, &workers);
    EXPECT_FALSE(e.result.finite);
    EXPECT_EQ(e.after, before);
  }
}

/// What ranks have sent.
std::vector<std::vector<std::byte>> some_encodings(std::size_t count, std::mt19937_64& random) {
  std::vector<std::vector<std::byte>> out;
  for (std::size_t i = 0; i < count; ++i) {
    const Shape shape = i == 1 ? Shape::kFewNumbers : i == 2 ? Shape::kZero : Shape::kNormal;
    out.push_back(encode(spec_of(i == 3 ? 0.2 : 0.01, i % 2 == 0), make(shape, random),
                         Floats(kElements, 0.0F), nullptr)
                      .bytes);
  }
  return out;
}

TEST(TopKWorkers, AddUpToTheSameBits) {
  std::mt19937_64 random(13);
  Workers three(3), eight(8);
  for (const std::size_t count : {0, 1, 2, 5}) {
    const auto bytes = some_encodings(count, random);
    const std::vector<std::span<const std::byte>> encodings(bytes.begin(), bytes.end());
    for (const double divisor : {1.0, 4.0, 3.0}) {
      Floats alone(kElements, 9.0F);
      ASSERT_TRUE(decode_sum_topk(encodings, alone, divisor).is_ok());
      for (Workers* workers : {&three, &eight}) {
        Floats sum(kElements, 8.0F);
        ASSERT_TRUE(decode_sum_topk(encodings, sum, divisor, workers).is_ok());
        EXPECT_EQ(0, std::memcmp(sum.data(), alone.data(), kElements * sizeof(float)))
            << count << " encodings, divided by " << divisor;
      }
    }
  }
}

TEST(TopKWorkers, DamageIsNamedAsByOneThread) {
  std::mt19937_64 random(14);
  Workers workers(3);
  const auto intact = some_encodings(1, random).front();
  Floats sum(kElements);
  const auto verdict = [&](const std::vector<std::byte>& bytes, Workers* with) {
    const std::span<const std::byte> encoding = bytes;
    return decode_sum_topk({&encoding, 1}, sum, 1.0, with).to_string();
  };
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    auto damaged = intact;
    if (i % 3 == 0) {
      damaged.resize(random() % damaged.size());
    } else if (i % 3 == 1) {
      damaged.push_back(std::byte{0});
    } else {
      // In the positions: the last two fifths of the bytes.
      const std::size_t at = damaged.size() * 3 / 5 + random() % (damaged.size() * 2 / 5);
      damaged[at] ^= static_cast<std::byte>(1U << random() % 8);
    }
    const auto alone = verdict(damaged, nullptr);
    const auto shared = verdict(damaged, &workers);
    ASSERT_EQ(shared, alone) << "damage " << i;
    if (alone != verdict(intact, nullptr)) ++refused;
  }
  EXPECT_GT(refused, 200);
}

}  // namespace
}  // namespace paceline::codec
