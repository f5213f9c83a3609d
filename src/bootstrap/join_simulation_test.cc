// The join of a thousand ranks in one process, over the simulated wire: rounds and memory are counted.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "bootstrap/join_machine.h"
#include "bootstrap/kv_store.h"
#include "bootstrap/starts.h"
#include "wire/fake/fake_network.h"

namespace paceline::bootstrap {
namespace {

struct Simulated {
  std::shared_ptr<KeyValue> space;
  std::optional<Starts> starts;
  std::unique_ptr<wire::FakeChannel> channel;
  std::unique_ptr<JoinMachine> machine;
  bool ended = false;
  Topology topology;
};

/// A rank that was started otherwise than the rest.
struct OddOne {
  Rank rank = -1;
  std::function<void(JoinSpec&)> change;
};

class Simulation {
 public:
  /// `outlives_ranks`: the space may hold an earlier start of the job, as torchrun's, so starts are numbered in it; all
  /// ranks but rank 0 look for the newest before rank 0 makes it.
  Simulation(Rank size, wire::FakeOptions options, std::set<Rank> absent = {},
             const OddOne& odd = {}, bool outlives_ranks = false)
      : network_(options), ranks_(static_cast<std::size_t>(size)) {
    for (Rank r = size - 1; r >= 0; --r) {
      if (absent.contains(r)) continue;
      auto& rank = ranks_[static_cast<std::size_t>(r)];
      auto host = "host-" + std::to_string(r / 8);
      rank.space = std::make_shared<MemoryKeyValue>(space_);
      rank.channel = network_.join(r, size, host);
      JoinSpec spec;
      spec.rank = r;
      spec.size = size;
      spec.self.host = host;
      spec.self.node_id = host;
      spec.self.pid = 1000 + r;
      spec.self.address = "fake=" + std::to_string(r);
      spec.prefix = "job/";
      if (outlives_ranks) spec.prefix = prefix_in_newest_start(rank, r);
      spec.build = "test";
      spec.settings = {{"codec", "none"}};
      spec.timeout = 60 * kSecond;
      spec.deadline = 60 * kSecond;
      if (r == odd.rank) odd.change(spec);
      rank.machine = std::make_unique<JoinMachine>(
          std::move(spec), *rank.space, *rank.channel,
          [channel = rank.channel.get()](Rank peer, const std::string&, const std::string& at) {
            channel->set_peer_host(peer, at);
            return Status();
          });
    }
  }

  /// Until all have ended; false when virtual time runs away.
  bool run() {
    while (true) {
      Time next = network_.next_event_time();
      bool all_ended = true;
      for (auto& rank : ranks_) {
        if (network_.is_dead(rank.channel ? rank.channel->rank() : -1)) continue;
        if (!rank.machine || rank.ended) {
          if (rank.channel) next = std::min(next, rank.channel->next_timer());
          continue;
        }
        all_ended = false;
        next = std::min(next, rank.machine->next_timer());
      }
      if (all_ended) return true;
      if (next > 300 * kSecond) return false;
      auto woken = network_.advance(std::max(next, network_.now()));
      std::set<Rank> due(woken.begin(), woken.end());
      for (Rank r = 0; r < static_cast<Rank>(ranks_.size()); ++r) {
        auto& rank = ranks_[static_cast<std::size_t>(r)];
        if (!rank.machine || network_.is_dead(r)) continue;
        if (rank.ended) {  // as an engine would: acknowledgements still have to leave
          wire::Events events;
          if (due.contains(r) || rank.channel->next_timer() <= network_.now())
            rank.channel->progress(network_.now(), events);
          continue;
        }
        if (!due.contains(r) && rank.machine->next_timer() > network_.now()) continue;
        if (rank.machine->progress(network_.now())) {
          rank.ended = true;
          finished_at_ = network_.now();
        }
      }
    }
  }

  Simulated& operator[](Rank r) { return ranks_[static_cast<std::size_t>(r)]; }
  [[nodiscard]] Time finished_at() const { return finished_at_; }
  [[nodiscard]] const MemoryKeyValue::Space& space() const { return *space_; }
  wire::FakeNetwork& network() { return network_; }

 private:
  static std::string prefix_in_newest_start(Simulated& rank, Rank r) {
    auto& starts = rank.starts.emplace(rank.space, "job/");
    if (r == 0) {
      EXPECT_TRUE(starts.begin().is_ok());
    } else {
      EXPECT_TRUE(starts.find_newest());
      rank.space = starts.watched();
    }
    return starts.prefix();
  }

