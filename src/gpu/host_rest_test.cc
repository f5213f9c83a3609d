#include "gpu/host_rest.h"

#include <barrier>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kTrial = JoinPolicy::kTurn * JoinPolicy::kTurns;

/// A job whose passes arrive `wire` after their join; the thread has `work` to do between a rest and the next forward pass, and
/// the GPU needs `computing` for a pass.
struct Job {
  Time wire, work, computing = 80 * kMillisecond;
  HostRest rest;
  Time now = kSecond, before = 0;
  /// How long it slept after each of so many passes.
  std::vector<Time> run(uint64_t passes) {
    std::vector<Time> slept;
    for (uint64_t i = 0; i < passes; ++i) {
      const Time joined = now;
      now += kMillisecond;  // the optimizer's step
      const Time until = std::max(rest.until(now, joined, before), now);
      slept.push_back(until - now);
      before = joined + wire;
      now = std::max(until + work, before) + computing;
    }
    return slept;
  }
};

TEST(HostRest, SleepsUntilShortlyBeforeAPassIsExpected) {
  Job job{200 * kMillisecond, 5 * kMillisecond};
  const auto slept = job.run(HostRest::kFirst);
  for (size_t i = 0; i < slept.size(); ++i)  // what four passes took must be known
    EXPECT_EQ(slept[i], i < 4 ? 0 : 200 * kMillisecond - HostRest::kLead - kMillisecond) << i;
}

TEST(HostRest, TheShortestOfTheLastPassesCounts) {
  Job job{200 * kMillisecond, 0};
  job.run(10);
  job.wire = 100 * kMillisecond;
  job.run(1);
  job.wire = 300 * kMillisecond;
  const auto slept = job.run(6);
  for (size_t i = 0; i < 4; ++i)
    EXPECT_EQ(slept[i], 100 * kMillisecond - HostRest::kLead - kMillisecond) << i;
  EXPECT_EQ(slept[4], 300 * kMillisecond - HostRest::kLead - kMillisecond);
}

TEST(HostRest, WhereThereIsLittleToWaitForItDoesNotSleep) {
  Job job{HostRest::kLead, 0};
  for (Time slept : job.run(200)) EXPECT_EQ(slept, 0);
}

TEST(HostRest, WhoseArrivalNobodyKnowsIsNotWaitedFor) {
  HostRest rest;
  Time now = kSecond;
  for (int i = 0; i < 20; ++i, now += kSecond) EXPECT_LE(rest.until(now, now, 0), now);
}

TEST(HostRest, AThreadThatHasOtherWorkIsLeftToIt) {
  Job idle{200 * kMillisecond, 5 * kMillisecond};
  idle.run(HostRest::kFirst + kTrial + 1);
  for (Time slept : idle.run(500)) EXPECT_GT(slept, 0);
  Job busy{200 * kMillisecond, 120 * kMillisecond};
  busy.run(HostRest::kFirst + kTrial + 1);
  for (Time slept : busy.run(500)) EXPECT_EQ(slept, 0);
}

/// Steps of a rank on a network that has nothing through before somebody says so.
class Steps {
 public:
  Steps(Cluster& cluster, std::barrier<>& all, Rank rank, Path& path)
      : cluster_(cluster), all_(all), rank_(rank), path_(path), tensor_(cluster, rank, kBytes) {
    std::fill_n(tensor_.as<float>(), kBytes / sizeof(float), 1.0F);
  }
  /// How long rest() took behind an all-reduce that arrives `late` after it ended, or (before: true) meanwhile.
  Time rest(std::chrono::milliseconds late, bool meanwhile = false) {
    const auto now = [] { return SteadyClock().now(); };
    hold(true);
    AllReduce a;
    a.data = tensor_.address();
    a.count = kBytes / sizeof(float);
    auto id = path_.all_reduce(a);
    EXPECT_TRUE(id.is_ok()) << id.status().message();
    EXPECT_TRUE(path_.join(*id, nullptr).is_ok());
    if (meanwhile) hold(false);
    const Time since = now();
    EXPECT_TRUE(path_.rest().is_ok());
    const Time took = now() - since;
    EXPECT_TRUE(path_.rest().is_ok());  // once is enough
    std::this_thread::sleep_for(late);
    if (!meanwhile) hold(false);
    bool finite = false;
    EXPECT_TRUE(path_.wait_arrival(0, finite).is_ok());
    return took;
  }

 private:
  static constexpr uint64_t kBytes = 64 * 1024;
  void hold(bool held) {
    all_.arrive_and_wait();
    if (rank_ == 0) cluster_.network().hold_between(0, 1, held);
    all_.arrive_and_wait();
  }
  Cluster& cluster_;
  std::barrier<>& all_;
  Rank rank_;
  Path& path_;
  Tensor tensor_;
};

TEST(HostRest, ThePathKnowsWhenAPassHasArrived) {
  ClusterOptions o;
  o.wires = 1;
  Cluster cluster(o);
  std::barrier all(cluster.size());
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    Steps steps(cluster, all, r, **made);
    constexpr auto kLate = std::chrono::milliseconds(300);
    for (int pass = 0; pass < 4; ++pass) EXPECT_LT(steps.rest(kLate), 200 * kMillisecond) << pass;
    const Time slept = steps.rest(std::chrono::milliseconds(0));
    EXPECT_GE(slept, 300 * kMillisecond - HostRest::kLead - 50 * kMillisecond);
    // What has arrived is not slept for.
    EXPECT_LT(steps.rest(std::chrono::milliseconds(0), true), 200 * kMillisecond);
    EXPECT_TRUE((*made)->destroy().is_ok());
  });
}

// A neighbour that is lost ends the sleep, by its name.
TEST(HostRest, AFailureEndsIt) {
  ClusterOptions o;
  o.wires = 1;
  Cluster cluster(o);
  std::barrier all(cluster.size());
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    Steps steps(cluster, all, r, path);
    for (int pass = 0; pass < 4; ++pass) steps.rest(std::chrono::milliseconds(20));
    all.arrive_and_wait();
    if (r == 1) {
      cluster.kill(1);
      all.arrive_and_wait();
      paceline_comm_abort(cluster.comm(1), "killed");  // it is dead, and waits for nobody
      return;
    }
    Tensor tensor(cluster, r, 4096);
    AllReduce a;
    a.data = tensor.address();
    a.count = 1024;
    auto id = path.all_reduce(a);
    auto status = id ? path.join(*id, nullptr) : id.status();
    const auto until = SteadyClock().now() + 5 * kSecond;
    while (status && SteadyClock().now() < until) status = path.rest();
    EXPECT_EQ(status.code(), Code::kPeerLost) << status.message();
    all.arrive_and_wait();
  });
}

}  // namespace
}  // namespace paceline::gpu
