// Thousands of jobs on networks that lose, repeat, reorder, delay and corrupt packets, that fall apart, and whose
// ranks die, also while they join: every join and every operation ends rightly, or with a sentence that says why, and
// in time.
//
// PACELINE_SIM_SEED=n replays one job exactly and says what it was.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "simulation/tasks.h"
#include "simulation/world.h"

namespace paceline::simulation {
namespace {

using engine::Operation;
using engine::OpId;
using plan::Collective;
using Trouble = Scenario::Trouble;

constexpr uint64_t kSeeds = 5200;
constexpr uint64_t kPerTest = 100;
constexpr uint64_t kMostSteps = 300'000;  // of the clock: more is a timer that is always due

struct Tally {
  wire::FakeCounts counts;
  uint64_t jobs = 0, right = 0, failed = 0, cuts = 0, mismatches = 0, absences = 0;
  /// Before all had joined; and failed joins of others that name the victim.
  uint64_t join_kills = 0, join_cuts = 0, joins_named = 0;
  /// Right ones of these kinds.
  uint64_t in_place = 0, coded = 0, grouped = 0, transfers = 0, rounded = 0, kept_back = 0,
           bf16 = 0;
  uint64_t barriers = 0, uneven = 0, typed = 0, averages = 0, named = 0;
  uint64_t bytes = 0, bools = 0, inner = 0;
};
Tally tally;  // NOLINT: of this process

class Job {
 public:
  explicit Job(uint64_t seed) : scenario_(draw(seed)), world_(scenario_) {}

  void run() {
    ++tally.jobs;
    if (scenario_.in_join) arrange_trouble(0);
    if (!world_.join(70 * kSecond)) return complain("the join hangs");
    check_joins();
    world_.start();
    begun_ = world_.now();
    groups_.resize(static_cast<std::size_t>(scenario_.size));
    for (Rank r : scenario_.group) {
      if (!world_.alive(r)) continue;
      auto made = world_[r].create_group(scenario_.group);
      if (!made) return complain("no group: " + made.status().to_string());
      groups_[index(r)] = *made;
    }
    if (!scenario_.in_join) arrange_trouble(begun_);
    tasks_ = make_tasks(scenario_);
    drive();
    check_results();
    if (healthy_) {
      check_residuals();
      leave();
    } else {
      linger();
    }
    check_untouched();
    collect();
  }
  [[nodiscard]] uint64_t fingerprint() const { return fingerprint_; }
  [[nodiscard]] const std::string& log() const { return log_; }

 private:
  static std::size_t index(Rank r) { return static_cast<std::size_t>(r); }
  static uint64_t first_key(std::size_t task) { return 1000 + 2 * task; }
  void complain(const std::string& what) {
    ADD_FAILURE() << "seed " << scenario_.seed << " (" << scenario_.size << " ranks, trouble "
                  << static_cast<int>(scenario_.trouble) << "): " << what
                  << "\nreplay: PACELINE_SIM_SEED=" << scenario_.seed << " simulation_test";
  }

  // Trouble meanwhile may end a join, by name. Who could not join ends, as a process would; who could goes on.
  void check_joins() {
    if (scenario_.in_join && scenario_.trouble_at < world_.now())
      ++(scenario_.trouble == Trouble::kKill ? tally.join_kills : tally.join_cuts);
    for (Rank r = 0; r < scenario_.size; ++r) {
      if (!world_.has_joined(r) || world_.join_status(r)) continue;
      check_join_failure(r, world_.join_status(r));
      world_.network().kill(r, world_.now());
    }
  }

