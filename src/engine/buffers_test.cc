// Where inputs and outputs lie. Outputs that lie in their inputs, wherever and on each rank elsewhere: what is received must
// not replace what has yet to be sent. And long pieces, coded and added in slices, from one buffer to another or in place.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/engine_test_util.h"

namespace paceline::engine {
namespace {

using plan::Algorithm;
using plan::Collective;

constexpr std::size_t kBlock = 700;

struct Layout {
  Rank size;
  int slots;
  Algorithm algorithm;
};

class Views : public testing::TestWithParam<Layout> {
 protected:
  [[nodiscard]] Rank size() const { return GetParam().size; }
  [[nodiscard]] std::size_t all() const { return static_cast<std::size_t>(size()) * kBlock; }

  /// Runs `o` on every rank, whose memory holds its input from element 0 on and its output from `output_at` on. What the
  /// ranks then have there, `length` elements each.
  std::vector<std::vector<float>> run(Operation o, const std::vector<std::vector<float>>& inputs,
                                      const std::vector<std::size_t>& output_at,
                                      std::size_t length) {
    Cluster cluster(size(), GetParam().slots, {.piece_bytes = 1024});
    auto memory = inputs;
    std::vector<OpId> ids;
    o.count = kBlock;
    for (Rank r = 0; r < size(); ++r) {
      const auto i = static_cast<std::size_t>(r);
      memory[i].resize(std::max(memory[i].size(), output_at[i] + length));
      o.input = memory[i].data();
      o.output = memory[i].data() + output_at[i];
      auto id = cluster[r].submit(o, cluster.now);
      EXPECT_TRUE(id) << id.status().to_string();
      ids.push_back(id ? *id : 0);
    }
    cluster.expect_ok(ids);
    std::vector<std::vector<float>> out;
    for (std::size_t i = 0; i < memory.size(); ++i) {
      const auto at = memory[i].begin() + static_cast<std::ptrdiff_t>(output_at[i]);
      out.emplace_back(at, at + static_cast<std::ptrdiff_t>(length));
    }
    return out;
  }
  std::vector<std::vector<float>> inputs(std::size_t elements) {
    std::vector<std::vector<float>> in;
    for (Rank r = 0; r < size(); ++r) in.push_back(random_values<float>(random_, elements));
    return in;
  }
  /// Element `at` on rank 0, and `stride` more on each after it, within [0, most].
  [[nodiscard]] std::vector<std::size_t> places(std::size_t at, std::size_t stride,
                                                std::size_t most) const {
    std::vector<std::size_t> out;
    for (Rank r = 0; r < size(); ++r)
      out.push_back((at + static_cast<std::size_t>(r) * stride) % (most + 1));
    return out;
  }
  static std::vector<float> block(const std::vector<float>& of, Rank number) {
    const auto at = of.begin() + static_cast<std::ptrdiff_t>(number) * std::ptrdiff_t{kBlock};
    return {at, at + kBlock};
  }
  std::mt19937_64 random_{5};
};

TEST_P(Views, ReduceScatter) {
  Operation o;
  o.collective = Collective::kReduceScatter;
  o.algorithm = GetParam().algorithm;
  for (const std::size_t stride : {std::size_t{0}, kBlock, std::size_t{333}}) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{1}, all() - kBlock}) {
      const auto in = inputs(all());
      const auto out = run(o, in, places(at, stride, all() - kBlock), kBlock);
      const auto sum = reduced(ReduceOp::kSum, in);
      for (Rank r = 0; r < size(); ++r)
        ASSERT_EQ(out[static_cast<std::size_t>(r)], block(sum, r)) << at << ", " << stride;
    }
  }
}

TEST_P(Views, AllGather) {
  Operation o;
  o.collective = Collective::kAllGather;
  o.algorithm = GetParam().algorithm;
  for (const std::size_t at : {std::size_t{0}, std::size_t{333}}) {
    const auto in = inputs(kBlock);
    std::vector<float> want;
    for (const auto& theirs : in) want.insert(want.end(), theirs.begin(), theirs.end());
    for (const auto& out : run(o, in, places(at, 0, at), all())) ASSERT_EQ(out, want) << at;
  }
}

TEST_P(Views, AllToAllInPlace) {
  Operation o;
  o.collective = Collective::kAllToAll;
  const auto in = inputs(all());
  const auto out = run(o, in, places(0, 0, 0), all());
  for (Rank r = 0; r < size(); ++r) {
    for (Rank from = 0; from < size(); ++from)
      ASSERT_EQ(block(out[static_cast<std::size_t>(r)], from),
                block(in[static_cast<std::size_t>(from)], r));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Views,
                         testing::Values(Layout{2, 1, Algorithm::kAuto},
                                         Layout{5, 1, Algorithm::kRing},
                                         Layout{5, 1, Algorithm::kDirect},
                                         Layout{6, 2, Algorithm::kTwoLevel}));

struct LongCase {
  Rank size;
  Algorithm algorithm;
  plan::Codec codec;
};

class LongPieces : public testing::TestWithParam<LongCase> {};

// The same count again and again: the plan of the one way must not serve the other.
TEST_P(LongPieces, FromOneBufferToAnotherAndInPlace) {
  constexpr std::size_t kElements = 400'001;
  const auto [size, algorithm, codec] = GetParam();
  Cluster cluster(size);
  std::mt19937_64 random(6);
  for (const bool in_place : {true, false, true}) {
    std::vector<std::vector<float>> in;
    for (Rank r = 0; r < size; ++r) in.push_back(random_values<float>(random, kElements));
    const auto given = in;
    std::vector<std::vector<float>> out(in.size(), std::vector<float>(kElements, -1));
    std::vector<OpId> ids;
    for (Rank r = 0; r < size; ++r) {
      const auto i = static_cast<std::size_t>(r);
      Operation o;
      o.count = kElements;
      o.algorithm = algorithm;
      o.codec.codec = codec;
      o.input = in[i].data();
      o.output = in_place ? in[i].data() : out[i].data();
      auto id = cluster[r].submit(o, cluster.now);
      ASSERT_TRUE(id) << id.status().to_string();
      ids.push_back(*id);
    }
    cluster.expect_ok(ids);
    const auto sum = reduced(ReduceOp::kSum, given);  // of few bits: exact in fp16, too
    for (const auto& result : in_place ? in : out) ASSERT_TRUE(result == sum);
    if (!in_place) {
      ASSERT_TRUE(in == given);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, LongPieces,
                         testing::Values(LongCase{2, Algorithm::kDirect, plan::Codec::kNone},
                                         LongCase{3, Algorithm::kRing, plan::Codec::kNone},
                                         LongCase{3, Algorithm::kDirect, plan::Codec::kFp16},
                                         LongCase{3, Algorithm::kRing, plan::Codec::kFp16},
                                         LongCase{4, Algorithm::kDirect, plan::Codec::kBf16}));

}  // namespace
}  // namespace paceline::engine
