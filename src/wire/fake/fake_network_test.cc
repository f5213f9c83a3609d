#include "wire/fake/fake_network.h"

#include <gtest/gtest.h>

#include <random>

namespace paceline::wire {
namespace {

std::vector<std::byte> random_data(std::mt19937_64& random, std::size_t size) {
  std::vector<std::byte> data(size);
  for (auto& b : data) b = static_cast<std::byte>(random());
  return data;
}

/// Channels 0 … n-1 on one network and a driver that turns the clock.
struct Simulation {
  FakeNetwork network;
  std::vector<std::unique_ptr<FakeChannel>> channels;
  std::vector<Events> events;

  Simulation(FakeOptions options, Rank size)
      : network(options), events(static_cast<std::size_t>(size)) {
    for (Rank r = 0; r < size; ++r)
      channels.push_back(network.join(r, size, "host-" + std::to_string(r)));
  }
  FakeChannel& at(Rank r) { return *channels[static_cast<std::size_t>(r)]; }
  Events& of(Rank r) { return events[static_cast<std::size_t>(r)]; }
  bool run_until(const std::function<bool()>& done, Time limit) {
    Time end = after(network.now(), limit);
    while (!done()) {
      for (auto& c : channels) {
        if (!network.is_dead(c->rank()) && c->next_timer() <= network.now())
          c->progress(network.now(), of(c->rank()));
      }
      if (done()) return true;
      Time next = network.next_event_time();
      for (auto& c : channels) {
        if (!network.is_dead(c->rank())) next = std::min(next, c->next_timer());
      }
      if (next > end) return false;
      network.advance(std::max(next, network.now()));
    }
    return true;
  }
};

FakeOptions hostile(uint64_t seed) {
  FakeOptions o;
  o.seed = seed;
  o.jitter = 30 * kMicrosecond;
  o.loss = 0.05;
  o.duplicate = 0.05;
  o.reorder = 0.1;
  o.corrupt = 0.03;
  o.delay = 0.02;
  o.bytes_per_second = 125e6;
  return o;
}

struct Traffic {
  struct Message {
    Rank from, to;
    std::vector<std::byte> data, into;
  };
  std::vector<Message> messages;