  void check_join_failure(Rank r, const Status& why) {
    log_ += fmt::format("rank {} did not join: {}\n", r, why.to_string());
    if (!scenario_.in_join || !may_fail())
      return complain(fmt::format("rank {} did not join: {}", r, why.to_string()));
    if (why.code() != Code::kPeerLost && why.code() != Code::kTimeout)
      complain("another kind of failure: " + why.to_string());
    const Rank v = scenario_.victim;
    const auto& text = why.message();
    if (r == v && text.find("rank ") != std::string::npos) return;
    const bool is_named =
        text.find(fmt::format("rank {} (host {})", v, world_.host(v))) != std::string::npos ||
        text.find(fmt::format("rank {} of {} never came", v, scenario_.size)) != std::string::npos;
    if (!is_named) complain(fmt::format("rank {} does not name rank {}: {}", r, v, text));
    ++tally.joins_named;
  }

  void arrange_trouble(Time from) {
    Time at = from + scenario_.trouble_at;
    switch (scenario_.trouble) {
      case Trouble::kKill:
        world_.network().kill(scenario_.victim, at);
        break;
      case Trouble::kShortCut:
        ++tally.cuts;
        world_.network().partition({scenario_.victim}, at, at + kSecond);
        break;
      case Trouble::kLongCut:
        ++tally.cuts;
        world_.network().partition({scenario_.victim}, at, kNever);
        break;
      case Trouble::kMismatch:
        ++tally.mismatches;
        break;
      case Trouble::kAbsent:
        ++tally.absences;
        break;
      case Trouble::kNone:
        break;
    }
  }

  // Trouble after which operations may fail.
  [[nodiscard]] bool may_fail() const {
    return scenario_.trouble != Trouble::kNone && scenario_.trouble != Trouble::kShortCut;
  }

  void submit_due(Rank r) {
    for (std::size_t k = 0; k < tasks_.size(); ++k) {
      Task& t = tasks_[k];
      if (t.submitted_at[index(r)] != kNever) continue;
      // In order on every rank, but at times of its own.
      if (world_.now() < begun_ + t.submit_at[index(r)]) return;
      if (scenario_.trouble == Trouble::kAbsent && r == scenario_.victim && k + 1 == tasks_.size())
        return;
      if (std::find(t.members.begin(), t.members.end(), r) == t.members.end()) {
        t.submitted_at[index(r)] = world_.now();  // no affair of this rank's
        continue;
      }
      t.submitted_at[index(r)] = world_.now();
      auto id = t.kind == Task::Kind::kCollective ? submit(t, k, r) : transfer(t, k, r);
      if (!id && world_[r].health()) return complain("refused: " + id.status().to_string());
      t.ids[index(r)] = id ? *id : 0;
    }
  }

  Result<OpId> submit(Task& t, std::size_t k, Rank r) {
    Operation o;
    o.collective = t.collective;
    o.group = t.in_group ? groups_[index(r)] : engine::kWorld;
    o.dtype = t.dtype;
    o.op = t.op;
    o.count = t.count;
    if (t.collective == Collective::kAllToAll && !t.counts.empty()) {
      // A row of it leaves, a column comes.
      const auto n = t.members.size();
      const auto me = static_cast<std::size_t>(std::find(t.members.begin(), t.members.end(), r) -
                                               t.members.begin());
      for (std::size_t m = 0; m < n; ++m) {
        o.send_counts.push_back(t.counts[me * n + m]);
        o.receive_counts.push_back(t.counts[m * n + me]);
      }
    } else {
      o.counts = t.counts;
    }
    o.root = t.root;
    o.codec = t.codec;
    o.algorithm = t.algorithm;
    o.name = "task " + std::to_string(k);
    o.output = t.output[index(r)].data();
    o.input = t.in_place[index(r)] != 0 ? o.output : t.input[index(r)].data();
    if (scenario_.trouble == Trouble::kMismatch && r == scenario_.victim &&
        k + 1 == tasks_.size()) {
      o.count = t.count > 1 ? t.count - 1 : 0;
      if (t.count == 1) {
        o.dtype = t.dtype == DType::kUInt8 ? DType::kInt8 : DType::kUInt8;
        o.op = ReduceOp::kMax;
        o.codec = {};
        o.algorithm = plan::Algorithm::kAuto;
      }
      o.count = std::max<std::size_t>(o.count, 1);
    }
    if (t.keeps_back) {
      o.segments = {{first_key(k), 0, o.count / 3}, {first_key(k) + 1, 0, o.count - o.count / 3}};
    }
    return world_[r].submit(o, world_.now());
  }

