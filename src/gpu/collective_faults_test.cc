// Reduce-scatter, all-gather and broadcast beside each other, and what becomes of them in a fault.
#include <atomic>
#include <cmath>
#include <random>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr auto kReduceScatter = PathKind::kReduceScatter;
constexpr auto kBroadcast = PathKind::kBroadcast;

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

/// The others of its node wait for it within the node, so what they owe other nodes is late too: they are not named.
void expect_late_one_named(ClusterOptions o, bool stopped) {
  const Rank late = o.nodes * o.local_size - 1;
  if (stopped) o.stopped = late;
  Cluster cluster(o);
  std::atomic<int> left = late;
  cluster.run([&](Rank r) {
    Mixed m(cluster, r);
    m.before = [&](int step) {
      if (r != late || step != 1) return;
      m.leave = true;
      if (stopped) cluster.freeze(late);
      while (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      cluster.freeze(late, false);
    };
    const auto start = SteadyClock().now();
    auto status = m.run(3);
    if (r == late) return;
    --left;
    EXPECT_FALSE(status.is_ok());
    const auto named =
        fmt::format("rank {} (host {}) {}", late, static_cast<char>('a' + o.nodes - 1),
                    stopped ? "does not answer" : "has not submitted it");
    EXPECT_NE(status.message().find(named), std::string::npos) << status.message();
    EXPECT_LT(SteadyClock().now() - start, 8 * kSecond);
    EXPECT_TRUE(m.stream_ended);
  });
}

TEST_P(CollectiveFaults, ARankThatStaysAwayIsNamedByTheDeadline) {
  auto o = options();
  o.timeout_s = 1;
  expect_late_one_named(o, false);
}

TEST_P(CollectiveFaults, AStoppedRankIsNamedByTheDeadline) {
  auto o = options();
  o.timeout_s = 1;
  expect_late_one_named(o, true);
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

}  // namespace
}  // namespace paceline::gpu
