// The interpreter finds what it is there to find.
#include <gtest/gtest.h>

#include "plan/plan_cases.h"

namespace paceline::plan {
namespace {

using testing::Interpreter;
using testing::Memory;
using testing::memory_for;

std::optional<std::string> verdict(const std::vector<Plan>& plans) {
  std::vector<Memory> memory;
  for (const Plan& plan : plans) {
    std::vector<std::byte> input(plan.request.count * 4);
    memory.push_back(memory_for(plan.request, static_cast<std::size_t>(plan.me), input));
  }
  return Interpreter(plans, memory, 1).run();
}

std::vector<Plan> ring_in_place() {
  PlanRequest q;
  q.algorithm = Algorithm::kRing;
  q.shape = {3, {0, 1, 2}};
  q.count = 48;
  q.in_place = true;
  std::vector<Plan> plans;
  for (Rank r = 0; r < 3; ++r) plans.push_back(*build(q, r));
  return plans;
}

TEST(Interpreter, FindsForgottenDependencies) {
  ASSERT_FALSE(verdict(ring_in_place()));
  std::size_t steps = ring_in_place()[1].steps.size();
  for (std::size_t i = 0; i < steps; ++i) {
    auto plans = ring_in_place();
    if (plans[1].steps[i].after.empty()) continue;
    plans[1].steps[i].after.clear();
    auto wrong = verdict(plans);
    ASSERT_TRUE(wrong) << "step " << i;
    EXPECT_NE(wrong->find("races"), std::string::npos);
  }
}

// Rank 1 sends its bytes back before it has got rank 0's, which it claims to have added.
TEST(Interpreter, FindsASumThatComesBeforeItsContribution) {
  PlanRequest q;
  q.algorithm = Algorithm::kDirect;
  q.shape = {2, {0, 1}};
  q.count = 2;
  q.in_place = true;
  const Range first{Buffer::kOutput, 0, 4}, second{Buffer::kOutput, 4, 4};
  std::vector<Plan> plans(2);
  for (Rank r = 0; r < 2; ++r) plans[static_cast<std::size_t>(r)].request = q;
  plans[1].me = 1;
  plans[0].steps = {{.kind = StepKind::kSend, .peer = 1, .src = first},
                    {.kind = StepKind::kReceive, .peer = 1, .dst = first, .brings_sum = true}};
  plans[1].steps = {{.kind = StepKind::kSend, .peer = 0, .src = second},
                    {.kind = StepKind::kReceive, .peer = 0, .dst = first}};
  bool found = false;
  for (uint64_t seed = 0; seed < 40 && !found; ++seed) {
    std::vector<Memory> memory(2, memory_for(q, 0, std::vector<std::byte>(8)));
    auto wrong = Interpreter(plans, memory, seed).run();
    found = wrong && wrong->find("the sum comes before step 0") != std::string::npos;
  }
  EXPECT_TRUE(found);
}

TEST(Interpreter, FindsMessagesThatDoNotMatch) {
  auto plans = ring_in_place();
  plans[1].steps.pop_back();  // the last receive
  EXPECT_TRUE(verdict(plans));
  plans = ring_in_place();
  plans[1].steps[0].src.bytes -= 4;
  EXPECT_TRUE(verdict(plans));
  plans = ring_in_place();
  plans[1].steps[0].slot = 1;
  EXPECT_TRUE(verdict(plans));
}

TEST(Interpreter, FindsReadsOfWhatWasNeverWritten) {
  auto plans = ring_in_place();
  plans[1].scratch_bytes = 64;
  plans[1].steps[0].src.buffer = Buffer::kScratch;
  plans[1].steps[0].src.offset = 0;
  EXPECT_TRUE(verdict(plans));
}

}  // namespace
}  // namespace paceline::plan