  wire::FakeNetwork network_;
  std::shared_ptr<MemoryKeyValue::Space> space_ = std::make_shared<MemoryKeyValue::Space>();
  std::vector<Simulated> ranks_;
  Time finished_at_ = 0;
};

/// Depth of the 4-ary tree.
int depth(Rank size) {
  int levels = 0;
  for (Rank r = size - 1; r > 0; r = tree_neighbours(r, size).parent) ++levels;
  return levels;
}

TEST(JoinSimulation, AThousandRanksInLogarithmicRounds) {
  wire::FakeOptions options;
  options.protocol.eager_limit = 32 * 1024;  // as over TCP
  options.protocol.piece_bytes = 256 * 1024;
  options.protocol.eager_budget = 1024 * 1024;
  Time small = 0;
  for (Rank size : {2, 16, 128, 1024}) {
    Simulation simulation(size, options);
    ASSERT_TRUE(simulation.run());
    std::size_t most_sessions = 0;
    uint64_t most_bytes = 0;
    for (Rank r = 0; r < size; ++r) {
      ASSERT_TRUE(simulation[r].machine->status().is_ok())
          << simulation[r].machine->status().message();
      auto topology = simulation[r].machine->take_topology();
      ASSERT_EQ(topology.size(), size);
      ASSERT_EQ(topology.members[static_cast<std::size_t>(size - 1)].pid, 1000 + size - 1);
      ASSERT_EQ(topology.node_count, (size + 7) / 8);
      // Memory a rank: its table (n entries) and a connection a tree neighbour, whatever the size.
      EXPECT_LE(simulation[r].channel->session_count(), 5U);
      most_sessions = std::max(most_sessions, simulation[r].channel->session_count());
      const auto counters = simulation[r].channel->counters();
      most_bytes = std::max(most_bytes, counters.payload_sent + counters.payload_received);
      ASSERT_EQ(simulation[r].channel->session_count(),
                tree_neighbours(r, size).children.size() + (r > 0 ? 1U : 0U));
    }
    // The table, of some 52 bytes a member here, to or from each of at most five neighbours: what a rank can hold.
    EXPECT_LE(most_bytes, 300U * static_cast<uint64_t>(size));
    // A record a rank is put; a get a rank finds its parent, some more look for a failure.
    EXPECT_EQ(simulation.space().puts, static_cast<uint64_t>(size));
    EXPECT_LE(simulation.space().gets, 8U * static_cast<uint64_t>(size));
    // Up and down the tree, at most three packets' latencies a level (announce, ready, message).
    Time bound = (3 + 6 * static_cast<Time>(depth(size))) * options.latency + 30 * kMillisecond;
    EXPECT_LE(simulation.finished_at(), bound) << size << " ranks";
    if (size == 2) small = simulation.finished_at();
    RecordProperty("microseconds_" + std::to_string(size),
                   static_cast<int>(simulation.finished_at() / kMicrosecond));
    RecordProperty("sessions_" + std::to_string(size), static_cast<int>(most_sessions));
    RecordProperty("bytes_a_member_" + std::to_string(size),
                   static_cast<int>(most_bytes / static_cast<uint64_t>(size)));
  }
  EXPECT_GT(small, 0);
}

TEST(JoinSimulation, ToNumberStartsCostsThemLittle) {
  constexpr Rank kSize = 1024;
  Simulation plain(kSize, wire::FakeOptions());
  Simulation numbered(kSize, wire::FakeOptions(), {}, {}, true);
  ASSERT_TRUE(plain.run());
  ASSERT_TRUE(numbered.run());
  for (Rank r = 0; r < kSize; ++r) {
    ASSERT_TRUE(numbered[r].machine->status().is_ok()) << numbered[r].machine->status().message();
    ASSERT_EQ(numbered[r].machine->take_topology().size(), kSize);
  }
  EXPECT_EQ(numbered.finished_at(), plain.finished_at());
  EXPECT_EQ(numbered.space().puts, plain.space().puts + 1) << "rank 0's start";
  // One finds the start, or that there is none yet, and a look for a newer one now and then; a join takes milliseconds.
  EXPECT_GT(numbered.space().gets, plain.space().gets + kSize);
  EXPECT_LE(numbered.space().gets, plain.space().gets + 3 * kSize);
}

TEST(JoinSimulation, UnderLossReorderingAndDuplication) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    wire::FakeOptions options;
    options.seed = seed;
    options.loss = 0.05;
    options.reorder = 0.05;
    options.duplicate = 0.05;
    options.corrupt = 0.02;
    options.jitter = 100 * kMicrosecond;
    Simulation simulation(64, options);
    ASSERT_TRUE(simulation.run()) << "seed " << seed;
    for (Rank r = 0; r < 64; ++r) {
      ASSERT_TRUE(simulation[r].machine->status().is_ok())
          << "seed " << seed << ": " << simulation[r].machine->status().message();
      ASSERT_EQ(simulation[r].machine->take_topology().size(), 64);
    }
    EXPECT_GT(simulation.network().counts().lost, 0U);
  }
}

TEST(JoinSimulation, AbsentRanksAreNamedByAllOthers) {
  wire::FakeOptions options;
  Simulation simulation(64, options, {7, 63});
  ASSERT_TRUE(simulation.run());
  for (Rank r = 0; r < 64; ++r) {
    if (r == 7 || r == 63) continue;
    auto& status = simulation[r].machine->status();
    EXPECT_EQ(status.code(), Code::kTimeout) << r;
    EXPECT_NE(status.message().find("ranks 7, 63"), std::string::npos) << status.message();
  }
}

