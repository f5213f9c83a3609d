// For tests: several engines in one process, and what collectives should give.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/loopback.h"

namespace paceline::engine {

inline bootstrap::Topology test_topology(Rank rank, Rank size, int slots) {
  bootstrap::Topology t;
  t.rank = rank;
  t.node_count = (size + slots - 1) / slots;
  for (Rank r = 0; r < size; ++r) {
    bootstrap::Member m;
    m.rank = r;
    m.node = r / slots;
    m.local_rank = r % slots;
    m.host = std::string("host-") + static_cast<char>('a' + m.node % 26);
    m.node_id = m.host;
    t.members.push_back(m);
  }
  return t;
}

/// `size` engines over a loopback network, driven in turns by one thread.
class Cluster {
 public:
  explicit Cluster(Rank size, int slots = 1, EngineOptions options = {}) : network_(size) {
    for (Rank r = 0; r < size; ++r)
      engines_.push_back(make_engine(options, test_topology(r, size, slots), network_.channel(r)));
    dead_.resize(static_cast<std::size_t>(size));
  }
  Engine& operator[](Rank r) { return *engines_[static_cast<std::size_t>(r)]; }
  LoopbackNetwork& network() { return network_; }
  [[nodiscard]] Rank size() const { return static_cast<Rank>(engines_.size()); }
  Time now = 0;

  void kill(Rank r) {
    dead_[static_cast<std::size_t>(r)] = 1;
    network_.kill(r);
  }
  /// The rank stops being driven, as under SIGSTOP.
  void freeze(Rank r) { dead_[static_cast<std::size_t>(r)] = 1; }

  /// Drives all ranks until `done`, moving the clock to the next timer when nothing else moves.
  /// False: the clock passed `limit`.
  bool drive(const std::function<bool()>& done, Time limit = 1000 * kSecond) {
    std::vector<OpId> ended;
    while (!done()) {
      bool moved = false;
      Time next = kNever;
      for (Rank r = 0; r < size(); ++r) {
        if (dead_[static_cast<std::size_t>(r)]) continue;
        moved |= (*this)[r].progress(now, ended);
      }
      if (moved) continue;
      for (Rank r = 0; r < size(); ++r) {
        if (!dead_[static_cast<std::size_t>(r)]) next = std::min(next, (*this)[r].next_timer());
      }
      now = next == kNever ? now + kMillisecond : std::max(now + 1, next);
      if (now > limit) return false;
    }
    return true;
  }
  /// Drives until the operations have ended on all ranks; expects success.
  void expect_ok(const std::vector<OpId>& ids) {
    ASSERT_TRUE(drive([&] {
      for (Rank r = 0; r < size(); ++r) {
        if ((*this)[r].outcome(ids[static_cast<std::size_t>(r)]) == nullptr) return false;
      }
      return true;
    })) << "operations hang";
    for (Rank r = 0; r < size(); ++r) {
      auto id = ids[static_cast<std::size_t>(r)];
      EXPECT_TRUE((*this)[r].outcome(id)->status) << (*this)[r].outcome(id)->status.to_string();
      (*this)[r].forget(id);
    }
  }

 private:
  LoopbackNetwork network_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<uint8_t> dead_;
};

template <class T>
std::vector<T> random_values(std::mt19937_64& random, std::size_t n, int low = -50, int high = 50) {
  std::uniform_int_distribution<int> pick(low, high);
  std::vector<T> out(n);
  for (auto& v : out) v = static_cast<T>(pick(random));
  return out;
}

template <class T>
T apply(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return static_cast<T>(a * b);
    default:
      return static_cast<T>(a + b);
  }
}

/// What the reduction over `inputs` gives, element by element.
template <class T>
std::vector<T> reduced(ReduceOp op, const std::vector<std::vector<T>>& inputs) {
  auto out = inputs[0];
  for (std::size_t r = 1; r < inputs.size(); ++r) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = apply(op, out[i], inputs[r][i]);
  }
  if (op == ReduceOp::kAverage) {
    for (auto& v : out) v = static_cast<T>(v / static_cast<T>(inputs.size()));
  }
  return out;
}

}  // namespace paceline::engine
