// Rank 0's table against its contract: with every rank's names in an order of its own, each name is decided exactly
// as often as it was reported everywhere, never before, and differences are named.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "named_queue.h"

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

}  // namespace
}  // namespace paceline::agreement
