#include "simulation/world.h"

#include <algorithm>
#include <set>

namespace paceline::simulation {

Scenario draw(uint64_t seed) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ULL + 1);
  auto chance = [&](int percent) { return static_cast<int>(random() % 100) < percent; };
  auto up_to = [&](double most) { return most * static_cast<double>(random() % 1000) / 1000; };
  Scenario s;
  s.seed = seed;
  s.size = static_cast<Rank>(2 + random() % 4);
  s.slots = static_cast<int>(1 + random() % 2);
  s.operations = static_cast<int>(2 + random() % 3);
  auto& n = s.network;
  n.seed = seed + 1;
  n.latency = static_cast<Time>(20 + random() % 200) * kMicrosecond;
  if (chance(50)) n.jitter = static_cast<Time>(random() % 300) * kMicrosecond;
  if (chance(20)) n.bytes_per_second = 1e7;
  if (chance(50)) n.loss = up_to(0.08);
  if (chance(40)) n.duplicate = up_to(0.1);
  if (chance(40)) n.reorder = up_to(0.2);
  if (chance(40)) n.corrupt = up_to(0.05);
  if (chance(30)) n.delay = up_to(0.05);
  n.kill_is_noticed = chance(70);
  n.protocol.peer_timeout = 4 * kSecond;
  s.engine.default_timeout = 30 * kSecond;
  s.engine.piece_bytes = 4096;
  s.engine.lanes = static_cast<int>(1 + random() % 2);
  auto kind = random() % 100;
  using T = Scenario::Trouble;
  s.in_join = kind < 9;
  s.trouble = kind < 3    ? T::kKill
              : kind < 6  ? T::kShortCut
              : kind < 9  ? T::kLongCut
              : kind < 60 ? T::kNone
              : kind < 70 ? T::kKill
              : kind < 80 ? T::kShortCut
              : kind < 88 ? T::kLongCut
              : kind < 95 ? T::kMismatch
                          : T::kAbsent;
  s.victim = static_cast<Rank>(random() % static_cast<uint64_t>(s.size));
  // A join takes some of the network's latencies.
  s.trouble_at =
      static_cast<Time>(random() % 20'000) * (s.in_join ? n.latency / 4000 : kMicrosecond);
  for (Rank r = 0; r < s.size; ++r) s.group.push_back(r);
  std::shuffle(s.group.begin(), s.group.end(), random);
  s.group.resize(1 + random() % s.group.size());
  if (chance(30)) s.engine.inner_size = static_cast<int>(1 + random() % 4);
  return s;
}

World::World(const Scenario& scenario)
    : scenario_(scenario),
      network_(scenario.network),
      space_(std::make_shared<bootstrap::MemoryKeyValue::Space>()),
      ranks_(static_cast<std::size_t>(scenario.size)) {
  for (Rank r = 0; r < scenario.size; ++r) {
    auto& s = ranks_[index(r)];
    const auto host = this->host(r);
    s.space = std::make_shared<bootstrap::MemoryKeyValue>(space_);
    auto fake = network_.join(r, scenario.size, host);
    s.fake = fake.get();
    s.channel = std::move(fake);
    bootstrap::JoinSpec spec;
    spec.rank = r;
    spec.size = scenario.size;
    spec.self.rank = r;
    spec.self.host = host;
    spec.self.node_id = host;
    spec.self.pid = 1000 + r;
    spec.self.address = "fake=" + std::to_string(r);
    spec.prefix = "job/";
    spec.build = "simulation";
    spec.timeout = spec.deadline = 60 * kSecond;
    s.machine = std::make_unique<bootstrap::JoinMachine>(
        std::move(spec), *s.space, *s.channel,
        [channel = s.fake](Rank peer, const std::string&, const std::string& at) {
          channel->set_peer_host(peer, at);
          return Status();
        });
  }
}

World::~World() {
  for (auto& s : ranks_) s.engine.reset();
}

Time World::timer(RankState& s) const {
  if (s.engine) return s.engine->next_timer();
  return s.joined ? s.channel->next_timer() : s.machine->next_timer();
}

bool World::join(Time limit) {
  for (;;) {
    bool all = true;
    for (Rank r = 0; r < scenario_.size; ++r) all &= has_joined(r) || network_.is_dead(r);
    if (all) return true;
    if (now() > limit) return false;
    step(limit + kSecond);
  }
}

void World::start() {
  for (Rank r = 0; r < scenario_.size; ++r) {
    auto& s = ranks_[index(r)];
    if (!s.joined || !s.join) continue;
    s.engine = engine::make_engine(scenario_.engine, s.topology, *s.channel);
  }
}

void World::step(Time limit) {
  Time next = network_.next_event_time();
  for (Rank r = 0; r < scenario_.size; ++r) {
    if (!network_.is_dead(r)) next = std::min(next, timer(ranks_[index(r)]));
  }
  auto woken = network_.advance(std::clamp(next, now(), std::max(limit, now())));
  for (Rank r = 0; r < scenario_.size; ++r) {
    auto& s = ranks_[index(r)];
    if (network_.is_dead(r)) continue;
    if (timer(s) > now() && std::find(woken.begin(), woken.end(), r) == woken.end()) continue;
    if (s.engine) {
      s.engine->progress(now(), ended_);
    } else if (!s.joined) {
      if (!s.machine->progress(now())) continue;
      s.joined = true;
      s.join = s.machine->status();
      if (s.join) {
        s.topology = s.machine->take_topology();
        s.channel = std::make_unique<bootstrap::EarlyChannel>(std::move(s.channel),
                                                              s.machine->take_early());
      }
    } else {
      // It has joined, others have not: acknowledgements still have to leave.
      wire::Events events;
      s.channel->progress(now(), events);
    }
  }
}

}  // namespace paceline::simulation
