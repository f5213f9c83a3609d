#include "plan/hops.h"

#include <algorithm>
#include <tuple>

namespace paceline::plan {
namespace {

auto key(Rank peer, uint32_t slot) { return std::tuple(peer, slot); }

}  // namespace

Hops::Hops(const GroupShape& shape) : shape_(shape), ranks_(static_cast<std::size_t>(shape.size)) {}

void Hops::add(const Plan& plan) {
  Order& order = ranks_[static_cast<std::size_t>(plan.me)];
  for (uint32_t i = 0; i < plan.steps.size(); ++i) {
    const Step& s = plan.steps[i];
    order.after.insert(order.after.end(), s.after.begin(), s.after.end());
    order.begins.push_back(static_cast<uint32_t>(order.after.size()));
    const Message message{s.peer, s.slot, i};
    const bool sends = s.kind == StepKind::kSend;
    order.received.push_back(sends ? Message{} : message);
    if (sends) order.sent.push_back(message);
  }
  std::sort(order.sent.begin(), order.sent.end(), [](const Message& a, const Message& b) {
    return key(a.peer, a.slot) < key(b.peer, b.slot);
  });
}

uint32_t Hops::sender_of(const Message& received, Rank receiver) const {
  const auto& sent = ranks_[static_cast<std::size_t>(received.peer)].sent;
  const auto wanted = key(receiver, received.slot);
  const auto at =
      std::lower_bound(sent.begin(), sent.end(), wanted,
                       [](const Message& m, const auto& k) { return key(m.peer, m.slot) < k; });
  return at != sent.end() && key(at->peer, at->slot) == wanted ? at->step : kNoStep;
}

int Hops::longest() const {
  constexpr int kNotYet = -1;
  std::vector<std::vector<int>> hops;  // until a step has ended, by rank and step
  hops.reserve(ranks_.size());
  for (const Order& order : ranks_) hops.emplace_back(order.received.size(), kNotYet);
  const auto of = [&](Place p) -> int& { return hops[static_cast<std::size_t>(p.rank)][p.step]; };
  const auto node = [&](Rank r) {
    return shape_.node_of.empty() ? 0 : shape_.node_of[static_cast<std::size_t>(r)];
  };
  int longest = 0;
  std::vector<Place> open;  // each waits for what lies above it
  const auto settle = [&](Place p) {
    const Order& order = ranks_[static_cast<std::size_t>(p.rank)];
    int most = 0;
    bool is_known = true;
    const auto wait_for = [&](Place before, int more) {
      if (of(before) == kNotYet) {
        open.push_back(before);
        is_known = false;
      } else {
        most = std::max(most, of(before) + more);
      }
    };
    for (uint32_t i = order.begins[p.step]; i < order.begins[p.step + 1]; ++i)
      wait_for({p.rank, order.after[i]}, 0);
    if (const Message& m = order.received[p.step]; m.peer >= 0) {
      const int more = node(m.peer) == node(p.rank) ? 0 : 1;
      const uint32_t sender = sender_of(m, p.rank);
      if (sender == kNoStep) {
        most = std::max(most, more);
      } else {
        wait_for({m.peer, sender}, more);
      }
    }
    if (!is_known) return;
    of(p) = most;
    longest = std::max(longest, most);
  };
  for (Rank r = 0; r < shape_.size; ++r) {
    for (uint32_t i = 0; i < hops[static_cast<std::size_t>(r)].size(); ++i) {
      if (of({r, i}) == kNotYet) open.push_back({r, i});
      while (!open.empty()) {
        const std::size_t depth = open.size();
        const Place top = open.back();
        settle(top);
        if (open.size() == depth) open.pop_back();
      }
    }
  }
  return longest;
}

}  // namespace paceline::plan
