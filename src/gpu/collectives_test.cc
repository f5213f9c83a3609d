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
  if (dtype == DType::kFloat32)
    std::memcpy(to, v.data(), v.size() * sizeof(float));
  else
    cpu::narrow(dtype, to, v.data(), 1, v.size());
}

std::vector<float> load(DType dtype, const void* from, uint64_t count) {
  std::vector<float> v(count);
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

/// Every kind in turn, beside all-reduces, as a sharded step has them.
class Mixed {
 public:
  Mixed(Cluster& cluster, Rank rank) : cluster_(cluster), rank_(rank) {}
  std::function<void(int step)> before;
  bool leave = false;  ///< after `before` of a step: no more calls

  Status run(int steps) {
    auto made = cluster_.create(rank_, {.piece_bytes = 16 * 1024, .least_host_bytes = 256 * 1024});
    PACELINE_RETURN_IF_ERROR(made.status());
    auto& path = **made;
    auto status = run(path, steps);
    if (!status) {
      const auto error = cluster_.machine().api().stream_synchronize(nullptr);
      stream_ended = error == 0 || error == kGpuFailed;
    }
    auto end = path.destroy();
    return status ? end : status;
  }
  bool stream_ended = true, correct = true;
  static constexpr int kGpuFailed = 719;

 private:
  static constexpr uint64_t kCount = 8191;
  Status run(Path& path, int steps) {
    PACELINE_RETURN_IF_ERROR(path.reserve(0, 0));
    const auto ranks = static_cast<uint64_t>(cluster_.size());
    Tensor shard(cluster_, rank_, kCount * 4), whole(cluster_, rank_, ranks * kCount * 4);
    Collective gather;
    gather.input = shard.address();
    gather.output = whole.address();
    gather.count = kCount;
    Collective scatter = gather;
    scatter.kind = kReduceScatter;
    std::swap(scatter.input, scatter.output);
    scatter.average = true;
    scatter.scratch_bytes = path.scratch_bytes(scatter);
    Tensor scratch(cluster_, rank_, scatter.scratch_bytes);
    scatter.scratch = scratch.address();
    AllReduce sum;
    sum.data = shard.address();
    sum.count = kCount;
    sum.codec = 0;
    Collective spread = gather;
    spread.kind = kBroadcast;
    spread.output = whole.address();
    std::fill_n(shard.as<float>(), kCount, static_cast<float>(rank_));
    for (int step = 0; step < steps; ++step) {
      if (before) before(step);
      if (leave) return Status::ok();
      PACELINE_ASSIGN(auto id, path.collective(gather));
      PACELINE_RETURN_IF_ERROR(path.join(id, nullptr));
      PACELINE_ASSIGN(id, path.collective(scatter));
      PACELINE_RETURN_IF_ERROR(path.join(id, nullptr));
      PACELINE_ASSIGN(id, path.all_reduce(sum));
      PACELINE_RETURN_IF_ERROR(path.join(id, nullptr));
      spread.root = step % cluster_.size();
      PACELINE_ASSIGN(id, path.collective(spread));
      PACELINE_RETURN_IF_ERROR(path.join(id, nullptr));
      bool finite = false;
      PACELINE_RETURN_IF_ERROR(path.wait_arrival(30, finite));
      if (cluster_.machine().api().stream_synchronize(nullptr) != 0)
        return {Code::kUnavailable, "the stream has failed"};
      bool again = false;
      if (!path.wait_arrival(30, again)) break;
      // The mean of equal shards is the shard; the sum over all ranks is the same number everywhere.
      const auto all = static_cast<float>(ranks * (ranks - 1) / 2);
      for (uint64_t k = 0; k < kCount; ++k) correct = correct && shard.as<float>()[k] == all;
      std::fill_n(shard.as<float>(), kCount, static_cast<float>(rank_));
    }
    return Status::ok();
  }
  Cluster& cluster_;
  Rank rank_;
};

class CollectiveFaults : public OnShapes {};

TEST_P(CollectiveFaults, AllKindsBesideEachOther) {
  Cluster cluster(options());
  cluster.run([&](Rank r) {
    Mixed m(cluster, r);
    auto status = m.run(12);
    EXPECT_TRUE(status.is_ok()) << status.message();
    EXPECT_TRUE(m.correct);
  });
  EXPECT_EQ(cluster.cliques().disagreement(), "");
}

TEST_P(CollectiveFaults, AKilledRankIsNamedOnAllOthers) {
  Cluster cluster(options());
  const Rank victim = cluster.size() - 1;
  std::atomic<int> left = victim;
  cluster.run([&](Rank r) {
    Mixed m(cluster, r);
    m.before = [&](int step) {
      if (r != victim || step != 2) return;
      m.leave = true;
      cluster.kill(victim);
      while (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      // It is dead, and waits for nobody.
      paceline_comm_abort(cluster.comm(victim), "killed");
    };
    auto status = m.run(4);
    if (r == victim) return;
    --left;
    EXPECT_EQ(status.code(), Code::kPeerLost) << status.message();
    EXPECT_NE(status.message().find(fmt::format("rank {} (host", victim)), std::string::npos)
        << status.message();
    EXPECT_TRUE(m.stream_ended);
    EXPECT_TRUE(m.correct);
  });
}

TEST_P(CollectiveFaults, ARankThatStaysAwayIsNamedByTheDeadline) {
  auto o = options();
  o.timeout_s = 0.5;
  Cluster cluster(o);
  const Rank late = cluster.size() - 1;
  std::atomic<int> left = late;
  cluster.run([&](Rank r) {
    Mixed m(cluster, r);
    m.before = [&](int step) {
      if (r != late || step != 1) return;
      m.leave = true;
      while (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    const auto start = SteadyClock().now();
    auto status = m.run(3);
    if (r == late) return;
    --left;
    EXPECT_FALSE(status.is_ok());
    // Beside other ranks of its node, those are as late as it is.
    const auto named = GetParam().local_size == 1 ? fmt::format("rank {}", late) : "rank ";
    EXPECT_NE(status.message().find(named), std::string::npos) << status.message();
    EXPECT_LT(SteadyClock().now() - start, 8 * kSecond);
    EXPECT_TRUE(m.stream_ended);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, CollectiveFaults,
                         testing::Values(ClusterShape{2, 1, 0}, ClusterShape{2, 2, 0},
                                         ClusterShape{2, 2, 1}, ClusterShape{3, 2, 0},
                                         ClusterShape{2, 1, 0, 2}, ClusterShape{2, 2, 0, 3},
                                         ClusterShape{3, 1, 0, 2}),
                         [](const auto& info) {
                           return fmt::format("{}x{}_{}queues_{}wires", info.param.nodes,
                                              info.param.local_size, info.param.queues,
                                              info.param.wires);
                         });

/// Runs two steps with one call failing; every rank comes to an end.
void run_with_fault(const ClusterOptions& o, const std::string& what, bool must_fail,
                    const std::function<void(Cluster&)>& fault,
                    const std::function<bool(Cluster&)>& happened = {}) {
  Cluster cluster(o);
  fault(cluster);
  std::atomic<bool> failed = false;
  const auto start = SteadyClock().now();
  cluster.run([&](Rank r) {
    Mixed m(cluster, r);
    auto status = m.run(2);
    if (!status) failed = true;
    EXPECT_TRUE(m.stream_ended) << what << ": a stream waits for ever";
    EXPECT_TRUE(m.correct) << what << ": wrong values were reported as arrived";
    EXPECT_NE(status.code(), Code::kTimeout) << what << ": " << status.message();
  });
  EXPECT_LT(SteadyClock().now() - start, 8 * kSecond) << what;
  EXPECT_TRUE(failed || !must_fail || (happened && !happened(cluster)))
      << what << " went unnoticed";
}

class CollectiveFaultsOfCalls : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Launching, CollectiveFaultsOfCalls, testing::Bool(),
                         [](const auto& info) { return info.param ? "ahead" : "later"; });

TEST_P(CollectiveFaultsOfCalls, EveryCallOfTheDriverMayFail) {
  ClusterOptions o;
  o.ahead = GetParam();
  const std::vector<std::string> functions = {
      "memcpy_dtoh_async", "memcpy_htod_async",   "memcpy_dtod_async",
      "stream_wait_event", "stream_wait_value32", "stream_write_value32",
      "event_record",      "launch_kernel",       "stream_is_capturing"};
  std::vector<uint64_t> created, all;
  {
    Cluster cluster(o);
    cluster.run([&](Rank r) { EXPECT_TRUE(Mixed(cluster, r).run(0).is_ok()); });
    for (const auto& f : functions) created.push_back(cluster.machine().calls(f, 0));
  }
  {
    Cluster cluster(o);
    cluster.run([&](Rank r) { EXPECT_TRUE(Mixed(cluster, r).run(2).is_ok()); });
    for (const auto& f : functions) all.push_back(cluster.machine().calls(f, 0));
  }
  for (size_t i = 0; i < functions.size(); ++i) {
    if (functions[i] != "stream_wait_value32" || GetParam()) {
      ASSERT_GT(all[i], created[i]) << functions[i];
    } else if (all[i] == created[i]) {
      continue;  // all had come before somebody joined it
    }
    const uint64_t own = all[i] - created[i];
    for (uint64_t nth : {uint64_t{1}, own / 3 + 1, own * 2 / 3 + 1}) {
      run_with_fault(
          o, fmt::format("{} call {} of {}", functions[i], created[i] + nth, all[i]), nth + 2 < own,
          [&](Cluster& c) {
            c.machine().fail(functions[i], static_cast<int>(created[i] + nth), Mixed::kGpuFailed,
                             0);
          },
          [&](Cluster& c) { return c.machine().calls(functions[i], 0) >= created[i] + nth; });
    }
  }
}

TEST_P(CollectiveFaultsOfCalls, EveryCallOfNcclMayFail) {
  ClusterOptions o;
  o.ahead = GetParam();
  o.local_size = 2;
  for (const auto* f : {"group_start", "group_end", "reduce_scatter", "all_gather", "broadcast"}) {
    for (int nth : {6, 9}) {
      run_with_fault(o, fmt::format("{} call {}", f, nth), true,
                     [&](Cluster& c) { c.cliques().fail(f, nth, 1); });
    }
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