  Result<OpId> transfer(Task& t, std::size_t k, Rank r) {
    const bool sends = t.kind == Task::Kind::kSend;
    const Rank n = scenario_.size;
    engine::Transfer x;
    x.peer = (r + (sends ? 1 : n - 1)) % n;
    x.data = sends ? t.input[index(r)].data() : t.output[index(r)].data();
    x.bytes = t.input[index(r)].size();
    x.name = "task " + std::to_string(k);
    return sends ? world_[r].send(x, world_.now()) : world_[r].receive(x, world_.now());
  }

  [[nodiscard]] bool finished() {
    for (Rank r = 0; r < scenario_.size; ++r) {
      if (!world_.alive(r)) continue;
      const bool healthy = world_[r].health().is_ok();
      for (auto& t : tasks_) {
        if (t.submitted_at[index(r)] == kNever) {
          bool never = scenario_.trouble == Trouble::kAbsent && r == scenario_.victim &&
                       &t == &tasks_.back();
          if (healthy && !never) return false;
          continue;
        }
        if (t.ids[index(r)] != 0 && world_[r].outcome(t.ids[index(r)]) == nullptr) return false;
      }
      // Ranks that disagree are found out, also by who has nothing to wait for.
      if (healthy && scenario_.trouble == Trouble::kMismatch) return false;
    }
    return true;
  }

  void drive() {
    // Time-out, inquiry, silence of a peer, and some.
    const Time limit = begun_ + scenario_.engine.default_timeout + 8 * kSecond;
    while (!finished()) {
      if (world_.now() > limit) return complain("hangs");
      if (++steps_ > kMostSteps) return complain(fmt::format("spins at {} ns", world_.now()));
      Time next = limit + 1;
      for (auto& t : tasks_) {
        for (Rank r = 0; r < scenario_.size; ++r) {
          if (t.submitted_at[index(r)] == kNever && begun_ + t.submit_at[index(r)] > world_.now())
            next = std::min(next, begun_ + t.submit_at[index(r)]);
        }
      }
      world_.step(next);
      for (Rank r = 0; r < scenario_.size; ++r) {
        if (world_.alive(r)) submit_due(r);
      }
      note_ends();
    }
  }

  void note_ends() {
    for (Task& t : tasks_) {
      for (Rank r = 0; r < scenario_.size; ++r) {
        const auto id = t.ids[index(r)];
        if (t.ended[index(r)] != 0 || id == 0 || !world_.alive(r)) continue;
        if (world_[r].outcome(id) == nullptr) continue;
        t.ended[index(r)] = 1;
        const auto is_there = [&](Rank m) { return t.submitted_at[index(m)] != kNever; };
        if (t.kind == Task::Kind::kCollective && t.collective == Collective::kBarrier &&
            world_[r].outcome(id)->status &&
            !std::all_of(t.members.begin(), t.members.end(), is_there))
          complain(fmt::format("rank {} is through a barrier that not all have reached", r));
        t.taken[index(r)] = t.output[index(r)];
      }
    }
  }

  // After a failure: what is still under way arrives.
  void linger() {
    const Time limit = world_.now() + 2 * kSecond;
    while (world_.now() < limit) {
      if (++steps_ > kMostSteps)
        return complain(fmt::format("spins after its failure, {} ns", world_.now()));
      world_.step(limit);
    }
  }

