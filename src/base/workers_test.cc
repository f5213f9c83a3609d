// Computations that several threads share.
#include "base/workers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

namespace paceline {
namespace {

TEST(Workers, EveryPartRunsOnceAndIsSeen) {
  for (const int threads : {1, 2, 5}) {
    Workers workers(threads);
    for (int round = 0; round < 300; ++round) {
      const int parts = round % 9;
      std::vector<int> calls(
          9, 0);  // each part writes its own: no atomics, so that a race is one for TSan too
      workers.run(parts, [&](int part) { calls[static_cast<std::size_t>(part)] += 1 + part; });
      for (int part = 0; part < 9; ++part)
        ASSERT_EQ(calls[static_cast<std::size_t>(part)], part < parts ? 1 + part : 0)
            << threads << " threads, part " << part << " of " << parts;
    }
  }
}

TEST(Workers, SaysHowManyThreadsHadWork) {
  Workers workers(3);
  EXPECT_EQ(workers.take_used(), 0);
  for (const int parts : {1, 2, 9, 0}) {
    workers.run(parts, [](int) {});
    EXPECT_EQ(workers.take_used(), std::min(parts, 3)) << parts;
  }
  workers.run(2, [](int) {});
  workers.run(1, [](int) {});
  EXPECT_EQ(workers.take_used(), 2) << "the most of both";
  EXPECT_EQ(workers.take_used(), 0);
}

TEST(Workers, HelpersTakeParts) {
  Workers workers(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::atomic<int> inside = 0;
  // Each part waits for two others to be there: it ends only if three threads are at it.
  workers.run(3, [&](int) {
    {
      std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    }
    ++inside;
    while (inside < 3) std::this_thread::yield();
  });
  EXPECT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen.count(std::this_thread::get_id()), 1U);
}

TEST(Workers, TheCallerWaitsForAPartThatAHelperHas) {
  const auto caller = std::this_thread::get_id();
  std::atomic<int> inside = 0;
  std::atomic<bool> is_back = false;
  bool waited = false;
  Workers workers(2);
  workers.run(2, [&](int) {
    ++inside;
    while (inside < 2) std::this_thread::yield();
    if (std::this_thread::get_id() == caller) return;
    // Long enough for a caller that does not wait to be back.
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    while (!is_back && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    waited = !is_back;
  });
  is_back = true;
  EXPECT_TRUE(waited);
}

TEST(Workers, CallersTakeTurns) {
  Workers workers(2);
  constexpr int kCallers = 4, kRounds = 200, kParts = 3;
  std::vector<std::vector<int>> counts(kCallers, std::vector<int>(kParts, 0));
  std::vector<std::thread> callers;
  for (auto& mine : counts)
    callers.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round)
        workers.run(kParts, [&](int part) { ++mine[static_cast<std::size_t>(part)]; });
    });
  for (auto& caller : callers) caller.join();
  for (const auto& mine : counts)
    EXPECT_EQ(std::accumulate(mine.begin(), mine.end(), 0), kRounds * kParts);
}

TEST(Workers, OneThreadStartsNone) {
  Workers workers(1);
  const auto here = std::this_thread::get_id();
  workers.run(4, [&](int) { EXPECT_EQ(std::this_thread::get_id(), here); });
}

}  // namespace
}  // namespace paceline
