// A rank that is ahead of its node's others, where cores are short.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "base/cores.h"
#include "engine/engine_test_util.h"
#include "engine/runner.h"

namespace paceline::engine {
namespace {

Operation sum(std::vector<float>& data) {
  Operation o;
  o.count = data.size();
  o.input = o.output = data.data();
  return o;
}

TEST(GiveWay, NeighboursAreMetOnceEachRankOfTheNodeIsThere) {
  Cluster cluster(4, 2);
  std::mt19937_64 random(31);
  std::vector<std::vector<float>> data(4);
  for (auto& values : data) values = random_values<float>(random, 200000);
  const auto wanted = reduced(ReduceOp::kSum, data);
  const auto submit = [&](Rank r) {
    return *cluster[r].submit(sum(data[static_cast<std::size_t>(r)]), 0);
  };
  const auto settle = [&] {
    std::vector<OpId> ended;
    for (int i = 0; i < 200; ++i)
      for (Rank r = 0; r < 4; ++r) cluster[r].progress(0, ended);
  };
  const OpId first = submit(0);
  settle();
  EXPECT_FALSE(cluster[0].met_neighbours(first));
  const OpId third = submit(2);  // of the other node
  settle();
  EXPECT_FALSE(cluster[0].met_neighbours(first));
  EXPECT_FALSE(cluster[2].met_neighbours(third));
  const OpId second = submit(1);
  settle();
  EXPECT_TRUE(cluster[0].met_neighbours(first));
  EXPECT_TRUE(cluster[1].met_neighbours(second));
  EXPECT_FALSE(cluster[2].met_neighbours(third));
  EXPECT_EQ(cluster[0].outcome(first), nullptr);  // the other node is not complete
  cluster.expect_ok({first, second, third, submit(3)});
  EXPECT_TRUE(cluster[0].met_neighbours(first));  // it is over
  for (const auto& values : data) EXPECT_EQ(values, wanted);
}

TEST(GiveWay, ARankAloneOnItsNodeMeetsNobody) {
  Cluster cluster(2, 1);
  std::vector<float> data(1000);
  EXPECT_TRUE(cluster[0].met_neighbours(*cluster[0].submit(sum(data), 0)));
}

// Two ranks of one node, each with the thread that drives it.
class TwoRunners : public testing::Test {
 protected:
  TwoRunners() : network_(2) {
    for (Rank r = 0; r < 2; ++r) {
      engines_.push_back(make_engine({}, test_topology(r, 2, 2), network_.channel(r)));
      runners_.push_back(
          std::make_unique<Runner>(*engines_.back(), network_.channel(r), runner_options_for(2)));
    }
  }
  Runner& operator[](std::size_t r) { return *runners_[r]; }
  /// The second rank comes too, and both end with the sum.
  void end(OpId first) {
    const OpId second = *(*this)[1].submit(sum(second_));
    expect_sums(first, second);
  }
  void expect_sums(OpId first, OpId second) {
    ASSERT_TRUE((*this)[0].wait(first, -1));
    ASSERT_TRUE((*this)[1].wait(second, -1));
    EXPECT_EQ(first_, wanted_);
    EXPECT_EQ(second_, wanted_);
  }
  std::mt19937_64 random_{32};
  std::vector<float> first_ = random_values<float>(random_, 5000);
  std::vector<float> second_ = random_values<float>(random_, 5000);

 private:
  const std::vector<float> wanted_ = reduced<float>(ReduceOp::kSum, {first_, second_});
  LoopbackNetwork network_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<Runner>> runners_;
};

TEST_F(TwoRunners, WhoIsAheadSleepsUntilTheOtherHasComeToo) {
  const OpId id = *(*this)[0].submit(sum(first_));
  std::atomic<int> looks{0};
  auto met = std::async(std::launch::async, [&] {
    return (*this)[0].give_way(id, 60 * kSecond, [&] {
      ++looks;
      return true;
    });
  });
  while (looks < 5) std::this_thread::yield();
  const OpId other = *(*this)[1].submit(sum(second_));
  EXPECT_TRUE(met.get());
  expect_sums(id, other);
  EXPECT_TRUE((*this)[0].give_way(id, 60 * kSecond, [] { return true; }));  // it was released
}

TEST_F(TwoRunners, WithACoreToSpareNobodySleeps) {
  const OpId id = *(*this)[0].submit(sum(first_));
  int looks = 0;
  EXPECT_FALSE((*this)[0].give_way(id, 60 * kSecond, [&] {
    ++looks;
    return false;
  }));
  EXPECT_EQ(looks, 1);
  end(id);
}

TEST_F(TwoRunners, AWaitInVainNamesWhomItWaitsFor) {
  const OpId id = *(*this)[0].submit(sum(first_));
  const auto waited = (*this)[0].wait(id, 5 * kMillisecond);
  EXPECT_EQ(waited.status().code(), Code::kTimeout);
  EXPECT_NE(waited.status().message().find("waits for rank 1"), std::string::npos)
      << waited.status().message();
  end(id);
}

TEST_F(TwoRunners, PatienceEnds) {
  const OpId id = *(*this)[0].submit(sum(first_));
  const auto began = std::chrono::steady_clock::now();
  EXPECT_FALSE((*this)[0].give_way(id, 5 * kMillisecond, [] { return true; }));
  EXPECT_GE(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(5));
  end(id);
}

TEST(RunnerOptions, CallersGiveTheirCoresAwayWhereNodesShareThem) {
  const int cores = usable_cores();
  const auto full = runner_options_for(cores);
  EXPECT_TRUE(full.yield && full.callers_yield);
  const auto shared = runner_options_for(0, cores);
  EXPECT_TRUE(!shared.yield && shared.callers_yield);
  const auto spare = runner_options_for(0, cores - 1);
  EXPECT_FALSE(spare.yield || spare.callers_yield);
}

}  // namespace
}  // namespace paceline::engine
