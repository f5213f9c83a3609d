// What neighbours add within the pass: every bit is that of a sum made ahead of it.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/workers.h"
#include "codec/codec.h"
#include "device/cpu/each_target.h"

namespace paceline::codec {
namespace {

using Floats = std::vector<float>;

Floats random_floats(std::size_t elements, std::mt19937_64& random) {
  std::normal_distribution<float> normal(0, 1e-3F);
  Floats out(elements);
  for (float& x : out) x = normal(random);
  return out;
}

struct Encoded {
  Floats after;
  std::vector<std::byte> bytes;
  EncodedTopK result;
};

Encoded encode(const plan::CodecSpec& spec, const Floats& gradient, const Floats& before,
               std::span<const Addend> addends, Workers* workers) {
  Encoded e;
  e.after.assign(gradient.size(), -5.0F);
  const std::size_t middle = gradient.size() / 3;
  const ResidualRun runs[] = {
      {before.data(), e.after.data(), middle},
      {before.data() + middle, e.after.data() + middle, gradient.size() - middle}};
  e.bytes.resize(encoded_bytes(spec, DType::kFloat32, gradient.size()));
  e.result = encode_topk(spec, gradient, runs, e.bytes.data(), workers, addends);
  e.bytes.resize(e.result.bytes);
  return e;
}

void expect_equal(const Encoded& a, const Encoded& b) {
  RC_ASSERT(a.result.bytes == b.result.bytes);
  RC_ASSERT(a.result.kept == b.result.kept);
  RC_ASSERT(a.result.finite == b.result.finite);
  RC_ASSERT(a.bytes == b.bytes);
  RC_ASSERT(std::memcmp(a.after.data(), b.after.data(), a.after.size() * sizeof(float)) == 0);
}

RC_GTEST_PROP(TopKSum, AddendsAreAsIfAddedAhead, ()) {
  std::mt19937_64 random(*rc::gen::arbitrary<uint64_t>());
  const auto elements = *rc::gen::element<std::size_t>(1, 2, 17, 4095, 4097, 30'000, 400'001);
  plan::CodecSpec spec;
  spec.codec = plan::Codec::kTopK;
  spec.ratio = *rc::gen::element(0.001, 0.01, 0.3);
  spec.fp16_values = *rc::gen::arbitrary<bool>();
  const Floats gradient = random_floats(elements, random);
  const Floats before = random_floats(elements, random);
  Floats sum = gradient;
  std::vector<Floats> parts;
  std::vector<Addend> addends;
  // From nobody or from up to three neighbours, each in pieces that need not meet, nor end where a tile or a run does.
  const int neighbours = *rc::gen::inRange(0, 4);
  for (int n = 0; n < neighbours; ++n) {
    std::size_t at = random() % 3 == 0 ? random() % elements : 0;
    while (at < elements) {
      const std::size_t rest = elements - at;
      const std::size_t length = random() % 2 == 0 ? rest : 1 + random() % rest;
      parts.push_back(random_floats(length, random));
      if (random() % 5 == 0) {  // what the sample makes of it is wrong
        for (float& x : parts.back()) x *= 1e4F;
      }
      addends.push_back({parts.back().data(), at, length});
      for (std::size_t i = 0; i < length; ++i) sum[at + i] += parts.back()[i];
      at += length + (random() % 4 == 0 ? random() % 500 : 0);
    }
  }
  if (!parts.empty() && *rc::gen::inRange(0, 8) == 0) {
    const Addend& last = addends.back();
    const std::size_t place = random() % last.elements;
    const float bad = random() % 2 == 0 ? std::numeric_limits<float>::infinity()
                                        : std::numeric_limits<float>::quiet_NaN();
    parts.back()[place] = bad;
    sum[last.first + place] += bad;
  }
  const Encoded expected = encode(spec, sum, before, {}, nullptr);
  std::vector<Encoded>
      by_target;  // compared out here: a failed RC_ASSERT must not leave a target behind
  cpu::on_each_target([&](const char* /*target*/) {
    by_target.push_back(encode(spec, gradient, before, addends, nullptr));
  });
  for (const Encoded& one : by_target) expect_equal(one, expected);
  Workers workers(3);
  expect_equal(encode(spec, gradient, before, addends, &workers), expected);
}

}  // namespace
}  // namespace paceline::codec