  // What has ended, rightly or not, leaves its buffers alone; and an input is read only.
  void check_untouched() {
    for (std::size_t k = 0; k < tasks_.size(); ++k) {
      const Task& t = tasks_[k];
      for (Rank r = 0; r < scenario_.size; ++r) {
        const auto at = index(r);
        if (!world_.alive(r)) continue;
        if (t.ended[at] != 0 && t.taken[at] != t.output[at])
          complain(fmt::format("rank {}: task {} was written to after its end", r, k));
        if (t.input[at] != t.given[at])
          complain(fmt::format("rank {}: task {}'s input was written to", r, k));
      }
    }
  }

  // What travelled and what stayed with any rank is what was put in.
  void check_residuals() {
    for (Rank r = 0; r < scenario_.size; ++r) world_[r].commit_residuals();
    for (std::size_t k = 0; k < tasks_.size(); ++k) {
      const Task& t = tasks_[k];
      if (!t.keeps_back || t.kind != Task::Kind::kCollective) continue;
      const auto first = index(t.members[0]);
      auto sum = floats_of(t.taken[first]);
      for (Rank r = 0; r < scenario_.size; ++r) {
        std::vector<float> rest(t.count);
        const std::span<float> all(rest);
        const auto cut = t.count / 3;
        if (!world_[r].read_residual(first_key(k), all.first(cut)) ||
            !world_[r].read_residual(first_key(k) + 1, all.subspan(cut)))
          return complain(fmt::format("rank {}: task {}'s residuals can't be read", r, k));
        for (std::size_t i = 0; i < t.count; ++i) sum[i] += rest[i];
      }
      if (sum != t.wanted[first])
        complain(fmt::format("task {}: what travelled and what stayed is not what was put in", k));
      ++tally.kept_back;
    }
  }

  void check_results() {
    for (Rank r = 0; r < scenario_.size; ++r) {
      if (!world_.alive(r)) {
        healthy_ = false;
        continue;
      }
      auto health = world_[r].health();
      if (!health) {
        healthy_ = false;
        log_ += fmt::format("rank {}: {}\n", r, health.to_string());
        if (!may_fail())
          complain(fmt::format("rank {} failed without cause: {}", r, health.to_string()));
        if (health.message().empty() || health.code() == Code::kInternal)
          complain("no proper sentence: " + health.to_string());
        if (health.message().find("rank ") == std::string::npos)
          complain("it names no rank: " + health.to_string());
        check_name(r, health);
      }
      for (std::size_t k = 0; k < tasks_.size(); ++k) {
        Task& t = tasks_[k];
        auto* outcome = t.ids[index(r)] == 0 ? nullptr : world_[r].outcome(t.ids[index(r)]);
        if (outcome == nullptr) continue;
        if (!outcome->status) {
          ++tally.failed;
          continue;
        }
        ++tally.right;
        // The one who differs may have had all it asked for, before the others found out.
        if (scenario_.trouble == Trouble::kMismatch && r == scenario_.victim &&
            k + 1 == tasks_.size())
          continue;
        if (t.kind == Task::Kind::kSend) continue;
        if (t.in_place[index(r)] != 0) ++tally.in_place;
        if (t.codec.codec != plan::Codec::kNone) ++tally.coded;
        if (t.codec.codec == plan::Codec::kBf16) ++tally.bf16;
        if (t.in_group) ++tally.grouped;
        if (t.kind == Task::Kind::kReceive) ++tally.transfers;
        if (t.is_rounded) ++tally.rounded;
        if (t.kind == Task::Kind::kCollective) {
          if (t.collective == Collective::kBarrier) ++tally.barriers;
          if (!t.counts.empty()) ++tally.uneven;
          if (t.op == ReduceOp::kAverage) ++tally.averages;
          if (t.dtype != DType::kFloat32) ++tally.typed;
          if (t.dtype == DType::kUInt8) ++tally.bytes;
          if (t.dtype == DType::kBool) ++tally.bools;
          if (t.collective == Collective::kAllReduce && scenario_.engine.inner_size > 0)
            ++tally.inner;
        }
        if (!is_right(t, r))
          complain(fmt::format("rank {}: task {} ({}, {} elements) is wrong", r, k,
                               plan::collective_name(t.collective), t.count));
      }
    }
  }

