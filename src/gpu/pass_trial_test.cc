#include "gpu/pass_trial.h"

#include <gtest/gtest.h>

#include <random>

namespace paceline::gpu {
namespace {

constexpr uint64_t kTrial = PassTrial::kFirst + PassTrial::kTurn * PassTrial::kTurns;

/// Passes of a job in which one takes `waiting` after a join that waited and `ahead` after one that did not.
class Job {
 public:
  Job(Time waiting, Time ahead) : waiting_(waiting), ahead_(ahead) {}
  /// How many of the next `passes` waited.
  int run(uint64_t passes) {
    int waited = 0;
    for (uint64_t i = 0; i < passes; ++i) {
      const bool waits = policy.usual(now_);
      waited += waits ? 1 : 0;
      now_ += (waits ? waiting_ : ahead_) + static_cast<Time>(random_() % 1000) * kMicrosecond;
      if (random_() % 10 == 0) now_ += kSecond;  // a checkpoint, a validation
    }
    return waited;
  }
  PassTrial policy;

 private:
  Time waiting_, ahead_;
  Time now_ = kSecond;
  std::mt19937 random_{5};
};

TEST(PassTrial, BothAreTriedInTurnAndTheFasterIsKept) {
  Job host_bound(100 * kMillisecond, 88 * kMillisecond);
  EXPECT_EQ(host_bound.run(PassTrial::kFirst), static_cast<int>(PassTrial::kFirst));
  EXPECT_EQ(host_bound.run(kTrial - PassTrial::kFirst),
            static_cast<int>(kTrial - PassTrial::kFirst) / 2);
  EXPECT_EQ(host_bound.run(500), 0);
  EXPECT_FALSE(host_bound.policy.chosen());
  EXPECT_NEAR(static_cast<double>(host_bound.policy.pass_usual()), 100.5e6, 1e6);
  EXPECT_NEAR(static_cast<double>(host_bound.policy.pass_other()), 88.5e6, 1e6);

  Job many_kernels(55 * kMillisecond, 57 * kMillisecond);
  many_kernels.run(kTrial);
  EXPECT_EQ(many_kernels.run(500), 500);
}

TEST(PassTrial, WhereNeitherIsFasterItWaits) {
  Job network_bound(480 * kMillisecond, 480 * kMillisecond);
  network_bound.run(kTrial);
  EXPECT_EQ(network_bound.run(500), 500);
}

// What is faster changes: with the batch, with other work on the host.
TEST(PassTrial, ItIsTriedAgain) {
  PassTrial policy;
  Time now = 0;
  const auto run = [&](uint64_t passes, Time waiting, Time ahead) {
    int waited = 0;
    for (uint64_t i = 0; i < passes; ++i) {
      const bool waits = policy.usual(now);
      waited += waits ? 1 : 0;
      now += waits ? waiting : ahead;
    }
    return waited;
  };
  run(kTrial + 10, 100, 80);
  EXPECT_EQ(run(PassTrial::kHold - 20, 100, 80), 0);
  run(20 + PassTrial::kTurn * PassTrial::kTurns, 80, 100);
  EXPECT_EQ(run(100, 80, 100), 100);
}

}  // namespace
}  // namespace paceline::gpu
