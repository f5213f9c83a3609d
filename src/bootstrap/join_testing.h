// Ranks as threads of one process that join by a store, as production does it over real sockets.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/testing/variables.h"
#include "bootstrap/join.h"
#include "bootstrap/kv_store.h"

namespace paceline::bootstrap::testing {

/// A store as a framework's: shared by threads.
struct SharedStore {
  std::mutex mutex;
  std::map<std::string, std::string> entries;
  std::map<std::string, int> asked;  ///< how often, of what is not there
  bool is_gone = false;

  paceline_store callbacks() {
    paceline_store store{};
    store.struct_size = sizeof(store);
    store.context = this;
    store.put = [](void* context, const char* key, const char* value, size_t bytes) {
      auto* self = static_cast<SharedStore*>(context);
      std::lock_guard lock(self->mutex);
      self->entries[key] = std::string(value, bytes);
      return 0;
    };
    store.get = [](void* context, const char* key, char* value, size_t capacity) -> long {
      auto* self = static_cast<SharedStore*>(context);
      std::lock_guard lock(self->mutex);
      if (self->is_gone) return -2;
      auto found = self->entries.find(key);
      if (found == self->entries.end()) {
        ++self->asked[key];
        return -1;
      }
      std::memcpy(value, found->second.data(), std::min(capacity, found->second.size()));
      return static_cast<long>(found->second.size());
    };
    return store;
  }
};

using paceline::testing::Variables;

inline Settings settings(const Variables& variables) {
  auto loaded = paceline::testing::load_settings(variables);
  EXPECT_TRUE(loaded) << loaded.status().message();
  return std::move(loaded).value();
}

using Outcome = Result<std::unique_ptr<Job>>;

/// Joins `present` ranks of a job of `size`, each in its thread; `variables(rank)` are their
/// settings.
inline std::map<Rank, Outcome> join_all(Rank size, const std::vector<Rank>& present,
                                        SharedStore* store,
                                        const std::function<Variables(Rank)>& variables,
                                        double timeout_s = 60, const std::string& prefix = "test") {
  std::map<Rank, Outcome> outcomes;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (Rank rank : present) {
    threads.emplace_back([&, rank] {
      auto table = settings(variables(rank));
      JoinOptions options;
      options.rank = rank;
      options.size = size;
      // Threads of one process share the count of joins: a prefix each would do in real processes.
      options.prefix = prefix;
      options.settings = &table;
      options.timeout_s = timeout_s;
      if (store != nullptr) options.store = std::make_shared<StoreKeyValue>(store->callbacks());
      auto outcome = join_as(options, 0);
      std::lock_guard lock(mutex);
      outcomes.emplace(rank, std::move(outcome));
    });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

inline Variables loopback(Rank) { return {{"PACELINE_INTERFACE", "lo"}}; }

inline std::vector<Rank> all(Rank size) {
  std::vector<Rank> ranks(static_cast<std::size_t>(size));
  for (Rank r = 0; r < size; ++r) ranks[static_cast<std::size_t>(r)] = r;
  return ranks;
}

/// Every rank sends random bytes to every other and checks what it got.
inline void exchange(std::map<Rank, Outcome>& jobs) {
  for (auto& [rank, job] : jobs)
    ASSERT_TRUE(job) << "rank " << rank << ": " << job.status().message();
  struct Transfer {
    std::vector<std::byte> out, in;
  };
  std::mt19937_64 random(17);
  auto size = static_cast<Rank>(jobs.size());
  std::map<std::pair<Rank, Rank>, Transfer> transfers;
  std::size_t left = 0;
  for (Rank a = 0; a < size; ++a) {
    for (Rank b = 0; b < size; ++b) {
      if (a == b) continue;
      auto& t = transfers[{a, b}];
      t.out.resize(1 + random() % 100000);
      for (auto& byte : t.out) byte = static_cast<std::byte>(random());
      t.in.resize(t.out.size());
      (*jobs.at(a))->channel->send(b, 5, 0, t.out, 1);
      (*jobs.at(b))->channel->receive(a, 5, 0, {.into = t.in.data(), .capacity = t.in.size()}, 2);
      left += 2;
    }
  }
  SteadyClock clock;
  Time deadline = clock.now() + 60 * kSecond;
  while (left > 0 && clock.now() < deadline) {
    for (auto& [rank, job] : jobs) {
      wire::Events events;
      (*job)->channel->progress(clock.now(), events);
      for (auto& completion : events.completions) {
        ASSERT_TRUE(completion.status.is_ok()) << completion.status.message();
        --left;
      }
    }
  }
  ASSERT_EQ(left, 0U);
  for (auto& [pair, t] : transfers) EXPECT_EQ(t.in, t.out);
}

/// As processes end: side by side, for a channel lingers until its peers have everything.
inline void leave(std::map<Rank, Outcome>& jobs) {
  std::vector<std::thread> threads;
  for (auto& entry : jobs) threads.emplace_back([&job = entry.second] { (*job)->channel.reset(); });
  for (auto& thread : threads) thread.join();
}

}  // namespace paceline::bootstrap::testing
