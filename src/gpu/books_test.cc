// The books of error feedback, to the bit: what was sent and what is left are the gradient and what was left before.
#include <barrier>
#include <cmath>
#include <random>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

using device::cuda::WireCodec;

constexpr uint64_t kCount = 100'003;
constexpr int kSteps = 4;
constexpr uint64_t kBlock = 512;  ///< of int8: has a scale of its own
const std::vector<ResidualRange> kSegments = {{7, 0, 60'000}, {8, 0, 40'003}};

struct Books {
  int local_size;
  WireCodec codec;
};
class BooksOf : public testing::TestWithParam<Books> {};

std::vector<float> gradient_of(Rank rank, int step) {
  std::mt19937_64 random(static_cast<uint64_t>(rank * 1000 + step));
  std::normal_distribution<float> normal(0, std::pow(10.0F, static_cast<float>(step % 3 - 1)));
  std::vector<float> values(kCount);
  for (auto& v : values) v = normal(random);
  return values;
}

std::vector<float> added(const std::vector<std::vector<float>>& parts, int from, int to) {
  auto total = parts[static_cast<size_t>(from)];
  for (int i = from + 1; i < to; ++i) {
    for (uint64_t k = 0; k < kCount; ++k) total[k] += parts[static_cast<size_t>(i)][k];
  }
  return total;
}

/// What int8 makes of v: whole steps of each block's largest magnitude over 127. Blocks begin where a rank's shard does.
std::vector<float> as_int8(const std::vector<float>& v, int local_size) {
  auto result = v;
  const uint64_t size = static_cast<uint64_t>(local_size);
  const uint64_t shard = size == 1 ? kCount : kCount / (size * 4) * 4;
  for (uint64_t rank = 0; rank < size; ++rank) {
    const uint64_t end = rank + 1 == size ? kCount : (rank + 1) * shard;
    for (uint64_t first = rank * shard; first < end; first += kBlock) {
      const uint64_t last = std::min(first + kBlock, end);
      float most = 0;
      for (uint64_t k = first; k < last; ++k) most = std::max(most, std::abs(v[k]));
      const float scale = most / 127;
      for (uint64_t k = first; k < last; ++k)
        result[k] = std::clamp(std::nearbyint(v[k] * (1 / scale)), -127.0F, 127.0F) * scale;
    }
  }
  return result;
}

// A node's ranks' gradients are added up first, and each of its ranks keeps the residual of its shard. Two nodes, for of two
// sums there is one order.
TEST_P(BooksOf, Balance) {
  const auto p = GetParam();
  Cluster cluster({.nodes = 2, .local_size = p.local_size});
  const auto size = static_cast<size_t>(cluster.size());
  std::vector<std::vector<float>> left(size), results(size);
  std::vector<std::vector<float>> old(2, std::vector<float>(kCount));
  std::barrier all(cluster.size());
  const auto check = [&](int step) {
    std::vector<std::vector<float>> gradients, sent(2);
    for (Rank r = 0; r < cluster.size(); ++r) gradients.push_back(gradient_of(r, step));
    for (int node = 0; node < 2; ++node) {
      const int from = node * p.local_size, to = from + p.local_size;
      const auto sum = added(gradients, from, to);
      const auto now = added(left, from, to);
      auto& before = old[static_cast<size_t>(node)];
      std::vector<float> v(kCount);
      auto& mine = sent[static_cast<size_t>(node)];
      mine.resize(kCount);
      uint64_t selected = 0;
      for (uint64_t k = 0; k < kCount; ++k) {
        v[k] = std::fma(sum[k], 1.0F / static_cast<float>(size), before[k]);
        mine[k] = v[k] - now[k];
        selected += mine[k] != 0 ? 1 : 0;
      }
      if (p.codec == WireCodec::kInt8) {
        const auto wanted = as_int8(v, p.local_size);
        for (uint64_t k = 0; k < kCount; ++k) ASSERT_EQ(mine[k], wanted[k]) << "element " << k;
      } else {
        EXPECT_GE(selected, kCount / 200);
        EXPECT_LE(selected, kCount / 100);
      }
      before = now;
    }
    for (size_t r = 0; r < size; ++r) {
      for (uint64_t k = 0; k < kCount; ++k)
        ASSERT_EQ(results[r][k], sent[0][k] + sent[1][k])
            << "rank " << r << " step " << step << " element " << k;
    }
  };
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 16 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4).is_ok());
    Tensor tensor(cluster, r, kCount * sizeof(float));
    auto& mine = left[static_cast<size_t>(r)];
    for (int step = 0; step < kSteps; ++step) {
      const auto gradient = gradient_of(r, step);
      std::copy(gradient.begin(), gradient.end(), tensor.as<float>());
      AllReduce a;
      a.data = tensor.address();
      a.count = kCount;
      a.average = true;
      a.codec = static_cast<int>(p.codec);
      a.ratio = 0.01;
      a.segments = kSegments;
      a.name = "bucket";
      ASSERT_NO_FATAL_FAILURE(carry(cluster, path, a));
      ASSERT_TRUE(path.commit_residuals().is_ok());
      results[static_cast<size_t>(r)].assign(tensor.as<float>(), tensor.as<float>() + kCount);
      mine.assign(kCount, 0);
      uint64_t first = 0;
      for (const auto& s : kSegments) {
        ASSERT_TRUE(path.read_residual(s.key, std::span(mine).subspan(first, s.elements)).is_ok());
        first += s.elements;
      }
      all.arrive_and_wait();
      if (r == 0) check(step);
      all.arrive_and_wait();
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Codecs, BooksOf,
                         testing::Values(Books{1, WireCodec::kTopK}, Books{2, WireCodec::kTopK},
                                         Books{1, WireCodec::kInt8}, Books{2, WireCodec::kInt8}),
                         [](const auto& info) {
                           std::string codec = codec_name(info.param.codec);
                           std::erase(codec, '-');
                           return fmt::format("2x{}_{}", info.param.local_size, codec);
                         });

}  // namespace
}  // namespace paceline::gpu
