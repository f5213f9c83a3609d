// Reduce-scatter, all-gather and broadcast from end to end, on simulated GPUs and NCCL, over real engines.
#include <atomic>
#include <cmath>
#include <random>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr auto kReduceScatter = PathKind::kReduceScatter;
constexpr auto kAllGather = PathKind::kAllGather;
constexpr auto kBroadcast = PathKind::kBroadcast;

struct Case {
  PathKind kind;
  int nodes, local_size;
  uint64_t count;  ///< elements of a block
  int operations = 1;
  int lanes = 1;
  int queues = 0;
  int delays_us = 0;
  DType dtype = DType::kFloat32;
  int codec = 0;
  bool average = true;
  uint64_t host_bytes = 1U << 20;  ///< pinned: what has no room is cut
  uint64_t shift = 0;              ///< bytes by which buffers are off their alignment
  int wires = default_wires();
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const auto& c = info.param;
  std::string kind = kind_name(c.kind);
  std::erase(kind, '-');
  return fmt::format("{}_{}x{}_{}_{}ops_{}lanes_{}queues{}{}{}{}{}{}", kind, c.nodes, c.local_size,
                     c.count, c.operations, c.lanes, c.queues, c.delays_us > 0 ? "_delays" : "",
                     c.dtype == DType::kFloat32 ? "" : "_" + std::string(dtype_name(c.dtype)),
                     c.codec > 0 ? fmt::format("_codec{}", c.codec) : "",
                     c.host_bytes < (1U << 20) ? "_cut" : "",
                     c.shift > 0 ? fmt::format("_shift{}", c.shift) : "",
                     c.wires > 1 ? fmt::format("_{}wires", c.wires) : "");
}

/// What `rank` has in operation `i`: `count` values that the dtype holds exactly.
std::vector<float> values(Rank rank, int i, uint64_t count) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) * 7919 + static_cast<uint64_t>(i) * 31 +
                         count);
  std::uniform_int_distribution<int> sixteenths(-2000, 2000);
  std::vector<float> v(count);
  for (auto& x : v) x = static_cast<float>(sixteenths(random) / 16) / 8;
  return v;
}

void store(DType dtype, void* to, const std::vector<float>& v) {
  if (v.empty()) return;
  if (dtype == DType::kFloat32)
    std::memcpy(to, v.data(), v.size() * sizeof(float));
  else
    cpu::narrow(dtype, to, v.data(), 1, v.size());
}

std::vector<float> load(DType dtype, const void* from, uint64_t count) {
  std::vector<float> v(count);
  if (count == 0) return v;
  if (dtype == DType::kFloat32)
    std::memcpy(v.data(), from, count * sizeof(float));
  else
    cpu::widen(dtype, v.data(), from, 1, count);
  return v;
}

class CollectiveOf : public testing::TestWithParam<Case> {
 protected:
  /// Buffers of one operation.
  struct Buffers {
    std::unique_ptr<Tensor> input, output, scratch;
  };
  uint64_t input_elements(int ranks) const {
    return GetParam().count * static_cast<uint64_t>(GetParam().kind == kReduceScatter ? ranks : 1);
  }
  uint64_t output_elements(int ranks) const {
    return GetParam().count * static_cast<uint64_t>(GetParam().kind == kAllGather ? ranks : 1);
  }
  int root_of(int operation, int ranks) const { return (operation * 5 + 1) % ranks; }

  Collective prepare(Cluster& cluster, Path& path, Rank r, int i, Buffers& b) const {
    const auto& p = GetParam();
    const uint64_t item = dtype_size(p.dtype);
    const auto in = values(r, i, input_elements(cluster.size()));
    const uint64_t out = output_elements(cluster.size()) * item;
    b.output = std::make_unique<Tensor>(cluster, r, out + p.shift);
    std::memset(b.output->as<void>(), 0x7f, out + p.shift);
    Collective c;
    c.kind = p.kind;
    c.count = p.count;
    c.dtype = p.dtype;
    c.average = p.average;
    c.codec = p.codec;
    c.root = root_of(i, cluster.size());
    c.output = b.output->address() + p.shift;
    auto* const output = b.output->as<std::byte>() + p.shift;
    if (p.kind == kBroadcast) {
      if (r == c.root) store(p.dtype, output, in);
    } else if (p.kind == kAllGather && i % 2 == 1) {  // in place
      c.input = c.output + static_cast<uint64_t>(r) * p.count * item;
      store(p.dtype, output + static_cast<uint64_t>(r) * p.count * item, in);
    } else {
      b.input = std::make_unique<Tensor>(cluster, r, in.size() * item + p.shift);
      store(p.dtype, b.input->as<std::byte>() + p.shift, in);
      c.input = b.input->address() + p.shift;
    }
    c.scratch_bytes = path.scratch_bytes(c);
    b.scratch = std::make_unique<Tensor>(cluster, r, c.scratch_bytes);
    c.scratch = b.scratch->address();
    c.name = fmt::format("unit {}", i);
    return c;
  }

