// join() where ranks are started again and the place where they meet lives on, over real sockets: one thread a rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/join_testing.h"

namespace paceline::bootstrap {
namespace {

using namespace bootstrap::testing;

/// A store that lives on, as that of torchrun's agents, when ranks are started again.
TEST(Join, RanksThatAreStartedAgainFindEachOtherWhateverWasLeft) {
  SharedStore store;
  std::string first_id;
  for (int start = 0; start < 3; ++start) {
    auto jobs = join_all(4, all(4), &store, loopback);
    exchange(jobs);
    EXPECT_NE((*jobs.at(0))->id, first_id);
    first_id = (*jobs.at(0))->id;
    leave(jobs);
  }
}

/// A job that is started again, long after the start that stands in the store; rank 0 comes once the others have tried that.
std::map<Rank, Outcome> start_again(SharedStore& store, Rank size) {
  std::map<Rank, Outcome> jobs;
  const auto made = std::find_if(store.entries.begin(), store.entries.end(),
                                 [](const auto& e) { return e.first.ends_with("start/0"); });
  if (made == store.entries.end()) return jobs;
  made->second = "1000000";  // long before this process
  const std::string next = made->first.substr(0, made->first.size() - 1) + "1";
  std::mutex mutex;
  const auto join_some = [&](const std::vector<Rank>& ranks) {
    for (auto& [rank, job] : join_all(size, ranks, &store, loopback)) {
      std::lock_guard lock(mutex);
      jobs.emplace(rank, std::move(job));
    }
  };
  auto others = all(size);
  others.erase(others.begin());
  std::atomic<bool> given_up = false;
  std::thread early([&] {
    join_some(others);
    given_up = true;
  });
  // Each asks twice before it tries the old start, and again and again once that has led nowhere.
  for (int asked = 0; asked < 20 && !given_up; std::this_thread::yield()) {
    std::lock_guard lock(store.mutex);
    asked = store.asked[next];
  }
  if (!given_up) join_some({0});
  early.join();
  return jobs;
}

/// Elastic jobs are started again with fewer ranks or more.
TEST(Join, RanksThatComeBeforeRankZeroLeaveTheOldStartWhenItIsThere) {
  // Of six, rank 5 has another than rank 0 to ask, which comes anew as well.
  for (const auto& [before, size] :
       std::vector<std::pair<Rank, Rank>>{{4, 4}, {4, 3}, {4, 5}, {7, 6}}) {
    SharedStore store;
    auto first = join_all(before, all(before), &store, loopback);
    leave(first);
    auto jobs = start_again(store, size);
    ASSERT_EQ(jobs.size(), static_cast<std::size_t>(size))
        << jobs.begin()->second.status().message();
    exchange(jobs);
    leave(jobs);
  }
}

/// As that its ranks had other settings, which whoever starts them again may have mended.
TEST(Join, WhatEndedAnEarlierStartDoesNotEndTheNext) {
  SharedStore store;
  auto first = join_all(3, all(3), &store, [](Rank r) {
    auto variables = loopback(r);
    if (r == 2) variables["PACELINE_CODEC"] = "fp16";
    return variables;
  });
  for (auto& [rank, job] : first) EXPECT_EQ(job.status().code(), Code::kMismatch) << rank;
  ASSERT_TRUE(std::any_of(store.entries.begin(), store.entries.end(),
                          [](const auto& e) { return e.first.ends_with("/failed"); }));
  auto jobs = start_again(store, 3);
  ASSERT_EQ(jobs.size(), 3U) << jobs.begin()->second.status().message();
  exchange(jobs);
  leave(jobs);
}

TEST(Join, WhatALivingRankComplainsOfIsSaidAtOnce) {
  SharedStore store;
  auto first = join_all(2, all(2), &store, loopback);
  leave(first);
  std::map<Rank, Outcome> jobs;
  std::thread root([&] {
    auto variables = loopback(0);
    variables["PACELINE_CODEC"] = "fp16";
    auto joined = join_all(2, {0}, &store, [&](Rank) { return variables; });
    jobs.emplace(0, std::move(joined.at(0)));
  });
  // Rank 1 comes so late that it takes the start for an old one.
  for (bool made = false; !made; std::this_thread::yield()) {
    std::lock_guard lock(store.mutex);
    for (auto& [key, value] : store.entries) {
      if (!key.ends_with("start/1")) continue;
      value = "1000000";
      made = true;
    }
  }
  const auto began = std::chrono::steady_clock::now();
  auto late = join_all(2, {1}, &store, loopback);
  EXPECT_EQ(late.at(1).status().code(), Code::kMismatch) << late.at(1).status().message();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
  root.join();
  EXPECT_EQ(jobs.at(0).status().code(), Code::kMismatch) << jobs.at(0).status().message();
}

/// What it has put down, too: rank 1 takes a start for an old one whose rank 0 lives.
TEST(Join, ALivingRanksSizeIsTakenForItsLastWord) {
  SharedStore store;
  std::map<Rank, Outcome> jobs;
  std::thread root([&] { jobs.merge(join_all(2, {0}, &store, loopback, 30)); });
  for (bool made = false; !made; std::this_thread::yield()) {
    std::lock_guard lock(store.mutex);
    for (auto& [key, value] : store.entries) {
      if (key.ends_with("start/0")) value = "1000000";
      made = made || key.ends_with("/r0");
    }
  }
  const auto began = std::chrono::steady_clock::now();
  auto late = join_all(3, {1}, &store, loopback, 600);
  EXPECT_EQ(late.at(1).status().code(), Code::kMismatch) << late.at(1).status().message();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(60));
  root.join();
}

/// Who has found its parent, and waits for the whole table, hears of a newer start as well.
TEST(Join, WhoWaitsForTheTableOfAnOldStartHearsOfTheNewOne) {
  SharedStore store;
  std::map<Rank, Outcome> old;
  // Rank 0 of three greets rank 1, and both wait for rank 2, which never comes.
  std::thread root([&] { old.merge(join_all(3, {0}, &store, loopback, 8)); });
  std::map<Rank, Outcome> jobs;
  std::mutex mutex;
  const auto join_some = [&](const std::vector<Rank>& ranks) {
    for (auto& [rank, job] : join_all(3, ranks, &store, loopback)) {
      std::lock_guard lock(mutex);
      jobs.emplace(rank, std::move(job));
    }
  };
  std::thread waiting([&] { join_some({1}); });
  for (bool met = false; !met; std::this_thread::yield()) {
    std::lock_guard lock(store.mutex);
    for (const auto& [key, value] : store.entries) met = met || key.ends_with("0/r1");
  }
  const auto began = std::chrono::steady_clock::now();
  std::thread next_root([&] { join_some({0}); });
  for (bool made = false; !made; std::this_thread::yield()) {
    std::lock_guard lock(store.mutex);  // or rank 2 would be the old start's that has not come
    for (const auto& [key, value] : store.entries) made = made || key.ends_with("start/1");
  }
  join_some({2});
  waiting.join();
  next_root.join();
  exchange(jobs);
  leave(jobs);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(7));
  root.join();
  EXPECT_FALSE(old.at(0));
}

}  // namespace
}  // namespace paceline::bootstrap
