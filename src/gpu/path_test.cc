// The path from end to end: simulated GPUs and NCCL, real kernels' reference, real engines.
#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

using device::cuda::WireCodec;

struct Case {
  int nodes, local_size;
  WireCodec codec;
  uint64_t count;
  int operations = 1;
  int lanes = 1;
  int queues = 0;
  int delays_us = 0;
  DType dtype = DType::kFloat32;
  bool average = true;
  int wires = default_wires();
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const auto& c = info.param;
  std::string codec = codec_name(c.codec);
  std::erase(codec, '-');
  return fmt::format("{}x{}_{}_{}_{}ops_{}lanes_{}queues{}{}{}{}", c.nodes, c.local_size, codec,
                     c.count, c.operations, c.lanes, c.queues, c.delays_us > 0 ? "_delays" : "",
                     c.dtype == DType::kFloat32 ? "" : "_" + std::string(dtype_name(c.dtype)),
                     c.average ? "" : "_sum", c.wires > 1 ? fmt::format("_{}wires", c.wires) : "");
}

std::vector<float> gradient(Rank rank, int operation, uint64_t count) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) * 7919 +
                         static_cast<uint64_t>(operation) * 31 + count);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (auto& v : values) v = normal(random);
  return values;
}

float round_to(DType dtype, float v) {
  uint16_t half = 0;
  if (dtype == DType::kFloat32) return v;
  cpu::narrow(dtype, &half, &v, 1, 1);
  cpu::widen(dtype, &v, &half, 1, 1);
  return v;
}

class PathOf : public testing::TestWithParam<Case> {};

TEST_P(PathOf, SumsAsFloat64DoesAndAlikeOnAllRanks) {
  const Case c = GetParam();
  ClusterOptions o;
  o.nodes = c.nodes;
  o.local_size = c.local_size;
  o.machine.hardware_queues = c.queues;
  o.machine.delays_us = c.delays_us;
  o.machine.seed = 11;
  o.wires = c.wires;
  Cluster cluster(o);
  const auto ops = static_cast<size_t>(c.operations);
  const auto size = static_cast<size_t>(cluster.size());
  const size_t item = dtype_size(c.dtype);
  // [rank][operation] results and residuals
  std::vector<std::vector<std::vector<float>>> results(size), residuals(size);
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.lanes = c.lanes, .piece_bytes = 16 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(c.count * 4 * ops, c.count * 4).is_ok());
    const auto& api = cluster.machine().api();
    cu::Stream stream = nullptr;
    ASSERT_EQ(api.stream_create_with_priority(&stream, 1, 0), 0);
    std::vector<std::unique_ptr<Tensor>> tensors;
    for (size_t i = 0; i < ops; ++i) {
      tensors.push_back(std::make_unique<Tensor>(cluster, r, c.count * item));
      auto g = gradient(r, static_cast<int>(i), c.count);
      if (c.dtype == DType::kFloat32)
        std::memcpy(tensors[i]->as<void>(), g.data(), c.count * item);
      else
        cpu::narrow(c.dtype, tensors[i]->as<void>(), g.data(), 1, c.count);
    }
    const auto before = cluster.machine().counts(r).allocations;
    std::vector<uint64_t> ids;
    for (size_t i = 0; i < ops; ++i) {
      AllReduce a;
      a.data = tensors[i]->address();
      a.count = c.count;
      a.dtype = c.dtype;
      a.average = c.average;
      a.codec = static_cast<int>(c.codec);
      a.ratio = 0.1;
      a.stream = stream;
      a.name = "bucket " + std::to_string(i);
      // Two parameters, the second across operations.
      const uint64_t half = c.count / 2;
      a.segments = {{2 * i, 0, half}, {2 * i + 1, 5, c.count - half}};
      auto id = path.all_reduce(a);
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      ids.push_back(*id);
    }
    for (auto id : ids) ASSERT_TRUE(path.join(id, stream).is_ok());
    bool finite = false;
    auto status = path.wait_arrival(0, finite);
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_TRUE(finite);
    ASSERT_EQ(api.stream_synchronize(stream), 0);
    const bool kept = c.codec == WireCodec::kTopK || c.codec == WireCodec::kInt8;
    const auto after = cluster.machine().counts(r).allocations;
    const bool sums = c.codec == WireCodec::kInt8 && c.nodes > 2;
    EXPECT_EQ(after - before, kept ? (sums ? 4U : 2U) + (c.local_size > 1 || sums ? 1U : 0U) : 0U);
    EXPECT_EQ(cluster.machine().counts(r).allocations_in_wait, 0U);
    ASSERT_TRUE(path.commit_residuals().is_ok());
    for (size_t i = 0; i < ops; ++i) {
      std::vector<float> out(c.count);
      if (c.dtype == DType::kFloat32)
        std::memcpy(out.data(), tensors[i]->as<void>(), c.count * item);
      else
        cpu::widen(c.dtype, out.data(), tensors[i]->as<void>(), 1, c.count);
      results[static_cast<size_t>(r)].push_back(std::move(out));
      std::vector<float> left(c.count);
      const uint64_t half = c.count / 2;
      std::vector<float> second(c.count - half + 5);
      ASSERT_TRUE(path.read_residual(2 * i, {left.data(), half}).is_ok());
      ASSERT_TRUE(path.read_residual(2 * i + 1, second).is_ok());
      std::copy(second.begin() + 5, second.end(), left.begin() + static_cast<long>(half));
      residuals[static_cast<size_t>(r)].push_back(std::move(left));
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
  ASSERT_FALSE(testing::Test::HasFatalFailure());
  EXPECT_EQ(cluster.cliques().disagreement(), "");
  EXPECT_EQ(cluster.cliques().open(), 0);
  for (size_t i = 0; i < ops; ++i) {
    std::vector<double> sums(c.count), kept(c.count), magnitudes(c.count);
    for (size_t r = 0; r < size; ++r) {
      auto g = gradient(static_cast<Rank>(r), static_cast<int>(i), c.count);
      for (uint64_t k = 0; k < c.count; ++k) {
        const double v = round_to(c.dtype, g[k]);
        sums[k] += v;
        magnitudes[k] += std::abs(v);
        kept[k] += residuals[r][i][k];
      }
      ASSERT_EQ(std::memcmp(results[r][i].data(), results[0][i].data(), c.count * sizeof(float)), 0)
          << "rank " << r << " differs in operation " << i;
    }
    const double scale = c.average ? 1.0 / static_cast<double>(size) : 1.0;
    const bool halves = c.codec == WireCodec::kFp16 || c.dtype == DType::kFloat16;
    const bool bfloats = c.codec == WireCodec::kBf16 || c.dtype == DType::kBFloat16;
    const double unit = bfloats ? 1.0 / 128 : halves ? 1.0 / 1024 : 1e-6;
    double worst = 0;
    for (uint64_t k = 0; k < c.count; ++k) {
      double got = results[0][i][k];
      double allowed = unit * magnitudes[k] * scale * 3 + 1e-6;
      if (c.codec == WireCodec::kTopK) got += kept[k];
      if (c.codec == WireCodec::kInt8)
        allowed += static_cast<double>(c.nodes) * 6.0 * c.local_size * scale / 127;
      worst = std::max(worst, std::abs(got - sums[k] * scale) - allowed);
    }
    EXPECT_LE(worst, 0) << "operation " << i;
  }
}