  void check(Rank r, int ranks, int i, const std::vector<float>& got) const {
    const auto& p = GetParam();
    std::vector<double> wanted(got.size()), allowed(got.size());
    if (p.kind == kBroadcast) {
      const auto v = values(root_of(i, ranks), i, p.count);
      std::copy(v.begin(), v.end(), wanted.begin());
    }
    for (Rank other = 0; other < ranks && p.kind != kBroadcast; ++other) {
      const auto v = values(other, i, input_elements(ranks));
      if (p.kind == kAllGather) {
        std::copy(v.begin(), v.end(), wanted.begin() + static_cast<long>(p.count) * other);
        continue;
      }
      const bool halves = p.codec == 1 || p.dtype == DType::kFloat16;
      const double unit = p.dtype == DType::kFloat32 && p.codec == 0 ? 1e-6
                          : halves                                   ? 1.0 / 1024
                                                                     : 1.0 / 128;
      const double scale = p.average ? 1.0 / ranks : 1.0;
      for (uint64_t k = 0; k < p.count; ++k) {
        const double x = v[static_cast<uint64_t>(r) * p.count + k];
        wanted[k] += x * scale;
        allowed[k] += std::abs(x) * scale * unit * 3;
      }
    }
    for (size_t k = 0; k < got.size(); ++k)
      ASSERT_LE(std::abs(got[k] - wanted[k]), allowed[k] + 1e-12)
          << "rank " << r << " operation " << i << " element " << k;
  }
};

