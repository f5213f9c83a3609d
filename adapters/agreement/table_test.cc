// Rank 0's table against its contract: with every rank's names in an order of its own, each name is decided exactly
// as often as it was reported everywhere, never before, and differences are named.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "table.h"

namespace paceline::agreement {
namespace {

TEST(Table, RandomOrdersDecideEveryNameOnceAllAreReady) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 50; ++round) {
    const int32_t size = 1 + static_cast<int32_t>(random() % 5);
    const int names = 1 + static_cast<int>(random() % 20);
    const int repeats = 1 + static_cast<int>(random() % 3);
    // Every rank reports every name `repeats` times, shuffled; the ranks' reports are interleaved at random.
    std::vector<std::vector<int>> reports(static_cast<std::size_t>(size));
    for (auto& mine : reports) {
      for (int n = 0; n < names * repeats; ++n) mine.push_back(n % names);
      std::shuffle(mine.begin(), mine.end(), random);
    }
    Table table(size);
    std::map<std::string, std::vector<int>> ready;  // by name: reports of each rank
    std::map<std::string, int> decided;
    for (int left = size * names * repeats; left > 0; --left) {
      std::size_t rank = random() % reports.size();
      while (reports[rank].empty()) rank = (rank + 1) % reports.size();
      const std::string name = std::to_string(reports[rank].back());
      reports[rank].pop_back();
      auto& counts = ready[name];
      counts.resize(static_cast<std::size_t>(size));
      ++counts[rank];
      auto decision = table.ready(static_cast<int32_t>(rank), name, "sum of float32 [1]");
      const int everywhere = *std::min_element(counts.begin(), counts.end());
      EXPECT_EQ(decision.has_value(), everywhere > decided[name]);
      if (!decision) continue;
      EXPECT_EQ(decision->name, name);
      EXPECT_EQ(decision->refusal, "");
      EXPECT_EQ(++decided[name], everywhere);
    }
    for (auto& [name, times] : decided) EXPECT_EQ(times, repeats);
    EXPECT_TRUE(table.waiting().empty());
  }
}

TEST(Table, DifferencesAreNamedAndTheNextOneIsJudgedAnew) {
  Table table(3);
  EXPECT_FALSE(table.ready(2, "w", "sum of float32 [3, 2]").has_value());
  EXPECT_FALSE(table.ready(0, "w", "sum of float32 [2, 3]").has_value());
  EXPECT_FALSE(table.ready(0, "w", "sum of float32 [4]").has_value());
  auto decision = table.ready(1, "w", "sum of float32 [2, 3]");
  ASSERT_TRUE(decision.has_value());
  EXPECT_EQ(decision->refusal,
            "'w' differs between ranks: sum of float32 [2, 3] on rank 0, sum of float32 [3, 2] on "
            "rank 2");
  EXPECT_FALSE(table.ready(1, "w", "sum of float32 [4]").has_value());
  decision = table.ready(2, "w", "sum of float32 [4]");
  ASSERT_TRUE(decision.has_value());
  EXPECT_EQ(decision->refusal, "");
}

TEST(Table, SaysWhoIsMissing) {
  Table table(3);
  (void)table.ready(1, "b", "x");
  (void)table.ready(0, "a", "x");
  (void)table.ready(1, "a", "x");
  EXPECT_EQ(table.waiting(), (std::vector<std::string>{"a (rank 2)", "b (rank 0, rank 2)"}));
}

TEST(Table, GivesUpAfterTheTimeoutAndNamesTheMissing) {
  Table table(3);
  (void)table.ready(0, "w", "x", 10);
  (void)table.ready(2, "w", "x", 11);
  (void)table.ready(0, "v", "x", 12);
  EXPECT_TRUE(table.expire(14.9, 5).empty());
  auto decisions = table.expire(15, 5);
  ASSERT_EQ(decisions.size(), 1U);
  EXPECT_EQ(decisions[0].name, "w");
  EXPECT_EQ(decisions[0].code, PACELINE_TIMEOUT);
  EXPECT_EQ(decisions[0].ranks, (std::vector<int32_t>{0, 2}));
  EXPECT_NE(decisions[0].refusal.find("all-reduce 'w' timed out after 5 s: rank 1 has not reached"),
            std::string::npos)
      << decisions[0].refusal;
  EXPECT_NE(decisions[0].refusal.find("PACELINE_TIMEOUT"), std::string::npos);
  EXPECT_EQ(table.waiting(), (std::vector<std::string>{"v (rank 1, rank 2)"}));
}

TEST(Table, ALateRankIsRefusedAndMeetsTheNextRoundNotBefore) {
  Table table(2);
  (void)table.ready(0, "w", "x", 0);
  (void)table.ready(0, "w", "x", 1);
  ASSERT_EQ(table.expire(5, 5).size(), 1U);  // the first; the second has a second left
  EXPECT_EQ(table.waiting(), (std::vector<std::string>{"w (rank 1)"}));
  auto late = table.ready(1, "w", "x", 5.5);
  ASSERT_TRUE(late.has_value());
  EXPECT_EQ(late->code, PACELINE_TIMEOUT);
  EXPECT_EQ(late->ranks, (std::vector<int32_t>{1}));
  EXPECT_NE(late->refusal.find("too late on rank 1"), std::string::npos) << late->refusal;
  auto second = table.ready(1, "w", "x", 5.6);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->code, PACELINE_OK);
  EXPECT_TRUE(second->ranks.empty());
  EXPECT_TRUE(table.expire(1e9, 5).empty());
}

TEST(Table, WhoLeavesIsNotWaitedForThenOrLater) {
  Table table(3);
  (void)table.ready(0, "w", "x");
  (void)table.ready(1, "own", "x");
  auto decisions = table.leave(1);
  ASSERT_EQ(decisions.size(), 1U);
  EXPECT_EQ(decisions[0].name, "w");
  EXPECT_EQ(decisions[0].code, PACELINE_UNAVAILABLE);
  EXPECT_EQ(decisions[0].ranks, (std::vector<int32_t>{0}));
  EXPECT_NE(decisions[0].refusal.find("rank 1 has shut down"), std::string::npos);
  auto later = table.ready(2, "w", "x");
  ASSERT_TRUE(later.has_value());
  EXPECT_EQ(later->ranks, (std::vector<int32_t>{2}));
  EXPECT_EQ(later->code, PACELINE_UNAVAILABLE);
  // What it had reported before still runs.
  (void)table.ready(0, "own", "x");
  auto own = table.ready(2, "own", "x");
  ASSERT_TRUE(own.has_value());
  EXPECT_EQ(own->code, PACELINE_OK);
  EXPECT_TRUE(table.waiting().empty());
}

}  // namespace
}  // namespace paceline::agreement