  Traffic(Simulation& sim, uint64_t seed, int count, std::size_t longest) {
    std::mt19937_64 random(seed);
    Rank n = static_cast<Rank>(sim.channels.size());
    for (int i = 0; i < count; ++i) {
      Rank from = static_cast<Rank>(random() % static_cast<uint64_t>(n));
      Rank to = static_cast<Rank>(
          (from + 1 + static_cast<Rank>(random() % static_cast<uint64_t>(n - 1))) % n);
      auto data = random_data(random, random() % longest);
      std::vector<std::byte> into(data.size());
      messages.push_back({from, to, std::move(data), std::move(into)});
    }
    std::vector<std::size_t> posts;
    for (std::size_t i = 0; i < 2 * messages.size(); ++i) posts.push_back(i);
    std::shuffle(posts.begin(), posts.end(), random);
    for (auto p : posts) {
      auto& m = messages[p / 2];
      if (p % 2 == 0) sim.at(m.from).send(m.to, p / 2, 7, m.data, p);
      if (p % 2 == 1)
        sim.at(m.to).receive(m.from, p / 2, 7, {m.into.data(), nullptr, m.into.size()}, p);
      if (random() % 8 == 0)
        sim.run_until([] { return false; }, static_cast<Time>(random() % kMillisecond));
    }
  }
  bool all_done(Simulation& sim) const {
    std::size_t n = 0;
    for (auto& e : sim.events) n += e.completions.size();
    return n == 2 * messages.size();
  }
};

TEST(FakeNetwork, CarriesMessagesUnharmed) {
  FakeOptions o;
  Simulation sim(o, 3);
  Traffic traffic(sim, 5, 60, 50000);
  ASSERT_TRUE(sim.run_until([&] { return traffic.all_done(sim); }, 60 * kSecond));
  for (auto& m : traffic.messages) EXPECT_EQ(m.data, m.into);
  for (auto& e : sim.events) {
    for (auto& c : e.completions) EXPECT_TRUE(c.status.is_ok()) << c.status.to_string();
  }
}

TEST(FakeNetwork, EverythingArrivesOnAHostileNetwork) {
  FakeCounts total;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Simulation sim(hostile(seed), 4);
    sim.network.partition({0, 1}, 3 * kMillisecond, 60 * kMillisecond);
    Traffic traffic(sim, seed, 30, seed % 2 == 0 ? 60000 : 4000);
    ASSERT_TRUE(sim.run_until([&] { return traffic.all_done(sim); }, 120 * kSecond));
    for (auto& m : traffic.messages) ASSERT_EQ(m.data, m.into);
    for (auto& e : sim.events) {
      for (auto& c : e.completions) ASSERT_TRUE(c.status.is_ok()) << c.status.to_string();
      ASSERT_TRUE(e.losses.empty());
    }
    const auto& c = sim.network.counts();
    total.lost += c.lost;
    total.duplicated += c.duplicated;
    total.reordered += c.reordered;
    total.corrupted += c.corrupted;
    total.delayed += c.delayed;
    total.partitioned += c.partitioned;
    total.refused += c.refused;
  }
  for (uint64_t n : {total.lost, total.duplicated, total.reordered, total.corrupted, total.delayed,
                     total.partitioned, total.refused}) {
    EXPECT_GT(n, 100U);
  }
}

TEST(FakeNetwork, APartitionCutsBothWaysAndOnlyBetweenItsSides) {
  FakeOptions options;
  options.latency = kMillisecond;
  Simulation sim(options, 4);
  sim.network.partition({0, 1}, 0, 100 * kMillisecond);
  const std::vector<std::byte> note(3);
  const std::pair<Rank, Rank> within[] = {{0, 1}, {1, 0}, {2, 3}, {3, 2}};
  const std::pair<Rank, Rank> across[] = {{0, 2}, {2, 0}, {1, 3}, {3, 1}};
  for (auto [from, to] : within) sim.at(from).post_note(to, note);
  for (auto [from, to] : across) sim.at(from).post_note(to, note);
  const auto came = [&](std::size_t each) {
    return [&sim, each] {
      for (Rank r = 0; r < 4; ++r) {
        if (sim.of(r).notes.size() < each) return false;
      }
      return true;
    };
  };
  ASSERT_TRUE(sim.run_until(came(1), 50 * kMillisecond));
  EXPECT_FALSE(sim.run_until(came(2), 90 * kMillisecond));
  for (Rank r = 0; r < 4; ++r) {
    EXPECT_EQ(sim.of(r).notes.size(), 1U) << r;
    EXPECT_EQ(sim.of(r).notes[0].peer / 2, r / 2) << r;
  }
  EXPECT_TRUE(sim.run_until(came(2), kSecond)) << "then what was sent again arrives";
}

TEST(FakeNetwork, NotesStayInOrder) {
  Simulation sim(hostile(99), 2);
  for (int i = 0; i < 400; ++i) {
    std::vector<std::byte> note(1 + static_cast<std::size_t>(i) % 50, static_cast<std::byte>(i));
    sim.at(0).post_note(1, note);
  }
  ASSERT_TRUE(sim.run_until([&] { return sim.of(1).notes.size() == 400; }, 60 * kSecond));
  for (std::size_t i = 0; i < 400; ++i)
    EXPECT_EQ(sim.of(1).notes[i].bytes[0], static_cast<std::byte>(i));
}

TEST(FakeNetwork, SameSeedSameEvents) {
  auto run = [](uint64_t seed) {
    Simulation sim(hostile(seed), 3);
    Traffic traffic(sim, 1, 20, 30000);
    EXPECT_TRUE(sim.run_until([&] { return traffic.all_done(sim); }, 60 * kSecond));
    return std::pair(sim.network.fingerprint(), sim.network.now());
  };
  auto first = run(11);
  EXPECT_EQ(first, run(11));
  EXPECT_NE(first, run(12));
}

TEST(FakeNetwork, KilledRankIsNamed) {
  for (bool noticed : {true, false}) {
    FakeOptions o = hostile(3);
    o.kill_is_noticed = noticed;
    o.protocol.peer_timeout = 2 * kSecond;
    Simulation sim(o, 3);
    std::vector<std::byte> data(500000);
    std::vector<std::byte> into(500000);
    sim.at(0).receive(1, 1, 0, {into.data(), nullptr, into.size()}, 1);
    sim.at(1).send(0, 1, 0, data, 2);
    sim.at(2).receive(1, 1, 0, {into.data(), nullptr, 10}, 3);
    sim.network.kill(1, 500 * kMicrosecond);
    ASSERT_TRUE(sim.run_until(
        [&] { return !sim.of(0).completions.empty() && !sim.of(2).completions.empty(); },
        30 * kSecond));
    EXPECT_LT(sim.network.now(), (noticed ? 2 : 4) * kSecond);
    for (Rank r : {0, 2}) {
      ASSERT_EQ(sim.of(r).losses.size(), 1U);
      EXPECT_EQ(sim.of(r).losses[0].peer, 1);
      EXPECT_EQ(sim.of(r).completions[0].status.code(), Code::kPeerLost);
      EXPECT_NE(sim.of(r).completions[0].status.message().find("rank 1 (host host-1)"),
                std::string::npos);
    }
    // Later requests fail the same way, at once.
    sim.at(0).send(1, 9, 0, data, 4);
    Events events;
    sim.at(0).progress(sim.network.now(), events);
    ASSERT_EQ(events.completions.size(), 1U);
    EXPECT_EQ(events.completions[0].status.code(), Code::kPeerLost);
  }
}

TEST(FakeNetwork, AbortEndsRequestsAndTouchesNoBuffer) {
  FakeOptions o;
  o.bytes_per_second = 10e6;
  Simulation sim(o, 2);
  std::vector<std::byte> data(1000000, std::byte{1});
  std::vector<std::byte> into(1000000, std::byte{0});
  sim.at(0).send(1, 1, 0, data, 1);
  sim.at(1).receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
  sim.run_until([] { return false; }, 30 * kMillisecond);
  sim.at(1).abort({Code::kAborted, "the test says so"});
  sim.at(1).progress(sim.network.now(), sim.of(1));
  ASSERT_EQ(sim.of(1).completions.size(), 1U);
  EXPECT_EQ(sim.of(1).completions[0].status.code(), Code::kAborted);
  std::vector<std::byte> frozen = into;
  // The sender learns that its message has no receiver any more; notes still travel.
  sim.at(1).post_note(0, std::vector<std::byte>(3));
  ASSERT_TRUE(sim.run_until(
      [&] { return !sim.of(0).completions.empty() && !sim.of(0).notes.empty(); }, 10 * kSecond));
  EXPECT_EQ(sim.of(0).completions[0].status.code(), Code::kAborted);
  sim.run_until([] { return false; }, 3 * kSecond);
  EXPECT_EQ(into, frozen);
}

TEST(FakeNetwork, ThousandRanksOnATree) {
  FakeOptions o = hostile(1024);
  const Rank n = 1024;
  Simulation sim(o, n);
  // Every rank but 0 tells its parent; state only where somebody talks.
  for (Rank r = 1; r < n; ++r)
    sim.at(r).post_note((r - 1) / 2, std::vector<std::byte>(8, static_cast<std::byte>(r)));
  auto notes = [&] {
    std::size_t count = 0;
    for (auto& e : sim.events) count += e.notes.size();
    return count;
  };
  ASSERT_TRUE(sim.run_until([&] { return notes() == 1023; }, 10 * kSecond));
  for (Rank r = 0; r < n; ++r) EXPECT_LE(sim.at(r).session_count(), 3U);
}

}  // namespace
}  // namespace paceline::wire