TEST_P(CollectiveOf, EqualsFloat64) {
  const Case p = GetParam();
  ClusterOptions o;
  o.nodes = p.nodes;
  o.local_size = p.local_size;
  o.machine.hardware_queues = p.queues;
  o.machine.delays_us = p.delays_us;
  o.machine.seed = 7;
  o.wires = p.wires;
  Cluster cluster(o);
  cluster.run([&](Rank r) {
    auto made = cluster.create(
        r, {.lanes = p.lanes, .piece_bytes = 16 * 1024, .least_host_bytes = p.host_bytes});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(0, 0).is_ok());
    const auto& api = cluster.machine().api();
    cu::Stream stream = nullptr;
    ASSERT_EQ(api.stream_create_with_priority(&stream, 1, 0), 0);
    std::vector<Buffers> buffers(static_cast<size_t>(p.operations));
    std::vector<Collective> work;
    for (int i = 0; i < p.operations; ++i)
      work.push_back(prepare(cluster, path, r, i, buffers[static_cast<size_t>(i)]));
    const auto before = cluster.machine().counts(r).allocations;
    std::vector<uint64_t> ids;
    for (auto& c : work) {
      c.stream = stream;
      auto id = path.collective(c);
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      ids.push_back(*id);
    }
    for (auto id : ids) ASSERT_TRUE(path.join(id, stream).is_ok());
    bool finite = false;
    auto status = path.wait_arrival(0, finite);
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_TRUE(finite);
    ASSERT_EQ(api.stream_synchronize(stream), 0);
    EXPECT_EQ(cluster.machine().counts(r).allocations, before);
    EXPECT_EQ(cluster.machine().counts(r).allocations_in_wait, 0U);
    for (int i = 0; i < p.operations; ++i) {
      const auto& b = buffers[static_cast<size_t>(i)];
      check(r, cluster.size(), i,
            load(p.dtype, b.output->as<std::byte>() + p.shift, output_elements(cluster.size())));
      if (b.input != nullptr) {
        EXPECT_EQ(load(p.dtype, b.input->as<std::byte>() + p.shift, input_elements(cluster.size())),
                  values(r, i, input_elements(cluster.size())))
            << "the input was changed";
      }
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
  EXPECT_EQ(cluster.cliques().disagreement(), "");
  EXPECT_EQ(cluster.cliques().open(), 0);
}

std::vector<Case> shapes() {
  std::vector<Case> all;
  for (auto kind : {kReduceScatter, kAllGather, kBroadcast}) {
    for (auto [nodes, local] : {std::pair{2, 1}, {2, 2}, {3, 2}, {3, 1}}) {
      all.push_back({kind, nodes, local, 1, 3});
      all.push_back({kind, nodes, local, 4097, 2});
      all.push_back({kind, nodes, local, 30011, 3, 2});
    }
    all.push_back({kind, 2, 3, 7, 2});
    all.push_back({kind, 2, 2, 0, 2});
    all.push_back({kind, 4, 2, 10000, 2, 4, 0, 200});
    // One hardware queue for all streams.
    all.push_back({kind, 2, 1, 20011, 4, 1, 1});
    all.push_back({kind, 2, 2, 20011, 4, 2, 1, 100});
    all.push_back({kind, 3, 2, 9001, 3, 1, 1});
    // Several operations each, which wait for pinned memory.
    all.push_back({.kind = kind,
                   .nodes = 2,
                   .local_size = 2,
                   .count = 50021,
                   .operations = 3,
                   .lanes = 2,
                   .delays_us = 100,
                   .host_bytes = 256 * 1024});
    all.push_back({.kind = kind,
                   .nodes = 3,
                   .local_size = 1,
                   .count = 50021,
                   .operations = 2,
                   .queues = 1,
                   .host_bytes = 256 * 1024});
    for (auto dtype : {DType::kBFloat16, DType::kFloat16})
      all.push_back({.kind = kind, .nodes = 2, .local_size = 2, .count = 9003, .dtype = dtype});
    for (int local : {1, 2})
      all.push_back({.kind = kind,
                     .nodes = 2,
                     .local_size = local,
                     .count = 9003,
                     .operations = 2,
                     .shift = 4});
    for (int wires : {2, 3})
      all.push_back({.kind = kind,
                     .nodes = wires,
                     .local_size = 2,
                     .count = 30011,
                     .operations = 4,
                     .lanes = 2,
                     .delays_us = 100,
                     .host_bytes = 256 * 1024,
                     .wires = wires});
  }
  all.push_back({.kind = kReduceScatter, .nodes = 2, .local_size = 2, .count = 9003, .codec = 1});
  all.push_back({.kind = kReduceScatter, .nodes = 3, .local_size = 1, .count = 9003, .codec = 2});
  all.push_back(
      {.kind = kReduceScatter, .nodes = 2, .local_size = 1, .count = 9003, .average = false});
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, CollectiveOf, testing::ValuesIn(shapes()), name_of);

// The root was early: what it sent is there before the caller's stream comes to the call on the others.
TEST(Collectives, ABroadcastIsWrittenAfterWhatItsStreamDidBefore) {
  for (const bool joined_elsewhere : {false, true}) {
    ClusterOptions options;
    options.nodes = 2;
    options.local_size = 1;
    Cluster cluster(options);
    cluster.run([&](Rank r) {
      constexpr uint64_t kCount = 4096;
      auto made = cluster.create(r);
      ASSERT_TRUE(made) << made.status().message();
      auto& path = **made;
      ASSERT_TRUE(path.reserve(2 * kCount * 4, kCount * 4));
      const auto& api = cluster.machine().api();
      cu::Stream stream = nullptr;
      cu::Stream other = nullptr;
      for (auto* s : {&stream, &other}) ASSERT_EQ(api.stream_create_with_priority(s, 1, 0), 0);
      Tensor tensor(cluster, r, kCount * 4);
      Tensor second(cluster, r, kCount * 4);
      auto* data = tensor.as<float>();
      for (int i = 0; i < 10; ++i) {
        std::atomic<bool> go{false};
        std::fill_n(data, kCount, r == 0 ? 7.0F : -1.0F);
        std::fill_n(second.as<float>(), kCount, static_cast<float>(r));
        if (r == 1)
          cluster.machine().add_task(
              stream, {[&] { return go.load(); }, [&] { std::fill_n(data, kCount, 0.0F); }});
        Collective c;
        c.kind = kBroadcast;
        c.count = kCount;
        c.dtype = DType::kFloat32;
        c.output = tensor.address();
        c.stream = stream;
        auto id = path.collective(c);
        ASSERT_TRUE(id) << id.status().message();
        const auto result = joined_elsewhere ? other : stream;
        ASSERT_TRUE(path.join(*id, result));
        // A later call of another stream, behind this one's result, is nothing that this one may wait for.
        c.output = second.address();
        c.stream = result;
        id = path.collective(c);
        ASSERT_TRUE(id) << id.status().message();
        ASSERT_TRUE(path.join(*id, result));
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        go = true;
        bool finite = true;
        ASSERT_TRUE(path.wait_arrival(20, finite));
        ASSERT_EQ(api.stream_synchronize(result), 0);
        ASSERT_EQ(data[0], 7.0F);
        ASSERT_EQ(data[kCount - 1], 7.0F);
        ASSERT_EQ(second.as<float>()[0], 0.0F);
      }
      (void)path.destroy();
      for (auto* s : {stream, other}) api.stream_destroy(s);
    });
  }
}

TEST(Collectives, ShapesThatDifferAreNamed) {
  Cluster cluster({.nodes = 2, .local_size = 1});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok());
    auto& path = **made;
    Tensor input(cluster, r, 4096), output(cluster, r, 8192);
    Collective c;
    c.input = input.address();
    c.output = output.address();
    c.count = 100 + static_cast<uint64_t>(r);
    c.name = "layer1";
    auto status = path.collective(c).status();  // the other's may have been seen already
    bool finite = false;
    if (status) status = path.wait_arrival(20, finite);
    EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
    EXPECT_NE(status.message().find("layer1"), std::string::npos) << status.message();
  });
}