  // Whose end or silence it was is known on all others. (The one who was cut off may name any of them.)
  void check_name(Rank r, const Status& health) {
    if (scenario_.trouble != Trouble::kKill && scenario_.trouble != Trouble::kLongCut) return;
    if (health.code() != Code::kPeerLost || r == scenario_.victim) return;
    ++tally.named;
    // Or of one that could not join for its sake.
    bool is_named = false;
    for (Rank gone = 0; gone < scenario_.size; ++gone) {
      const bool has_gone = gone == scenario_.victim || (scenario_.in_join && !world_.alive(gone));
      is_named |=
          has_gone && health.message().find(fmt::format("rank {} (", gone)) != std::string::npos;
    }
    if (!is_named)
      complain(fmt::format("rank {} does not name rank {}: {}", r, scenario_.victim,
                           health.to_string()));
  }

  // Bit by bit what another rank has, where the numbers alone do not say what is right.
  [[nodiscard]] bool is_right(const Task& t, Rank r) {
    const auto& mine = t.output[index(r)];
    const auto& expected = t.expected[index(r)];
    const bool is_collective = t.kind == Task::Kind::kCollective;
    if (!is_collective || !(t.is_rounded || t.keeps_back)) return mine == expected;
    for (Rank other : t.members) {
      const auto* outcome =
          world_.alive(other) ? world_[other].outcome(t.ids[index(other)]) : nullptr;
      if (outcome != nullptr && outcome->status && t.output[index(other)] != mine) return false;
    }
    if (t.keeps_back) return true;
    const float close = t.codec.codec == plan::Codec::kNone   ? 1e-4F
                        : t.codec.codec == plan::Codec::kBf16 ? 0.8F  // three bits less
                                                              : 0.1F;
    const auto numbers = floats_of(mine);
    const auto& wanted = t.wanted[index(r)];
    return std::equal(numbers.begin(), numbers.end(), wanted.begin(),
                      [&](float a, float b) { return std::abs(a - b) < close; });
  }

  void leave() {
    const Time limit = world_.now() + 20 * kSecond;
    for (;;) {
      bool all = true;
      for (Rank r = 0; r < scenario_.size; ++r) all &= world_[r].finish(world_.now(), limit);
      if (all) break;
      if (++steps_ > kMostSteps)
        return complain(fmt::format("spins at the end, {} ns", world_.now()));
      if (world_.now() >= limit) return complain("the orderly end takes for ever");
      world_.step(limit);
    }
    for (Rank r = 0; r < scenario_.size; ++r) {
      // A cut that lasts, or a death, may come only now.
      if (!world_[r].health() && !may_fail())
        complain("the orderly end failed: " + world_[r].health().to_string());
    }
  }

  void collect() {
    fingerprint_ = world_.network().fingerprint();
    const auto& c = world_.network().counts();
    auto& sum = tally.counts;
    sum.sent += c.sent;
    sum.delivered += c.delivered;
    sum.lost += c.lost;
    sum.duplicated += c.duplicated;
    sum.reordered += c.reordered;
    sum.corrupted += c.corrupted;
    sum.delayed += c.delayed;
    sum.partitioned += c.partitioned;
    sum.killed += c.killed;
    sum.kills += c.kills;
    sum.refused += c.refused;
  }

