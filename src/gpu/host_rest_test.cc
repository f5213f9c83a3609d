#include "gpu/host_rest.h"

#include <barrier>
#include <functional>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kTrial = PassTrial::kTurn * PassTrial::kTurns;

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
    EXPECT_TRUE(submit().is_ok());
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

  /// An all-reduce that the default stream joins.
  Result<uint64_t> submit() {
    AllReduce a;
    a.data = tensor_.address();
    a.count = kBytes / sizeof(float);
    PACELINE_ASSIGN(const auto id, path_.all_reduce(a));
    PACELINE_RETURN_IF_ERROR(path_.join(id, nullptr));
    return id;
  }
  void hold(bool held) {
    all_.arrive_and_wait();
    if (rank_ == 0) cluster_.network().hold_between(0, 1, held);
    all_.arrive_and_wait();
  }

 private:
  static constexpr uint64_t kBytes = 64 * 1024;
  Cluster& cluster_;
  std::barrier<>& all_;
  Rank rank_;
  Path& path_;
  Tensor tensor_;
};

/// Runs `body` on both ranks of two nodes, after passes that have arrived this late; the sleep is this long from then on.
constexpr auto kLate = std::chrono::milliseconds(1200);
constexpr Time kSleep = 1200 * kMillisecond - HostRest::kLead;
void run_late_passes(
    const std::function<void(Cluster&, std::barrier<>&, Rank, Path&, Steps&)>& body) {
  ClusterOptions o;
  o.wires = 1;
  Cluster cluster(o);
  std::barrier all(cluster.size());
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    Steps steps(cluster, all, r, **made);
    for (int pass = 0; pass < 4; ++pass) EXPECT_LT(steps.rest(kLate), kSleep / 2) << pass;
    body(cluster, all, r, **made, steps);
  });
}

TEST(HostRest, ThePathKnowsWhenAPassHasArrived) {
  run_late_passes([](Cluster&, std::barrier<>&, Rank, Path& path, Steps& steps) {
    EXPECT_GE(steps.rest(std::chrono::milliseconds(0)), kSleep - 50 * kMillisecond);
    EXPECT_LT(steps.rest(std::chrono::milliseconds(0), true), kSleep / 2);  // it has arrived
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

// A neighbour that is lost ends the sleep, by its name.
TEST(HostRest, AFailureEndsIt) {
  run_late_passes([](Cluster& cluster, std::barrier<>& all, Rank r, Path& path, Steps& steps) {
    steps.hold(true);
    auto id = steps.submit();
    ASSERT_TRUE(id.is_ok()) << id.status().message();
    all.arrive_and_wait();
    if (r == 1) {
      cluster.kill(1);
    } else {
      const Time since = SteadyClock().now();
      const auto status = path.rest();
      EXPECT_LT(SteadyClock().now() - since, kSleep / 2);
      EXPECT_EQ(status.code(), Code::kPeerLost) << status.message();
    }
    all.arrive_and_wait();
    if (r == 1) paceline_comm_abort(cluster.comm(1), "killed");  // it is dead, and waits for nobody
  });
}

}  // namespace
}  // namespace paceline::gpu
