// All-gather of uneven blocks, in pieces: by a ring, by direct exchange, or so that each block
// enters every other node once and is spread inside it.
#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

struct Blocks {
  std::vector<std::vector<Span>> cut;  ///< by rank
};

// This rank's block goes to its place in the output; the rest is communication.
Blocks place_own(Builder& b) {
  auto whole = blocks(b.request().counts);
  uint64_t total = whole.empty() ? 0 : whole.back().end;
  Blocks out;
  for (Span s : whole) out.cut.push_back(pieces(b.request(), s, total));
  return out;
}

Range own_piece(const Builder& b, const Blocks& blocks, std::size_t p) {
  const auto& mine = blocks.cut[static_cast<std::size_t>(b.me())];
  if (b.request().in_place) return b.out(mine[p]);
  uint64_t first = mine[0].begin;
  return b.in({mine[p].begin - first, mine[p].end - first});
}

void copy_own(Builder& b, const Blocks& blocks) {
  const auto& mine = blocks.cut[static_cast<std::size_t>(b.me())];
  for (std::size_t p = 0; p < mine.size(); ++p) b.copy(b.out(mine[p]), own_piece(b, blocks, p));
}

}  // namespace

void ring_all_gather(Builder& b) {
  auto m = node_order(b.request().shape, b.me());
  Blocks blocks = place_own(b);
  auto block = [&](int place) -> const std::vector<Span>& {
    return blocks.cut[static_cast<std::size_t>(m.at(place))];
  };
  for (int hop = 0; hop < m.size() - 1; ++hop) {
    const auto& leaving = block(m.mine - hop);
    for (std::size_t p = 0; p < leaving.size(); ++p) {
      b.send(m.at(m.mine + 1), hop == 0 ? own_piece(b, blocks, p) : b.out(leaving[p]), p);
    }
    const auto& coming = block(m.mine - hop - 1);
    for (std::size_t p = 0; p < coming.size(); ++p) {
      b.receive(m.at(m.mine - 1), b.out(coming[p]), p);
    }
  }
  copy_own(b, blocks);
}

void direct_all_gather_blocks(Builder& b) {
  auto m = node_order(b.request().shape, b.me());
  Blocks blocks = place_own(b);
  const auto& mine = blocks.cut[static_cast<std::size_t>(b.me())];
  for (int offset = 1; offset < m.size(); ++offset) {
    for (std::size_t p = 0; p < mine.size(); ++p) {
      b.send(m.at(m.mine + offset), own_piece(b, blocks, p), p);
    }
    Rank from = m.at(m.mine - offset);
    const auto& theirs = blocks.cut[static_cast<std::size_t>(from)];
    for (std::size_t p = 0; p < theirs.size(); ++p) b.receive(from, b.out(theirs[p]), p);
  }
  copy_own(b, blocks);
}

// Rank l of a node sends its block to one rank of every other node (the l-th, round the end), which
// spreads it.
void two_level_all_gather(Builder& b) {
  auto nodes = b.request().shape.nodes();
  auto count = nodes.size();
  std::size_t home = 0;
  std::size_t local = 0;
  for (std::size_t g = 0; g < count; ++g) {
    for (std::size_t l = 0; l < nodes[g].size(); ++l) {
      if (nodes[g][l] == b.me()) {
        home = g;
        local = l;
      }
    }
  }
  Blocks blocks = place_own(b);
  const auto& mates = nodes[home];
  const auto& mine = blocks.cut[static_cast<std::size_t>(b.me())];
  for (std::size_t offset = 1; offset < count; ++offset) {
    const auto& there = nodes[(home + offset) % count];
    for (std::size_t p = 0; p < mine.size(); ++p) {
      b.send(there[local % there.size()], own_piece(b, blocks, p), p);
    }
  }
  auto spread = [&](Rank source, Rank holder) {
    const auto& theirs = blocks.cut[static_cast<std::size_t>(source)];
    for (std::size_t p = 0; p < theirs.size(); ++p) {
      if (holder == b.me()) {
        if (source != b.me()) b.receive(source, b.out(theirs[p]), p);
        for (Rank mate : mates) {
          if (mate == b.me()) continue;
          b.send(mate, source == b.me() ? own_piece(b, blocks, p) : b.out(theirs[p]), p);
        }
      } else {
        b.receive(holder, b.out(theirs[p]), p);
      }
    }
  };
  for (Rank mate : mates) spread(mate, mate);
  for (std::size_t offset = 1; offset < count; ++offset) {
    const auto& there = nodes[(home + count - offset) % count];
    for (std::size_t l = 0; l < there.size(); ++l) spread(there[l], mates[l % mates.size()]);
  }
  copy_own(b, blocks);
}

}  // namespace paceline::plan