constexpr auto kExact = WireCodec::kExact;
constexpr auto kFp16 = WireCodec::kFp16;
constexpr auto kBf16 = WireCodec::kBf16;
constexpr auto kTopK = WireCodec::kTopK;
constexpr auto kInt8 = WireCodec::kInt8;

INSTANTIATE_TEST_SUITE_P(Shapes, PathOf,
                         testing::Values(Case{2, 1, kExact, 10000}, Case{2, 1, kFp16, 10000},
                                         Case{2, 1, kTopK, 60001, 2}, Case{2, 1, kInt8, 60001, 2},
                                         Case{2, 2, kExact, 10001}, Case{2, 2, kFp16, 99991, 3},
                                         Case{2, 2, kTopK, 50003, 3}, Case{2, 2, kInt8, 50003, 3},
                                         Case{3, 1, kExact, 50001, 2}, Case{3, 1, kFp16, 50001},
                                         Case{3, 1, kTopK, 50001}, Case{3, 1, kInt8, 50001},
                                         Case{4, 2, kExact, 70003, 2}, Case{4, 2, kBf16, 70003},
                                         Case{4, 2, kTopK, 70003}, Case{4, 2, kInt8, 70003, 2}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Short, PathOf,
                         testing::Values(Case{2, 1, kFp16, 1}, Case{2, 1, kTopK, 3},
                                         Case{2, 2, kExact, 1, 2}, Case{2, 2, kFp16, 7},
                                         Case{2, 3, kInt8, 25}, Case{3, 1, kFp16, 100},
                                         Case{4, 2, kExact, 9}, Case{4, 2, kBf16, 4097}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(
    Dtypes, PathOf,
    testing::Values(Case{2, 1, kExact, 30001, 1, 1, 0, 0, DType::kBFloat16},
                    Case{2, 2, kFp16, 30001, 1, 1, 0, 0, DType::kBFloat16},
                    Case{2, 2, kExact, 30001, 1, 1, 0, 0, DType::kFloat16, false},
                    Case{2, 1, kInt8, 30001, 1, 1, 0, 0, DType::kBFloat16},
                    Case{3, 1, kBf16, 30001, 1, 1, 0, 0, DType::kBFloat16},
                    Case{2, 2, kFp16, 30001, 1, 1, 0, 0, DType::kFloat32, false}),
    name_of);
// One hardware queue for all streams: what is issued first runs first, whatever the stream.
INSTANTIATE_TEST_SUITE_P(
    OneQueue, PathOf,
    testing::Values(Case{2, 1, kFp16, 40001, 4, 1, 1}, Case{2, 2, kFp16, 40001, 4, 1, 1},
                    Case{2, 2, kTopK, 40001, 4, 4, 1}, Case{3, 1, kExact, 40001, 4, 1, 1},
                    Case{3, 2, kInt8, 40001, 3, 4, 1}, Case{4, 2, kFp16, 40001, 2, 2, 1, 200},
                    Case{2, 2, kExact, 40001, 6, 2, 2}),
    name_of);
INSTANTIATE_TEST_SUITE_P(Lanes, PathOf,
                         testing::Values(Case{2, 1, kFp16, 90001, 3, 4, 0, 300},
                                         Case{2, 2, kInt8, 90001, 3, 4, 0, 300},
                                         Case{3, 1, kFp16, 90001, 3, 4, 0, 300},
                                         Case{4, 2, kTopK, 50001, 3, 4, 0, 300},
                                         Case{4, 2, kBf16, 50001, 3, 4, 0, 300}),
                         name_of);

Case over(int wires, Case c) {
  c.wires = wires;
  return c;
}

INSTANTIATE_TEST_SUITE_P(
    Wires, PathOf,
    testing::Values(over(2, {2, 1, kExact, 60001, 3, 1}), over(3, {2, 1, kFp16, 7, 5, 1}),
                    over(3, {2, 2, kTopK, 50003, 3, 4, 0, 300}), over(2, {2, 2, kInt8, 50003, 3}),
                    over(2, {3, 1, kExact, 90001, 3, 4, 0, 300}), over(3, {3, 2, kInt8, 40001, 3}),
                    over(2, {4, 2, kBf16, 70003, 2, 2, 1, 200}), over(8, {3, 1, kFp16, 90001, 2}),
                    over(2, {4, 2, kExact, 9, 4})),
    name_of);

// In more and shorter pieces, and on the way in with the own cast made again: the same additions.
TEST(Path, APromptAllReduceHasTheSameBits) {
  constexpr uint64_t kCount = (3U << 20) + 5;
  for (const int nodes : {2, 3}) {
    Cluster cluster({.nodes = nodes, .local_size = 1});
    cluster.run([&](Rank r) {
      auto made = cluster.create(r);
      ASSERT_TRUE(made.is_ok()) << made.status().message();
      auto& path = **made;
      ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4).is_ok());
      const auto g = gradient(r, 0, kCount);
      for (const auto codec : {kExact, kFp16, kBf16}) {
        std::vector<std::vector<float>> results;
        std::vector<uint64_t> bytes;
        for (const bool prompt : {false, true}) {
          Tensor tensor(cluster, r, kCount * sizeof(float));
          std::copy(g.begin(), g.end(), tensor.as<float>());
          AllReduce a;
          a.data = tensor.address();
          a.count = kCount;
          a.codec = static_cast<int>(codec);
          a.average = true;
          a.factor = 0.7;
          a.prompt = prompt;
          const auto before = path.statistics().wire_bytes;
          ASSERT_NO_FATAL_FAILURE(carry(cluster, path, a));
          results.emplace_back(tensor.as<float>(), tensor.as<float>() + kCount);
          bytes.push_back(path.statistics().wire_bytes - before);
        }
        ASSERT_EQ(std::memcmp(results[0].data(), results[1].data(), kCount * sizeof(float)), 0)
            << codec_name(codec);
        // Two nodes: nothing but the gradient. Three: parts are rounded up, in every piece.
        EXPECT_NEAR(static_cast<double>(bytes[0]), static_cast<double>(bytes[1]),
                    nodes == 2 ? 0 : 64 * 1024);
      }
      EXPECT_TRUE(path.destroy().is_ok());
    });
  }
}

struct Nameless {
  int nodes, local_size;
  uint64_t usual_in_node = 0;  ///< bytes; larger ones are several operations
};

// Residuals of calls without a name and segments are found again in the next step, also of two calls of one size and of
// calls that are cut: nothing is lost beyond one step's rounding, and the memory of one step is enough.
TEST(Path, CallsWithoutANameFindTheirResidualsAgain) {
  constexpr uint64_t kCount = 100000;
  constexpr int kSteps = 20;
  constexpr int kCalls = 2;
  for (const Nameless& shape : {Nameless{2, 1}, Nameless{3, 1}, Nameless{2, 2, 128 * 1024}}) {
    Cluster cluster({.nodes = shape.nodes, .local_size = shape.local_size});
    const auto size = cluster.size();
    cluster.run([&](Rank r) {
      auto made = cluster.create(
          r, {.lanes = 2, .piece_bytes = 64 * 1024, .usual_in_node = shape.usual_in_node});
      ASSERT_TRUE(made.is_ok()) << made.status().message();
      auto& path = **made;
      ASSERT_TRUE(path.reserve(kCalls * kCount * 4, kCount * 4).is_ok());
      std::vector<double> sent(kCount), arrived(kCount);
      for (Rank i = 0; i < size; ++i) {
        const auto g = gradient(i, 0, kCount);
        for (uint64_t k = 0; k < kCount; ++k) sent[k] += g[k];
      }
      const auto mine = gradient(r, 0, kCount);
      std::vector<std::unique_ptr<Tensor>> tensors;
      for (int c = 0; c < kCalls; ++c)
        tensors.push_back(std::make_unique<Tensor>(cluster, r, kCount * sizeof(float)));
      for (int step = 0; step < kSteps; ++step) {
        uint64_t last = 0;
        for (const auto& tensor : tensors) {
          std::copy(mine.begin(), mine.end(), tensor->as<float>());
          AllReduce a;
          a.data = tensor->address();
          a.count = kCount;
          a.codec = static_cast<int>(kInt8);
          auto id = path.all_reduce(a);
          ASSERT_TRUE(id.is_ok()) << "step " << step << ": " << id.status().message();
          last = *id;
        }
        ASSERT_TRUE(path.join(last, nullptr).is_ok());
        bool finite = false;
        const auto status = path.wait_arrival(0, finite);
        ASSERT_TRUE(status.is_ok()) << "step " << step << ": " << status.message();
        ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
        for (const auto& tensor : tensors)
          for (uint64_t k = 0; k < kCount; ++k) arrived[k] += tensor->as<float>()[k];
        ASSERT_TRUE(path.commit_residuals().is_ok());
      }
      // Same gradients are rounded alike in every step: what is forgotten would be there twenty times.
      double worst = 0;
      for (uint64_t k = 0; k < kCount; ++k)
        worst = std::max(worst, std::abs(arrived[k] - kSteps * kCalls * sent[k]));
      EXPECT_LE(worst, 2.0 * shape.nodes * 6.0 * shape.local_size / 127);
      EXPECT_TRUE(path.destroy().is_ok());
    });
    ASSERT_FALSE(testing::Test::HasFatalFailure());
  }
}

// While memory is replaced by larger memory: what a sanitizer of threads looks at.
TEST(Path, StatisticsMayBeAskedForByOtherThreads) {
  Cluster cluster({.nodes = 2, .local_size = 1});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.least_host_bytes = 64 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    std::atomic<bool> over = false;
    std::atomic<uint64_t> most = 0;
    std::thread asks([&] {
      while (!over) most = std::max(most.load(), path.statistics().residual_bytes);
    });
    constexpr uint64_t kCount = 1000;
    Tensor tensor(cluster, r, kCount * sizeof(float));
    uint64_t last = 0;
    for (uint64_t bytes = 1U << 13; bytes <= 1U << 20; bytes *= 2) {
      EXPECT_TRUE(path.reserve(bytes, bytes).is_ok());
      std::fill_n(tensor.as<float>(), kCount, 1.0F);
      AllReduce a;
      a.data = tensor.address();
      a.count = kCount;
      a.codec = static_cast<int>(kInt8);
      EXPECT_TRUE(path.all_reduce(a).is_ok());
      bool finite = false;
      EXPECT_TRUE(path.wait_arrival(0, finite).is_ok());
      EXPECT_TRUE(path.commit_residuals().is_ok());
      EXPECT_GE(path.statistics().residual_bytes, last);
      last = path.statistics().residual_bytes;
    }
    while (most < last) std::this_thread::yield();
    EXPECT_TRUE(path.destroy().is_ok());
    over = true;
    asks.join();
    EXPECT_EQ(path.statistics().device_bytes, 0U);
  });
}

}  // namespace
}  // namespace paceline::gpu