TEST(Collectives, BadArgumentsAreNamedAndEndNothing) {
  Cluster cluster({.nodes = 2, .local_size = 2});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok());
    auto& path = **made;
    Tensor tensor(cluster, r, 16384);
    Collective c;
    c.kind = kReduceScatter;
    c.input = c.output = tensor.address();
    c.count = 100;
    EXPECT_NE(path.collective(c).status().message().find("scratch"), std::string::npos);
    c.dtype = DType::kInt32;
    EXPECT_EQ(path.collective(c).status().code(), Code::kUnsupported);
    c.dtype = DType::kFloat32;
    c.codec = 4;
    EXPECT_NE(path.collective(c).status().message().find("residuals"), std::string::npos);
    c.kind = kBroadcast;
    c.root = 4;
    EXPECT_NE(path.collective(c).status().message().find("no rank 4 among 4"), std::string::npos);
    c.kind = kAllGather;
    c.output = 0;
    EXPECT_EQ(path.collective(c).status().code(), Code::kInvalidArgument);
    bool finite = false;
    EXPECT_TRUE(path.wait_arrival(1, finite).is_ok());
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

// A small all-reduce copies out on another stream than what only moves: the word that tells the host how far copies are must
// not run ahead of the slower one.
TEST(Collectives, WhatIsReadyEarlierDoesNotAnnounceWhatIsNot) {
  Cluster cluster({.nodes = 2, .local_size = 1});
  slow_down_encoding(cluster, std::chrono::milliseconds(20));
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok());
    auto& path = **made;
    constexpr uint64_t kCount = 3000;
    Tensor sum(cluster, r, kCount * 4), shard(cluster, r, kCount * 4),
        whole(cluster, r, kCount * 8);
    const auto& api = cluster.machine().api();
    cu::Stream one = nullptr, other = nullptr;
    ASSERT_EQ(api.stream_create_with_priority(&one, 1, 0), 0);
    ASSERT_EQ(api.stream_create_with_priority(&other, 1, 0), 0);
    std::fill_n(shard.as<float>(), kCount, static_cast<float>(r));
    for (int step = 1; step < 6; ++step) {
      std::fill_n(sum.as<float>(), kCount, static_cast<float>(step * (r + 1)));
      AllReduce a;
      a.data = sum.address();
      a.count = kCount;
      a.codec = 0;
      a.stream = one;
      auto first = path.all_reduce(a);
      ASSERT_TRUE(first.is_ok());
      Collective c;
      c.input = shard.address();
      c.output = whole.address();
      c.count = kCount;
      c.stream = other;
      auto second = path.collective(c);
      ASSERT_TRUE(second.is_ok());
      ASSERT_TRUE(path.join(*first, one).is_ok());
      ASSERT_TRUE(path.join(*second, other).is_ok());
      bool finite = false;
      ASSERT_TRUE(path.wait_arrival(20, finite).is_ok());
      ASSERT_EQ(api.stream_synchronize(one), 0);
      ASSERT_EQ(api.stream_synchronize(other), 0);
      EXPECT_EQ(sum.as<float>()[kCount - 1], static_cast<float>(3 * step));
      EXPECT_EQ(whole.as<float>()[2 * kCount - 1], 1.0F);
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

TEST(Collectives, AnInfIsKnownOnAllRanks) {
  Cluster cluster({.nodes = 2, .local_size = 1});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok());
    auto& path = **made;
    Tensor input(cluster, r, 8000), output(cluster, r, 4000);
    std::fill_n(input.as<float>(), 2000, 1.0F);
    if (r == 1) input.as<float>()[3] = INFINITY;
    Collective c;
    c.kind = kReduceScatter;
    c.input = input.address();
    c.output = output.address();
    c.count = 1000;
    ASSERT_TRUE(path.collective(c).is_ok());
    bool finite = true;
    ASSERT_TRUE(path.wait_arrival(10, finite).is_ok());
    EXPECT_FALSE(finite);
    EXPECT_TRUE(path.destroy().is_ok());
    EXPECT_EQ(std::isinf(output.as<float>()[3]), r == 0);
  });
}

}  // namespace
}  // namespace paceline::gpu