  Scenario scenario_;
  World world_;
  std::vector<Task> tasks_;
  std::vector<engine::GroupId> groups_;  ///< by rank
  Time begun_ = 0;
  bool healthy_ = true;
  uint64_t steps_ = 0;
  uint64_t fingerprint_ = 0;
  std::string log_;
};

const char* chosen_seed() { return std::getenv("PACELINE_SIM_SEED"); }

class Simulation : public testing::TestWithParam<uint64_t> {};

TEST_P(Simulation, EndsRightOrByName) {
  if (chosen_seed() != nullptr) GTEST_SKIP() << "one seed was asked for";
  for (uint64_t k = 0; k < kPerTest; ++k) {
    Job(GetParam() * kPerTest + k).run();
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, Simulation, testing::Range<uint64_t>(0, kSeeds / kPerTest));

TEST(Replay, ASeedGivesTheSameRunAgain) {
  for (uint64_t seed : {1, 62, 75, 83, 90, 97, 175, 654, 1234}) {
    Job first(seed);
    Job second(seed);
    first.run();
    second.run();
    EXPECT_EQ(first.fingerprint(), second.fingerprint()) << "seed " << seed;
    EXPECT_EQ(first.log(), second.log());
  }
}

TEST(Replay, OneSeed) {
  if (chosen_seed() == nullptr) return;  // nothing was asked for, which is no test skipped
  Job job(std::strtoull(chosen_seed(), nullptr, 10));
  job.run();
  std::printf("seed %s: fingerprint %016llx\n%s", chosen_seed(),
              static_cast<unsigned long long>(job.fingerprint()), job.log().c_str());
}

// Says what was injected, and insists that all of it was, when enough jobs have run to expect so.
class Report : public testing::Environment {
 public:
  void TearDown() override {
    const auto& c = tally.counts;
    std::printf(
        "%llu jobs: %llu operations right, %llu failed by name; packets sent %llu, lost %llu, "
        "duplicated %llu, "
        "reordered %llu, corrupted %llu (refused %llu), delayed %llu, cut off %llu, of the dead "
        "%llu; ranks killed "
        "%llu, cuts %llu, mismatches %llu, absences %llu; right in place %llu, by codecs %llu "
        "(bf16 %llu), in "
        "groups %llu, transfers %llu, rounded %llu, of a part %llu, barriers %llu, uneven %llu, of "
        "other types %llu (uint8 %llu, bool %llu), averages %llu, with inner groups asked for "
        "%llu; losses that name the victim %llu; during the join: kills "
        "%llu, cuts %llu, "
        "failed joins that name the victim %llu\n",
        ull(tally.jobs), ull(tally.right), ull(tally.failed), ull(c.sent), ull(c.lost),
        ull(c.duplicated), ull(c.reordered), ull(c.corrupted), ull(c.refused), ull(c.delayed),
        ull(c.partitioned), ull(c.killed), ull(c.kills), ull(tally.cuts), ull(tally.mismatches),
        ull(tally.absences), ull(tally.in_place), ull(tally.coded), ull(tally.bf16),
        ull(tally.grouped), ull(tally.transfers), ull(tally.rounded), ull(tally.kept_back),
        ull(tally.barriers), ull(tally.uneven), ull(tally.typed), ull(tally.bytes),
        ull(tally.bools), ull(tally.averages), ull(tally.inner), ull(tally.named),
        ull(tally.join_kills), ull(tally.join_cuts), ull(tally.joins_named));
    if (tally.jobs < 500) return;
    for (auto n :
         {tally.right, tally.failed, c.lost, c.duplicated, c.reordered, c.corrupted, c.refused,
          c.delayed, c.partitioned, c.killed, c.kills, tally.cuts, tally.mismatches, tally.absences,
          tally.join_kills, tally.join_cuts, tally.joins_named})
      EXPECT_GT(n, 0U) << "a kind of fault was never injected";
    for (auto n : {tally.in_place, tally.coded, tally.bf16, tally.grouped, tally.transfers,
                   tally.rounded, tally.kept_back, tally.barriers, tally.uneven, tally.typed,
                   tally.averages, tally.named, tally.bytes, tally.bools, tally.inner})
      EXPECT_GT(n, 0U) << "a kind of operation was never right";
  }

 private:
  static unsigned long long ull(uint64_t n) { return n; }
};
[[maybe_unused]] auto* const report = testing::AddGlobalTestEnvironment(new Report);

}  // namespace
}  // namespace paceline::simulation