/// All ranks end soon, and all with the same finding: both sides' words and the odd one's rank are in it.
void expect_all_told(const OddOne& odd, const std::vector<std::string>& words) {
  constexpr Rank kSize = 256;
  Simulation simulation(kSize, wire::FakeOptions(), {}, odd);
  ASSERT_TRUE(simulation.run());
  for (Rank r = 0; r < kSize; ++r) {
    auto& status = simulation[r].machine->status();
    EXPECT_EQ(status.code(), Code::kMismatch) << r << ": " << status.message();
    for (const auto& word : words)
      EXPECT_NE(status.message().find(word), std::string::npos) << word << ": " << status.message();
    EXPECT_NE(status.message().find("rank " + std::to_string(odd.rank)), std::string::npos)
        << status.message();
  }
  EXPECT_LT(simulation.finished_at(), 10 * kSecond)
      << "not at the time-out, but as soon as it is known";
}

std::string our_version() { return fmt::format("(wire {})", wire::kWireVersion); }

// A leaf of the tree, one with children, and the root.
class OddOneOut : public testing::TestWithParam<Rank> {};
INSTANTIATE_TEST_SUITE_P(JoinSimulation, OddOneOut, testing::Values(200, 3, 0));

TEST_P(OddOneOut, OneSettingThatDiffersEndsAllOfThemByName) {
  expect_all_told({GetParam(), [](JoinSpec& spec) { spec.settings["codec"] = "topk"; }},
                  {"codec is", "'topk'", "'none'"});
}

TEST_P(OddOneOut, AnotherBuildEndsAllOfThemByName) {
  expect_all_told({GetParam(), [](JoinSpec& spec) { spec.build = "other"; }},
                  {"test " + our_version(), "other " + our_version(), "install the same version"});
}

TEST_P(OddOneOut, AnotherWireVersionEndsAllOfThemByName) {
  expect_all_told({GetParam(), [](JoinSpec& spec) { spec.wire_version = 7; }},
                  {our_version(), "(wire 7)", "install the same version"});
}

TEST_P(OddOneOut, ALargerJobEndsAllOfThemByName) {
  expect_all_told({GetParam(), [](JoinSpec& spec) { spec.size = 300; }},
                  {"with 300", "with 256", "with the same size"});
}

TEST_P(OddOneOut, ASmallerJobEndsAllOfThemByName) {
  expect_all_told({GetParam(), [](JoinSpec& spec) { spec.size = 255; }},
                  {"with 255", "with 256", "with the same size"});
}

/// Rank `victim` of 32 dies before anybody can have the table: all others end by its name, and soon.
void expect_all_name(Rank victim, Time dies_at, bool is_noticed, Time soon) {
  constexpr Rank kSize = 32;
  wire::FakeOptions options;
  options.latency = 10 * kMillisecond;
  options.kill_is_noticed = is_noticed;
  Simulation simulation(kSize, options);
  simulation.network().kill(victim, dies_at);
  ASSERT_TRUE(simulation.run());
  const auto name = fmt::format("rank {} (host host-{})", victim, victim / 8);
  for (Rank r = 0; r < kSize; ++r) {
    if (r == victim) continue;
    auto& status = simulation[r].machine->status();
    EXPECT_FALSE(status.is_ok()) << r;
    EXPECT_NE(status.message().find(name), std::string::npos) << r << ": " << status.message();
  }
  EXPECT_LT(simulation.finished_at(), dies_at + soon) << victim;
}

TEST(JoinSimulation, AKilledRankEndsTheJoin) {
  // Before its greeting has come, after it, and with its table on the way.
  for (Time at : {5 * kMillisecond, 15 * kMillisecond, 25 * kMillisecond}) {
    for (Rank victim : {0, 1}) {
      expect_all_name(victim, at, true, 2 * kSecond);
      expect_all_name(victim, at, false, 12 * kSecond);
    }
  }
}

// Nobody is connected with it and nobody can miss it before the patience ends: then its parent knows, and tells.
TEST(JoinSimulation, ALeafThatDiedBeforeItsGreetingIsNamedByAll) {
  expect_all_name(31, 5 * kMillisecond, true, 62 * kSecond);
}

// Those that came first lose their patience first, and must not blame whom they happen to wait for.
TEST(JoinSimulation, WhoeverIsImpatientHearsOfTheMissingChild) {
  wire::FakeOptions options;
  options.latency = 10 * kMillisecond;
  Simulation simulation(32, options, {},
                        {2, [](JoinSpec& spec) { spec.deadline = spec.timeout = 20 * kSecond; }});
  simulation.network().kill(31, 5 * kMillisecond);  // below rank 7, on the other side of rank 0
  ASSERT_TRUE(simulation.run());
  for (Rank r = 0; r < 31; ++r) {
    const auto& text = simulation[r].machine->status().message();
    for (const char* words : {"after 20 s", "rank 31 (host host-3) (which has not connected)"})
      EXPECT_NE(text.find(words), std::string::npos) << r << ": " << text;
  }
  EXPECT_LT(simulation.finished_at(), 22 * kSecond);
}

}  // namespace
}  // namespace paceline::bootstrap
