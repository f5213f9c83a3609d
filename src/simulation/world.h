// One simulated job: bootstrap and engine of every rank, as in production, over the fake wire and its virtual clock.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bootstrap/early_channel.h"
#include "bootstrap/join_machine.h"
#include "bootstrap/kv_store.h"
#include "engine/engine.h"
#include "wire/fake/fake_network.h"

namespace paceline::simulation {

/// Drawn from a seed: who takes part, what goes wrong, and when.
struct Scenario {
  uint64_t seed = 0;
  Rank size = 2;
  int slots = 1;
  wire::FakeOptions network;
  engine::EngineOptions engine;
  enum class Trouble {
    kNone,
    kKill,
    kShortCut,
    kLongCut,
    kMismatch,
    kAbsent
  } trouble = Trouble::kNone;
  Rank victim = 0;  ///< of the trouble
  Time trouble_at = 0;
  bool in_join = false;  ///< counted from its beginning; else from the first operation's
  int operations = 4;
  std::vector<Rank> group;  ///< some of the ranks, in any order: a group of its own
};
Scenario draw(uint64_t seed);

class World {
 public:
  explicit World(const Scenario& scenario);
  ~World();

  /// All ranks join that do not die before. False: virtual time ran away. A status that is not ok is a rank's own.
  bool join(Time limit);
  [[nodiscard]] const Status& join_status(Rank r) const { return ranks_[index(r)].join; }
  /// Its join has ended, well or not.
  [[nodiscard]] bool has_joined(Rank r) const { return ranks_[index(r)].joined; }
  [[nodiscard]] std::string host(Rank r) const {
    return "host-" + std::to_string(r / scenario_.slots);
  }
  /// Makes the engines of the ranks that have joined.
  void start();
  [[nodiscard]] bool alive(Rank r) const {
    return !network_.is_dead(r) && ranks_[index(r)].engine != nullptr;
  }
  engine::Engine& operator[](Rank r) { return *ranks_[index(r)].engine; }
  wire::FakeNetwork& network() { return network_; }
  [[nodiscard]] Time now() const { return network_.now(); }

  /// Moves to the next thing that happens, at most to `limit`.
  void step(Time limit);

 private:
  struct RankState {
    std::shared_ptr<bootstrap::MemoryKeyValue> space;
    wire::FakeChannel* fake = nullptr;
    std::unique_ptr<wire::Channel> channel;
    std::unique_ptr<bootstrap::JoinMachine> machine;
    bool joined = false;
    Status join;
    bootstrap::Topology topology;
    std::unique_ptr<engine::Engine> engine;
  };
  static std::size_t index(Rank r) { return static_cast<std::size_t>(r); }
  Time timer(RankState& s) const;

  Scenario scenario_;
  wire::FakeNetwork network_;
  std::shared_ptr<bootstrap::MemoryKeyValue::Space> space_;
  std::vector<RankState> ranks_;
  std::vector<engine::OpId> ended_;
};

}  // namespace paceline::simulation
