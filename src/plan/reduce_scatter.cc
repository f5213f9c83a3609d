// Reduce-scatter of uneven blocks: rank r ends with the reduction of everybody's block r.
#include <algorithm>

#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

uint64_t total(const PlanRequest& request) {
  uint64_t sum = 0;
  for (uint64_t c : request.counts) sum += c;
  return sum;
}

/// Where this rank's result goes, given a part of its block in the whole buffer's elements.
Range result(const Builder& b, Span part, Span block) {
  if (b.request().in_place) return b.out(part);
  return b.out({part.begin - block.begin, part.end - block.begin});
}

}  // namespace

// The ring's reducing half. Partial sums on their way need a place beside the input, which is not
// ours to write: a few windows that are used again once their content has left.
void ring_reduce_scatter(Builder& b) {
  constexpr int kWindows = 4;
  auto m = node_order(b.request().shape, b.me());
  auto whole = blocks(b.request().counts);
  auto block = [&](int place) { return whole[static_cast<std::size_t>(m.at(place))]; };
  uint64_t longest = 0;
  for (Span s : whole) longest = std::max(longest, s.size());
  std::vector<Range> windows;
  if (!b.request().in_place && m.size() > 2) {
    for (int w = 0; w < kWindows; ++w) windows.push_back(b.scratch(b.in({0, longest}).bytes));
  }
  auto partial = [&](int hop, Span s, Span of) {
    if (b.request().in_place) return b.out(s);
    Range at = windows[static_cast<std::size_t>(hop % kWindows)];
    return Range{Buffer::kScratch, at.offset + b.in({of.begin, s.begin}).bytes, b.in(s).bytes};
  };
  int hops = m.size() - 1;
  for (int hop = 0; hop < hops; ++hop) {
    Span leaving = block(m.mine - 1 - hop);
    auto cut = pieces(b.request(), leaving, total(b.request()));
    for (std::size_t p = 0; p < cut.size(); ++p) {
      b.send(m.at(m.mine + 1), hop == 0 ? b.in(cut[p]) : partial(hop - 1, cut[p], leaving), p);
    }
    Span coming = block(m.mine - 2 - hop);
    cut = pieces(b.request(), coming, total(b.request()));
    for (std::size_t p = 0; p < cut.size(); ++p) {
      Range sum = hop == hops - 1 ? result(b, cut[p], coming) : partial(hop, cut[p], coming);
      b.receive_reduce(m.at(m.mine - 1), sum, b.in(cut[p]), p);
      if (hop == hops - 1) b.finish_sum(sum);
    }
  }
}

void direct_reduce_scatter_blocks(Builder& b) {
  auto m = node_order(b.request().shape, b.me());
  auto whole = blocks(b.request().counts);
  std::vector<Span> shards;
  for (Rank r : m.ranks) shards.push_back(whole[static_cast<std::size_t>(r)]);
  Span mine = whole[static_cast<std::size_t>(b.me())];
  direct_reduce_scatter(b, m, shards, From::kInput, flat_coding(b),
                        b.request().in_place ? 0 : mine.begin);
  for (Span piece : pieces(b.request(), mine, total(b.request()))) {
    b.finish_sum(result(b, piece, mine));
  }
}

namespace {

/// One block on its way through the two levels. In every node one rank collects the node's
/// contributions: in the owner's node the owner; elsewhere the rank with the owner's place in its
/// node, round the end.
class BlockReduction {
 public:
  BlockReduction(Builder& b, const std::vector<std::vector<Rank>>& nodes, std::size_t home)
      : b_(b), nodes_(nodes), home_(home) {}

  void run(std::size_t owner_node, std::size_t owner_place, Span block) {
    Rank owner = nodes_[owner_node][owner_place];
    const auto& mates = nodes_[home_];
    Rank collector = home_ == owner_node ? owner : mates[owner_place % mates.size()];
    Coding coding = flat_coding(b_);
    auto cut = pieces(b_.request(), block, total(b_.request()));
    for (std::size_t p = 0; p < cut.size(); ++p) {
      Range value = b_.in(cut[p]);
      if (collector != b_.me()) {
        send(collector, value, cut[p], p, coding);
        continue;
      }
      Range sum = owner == b_.me() ? result(b_, cut[p], block) : Range{};
      if (owner != b_.me() && mates.size() > 1) sum = b_.scratch(value.bytes);
      for (Rank mate : mates) {
        if (mate != b_.me()) value = add(mate, sum, value, p, coding);
      }
      if (owner != b_.me()) {
        send(owner, value, cut[p], p, coding);
        continue;
      }
      for (std::size_t offset = 1; offset < nodes_.size(); ++offset) {
        const auto& there = nodes_[(home_ + offset) % nodes_.size()];
        value = add(there[owner_place % there.size()], sum, value, p, coding);
      }
      b_.finish_sum(sum);
    }
  }

 private:
  void send(Rank to, Range value, Span elements, std::size_t p, Coding coding) {
    if (travels_encoded(b_, b_.me(), to, coding)) {
      Range code = b_.encoding(elements);
      b_.encode(code, value);
      value = code;
    }
    b_.send(to, value, p);
  }
  Range add(Rank from, Range sum, Range left, std::size_t p, Coding coding) {
    if (travels_encoded(b_, b_.me(), from, coding)) {
      b_.receive_decode_reduce(from, sum, left, p);
    } else {
      b_.receive_reduce(from, sum, left, p);
    }
    return sum;
  }

  Builder& b_;
  const std::vector<std::vector<Rank>>& nodes_;
  std::size_t home_;
};

}  // namespace

// Each node's sum of a block leaves the node once. Blocks of the next node go first, so that no two
// nodes aim at the same one; this node's own, which need no link, go last.
void two_level_reduce_scatter(Builder& b) {
  auto nodes = b.request().shape.nodes();
  auto whole = blocks(b.request().counts);
  std::size_t home = 0;
  for (std::size_t g = 0; g < nodes.size(); ++g) {
    if (std::find(nodes[g].begin(), nodes[g].end(), b.me()) != nodes[g].end()) home = g;
  }
  BlockReduction reduction(b, nodes, home);
  for (std::size_t offset = 1; offset <= nodes.size(); ++offset) {
    std::size_t g = (home + offset) % nodes.size();
    for (std::size_t place = 0; place < nodes[g].size(); ++place) {
      reduction.run(g, place, whole[static_cast<std::size_t>(nodes[g][place])]);
    }
  }
}

}  // namespace paceline::plan
