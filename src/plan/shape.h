// How ranks are laid out for an algorithm.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace paceline::plan {

/// Some ranks in an order, and where this rank stands among them.
struct Members {
  std::vector<Rank> ranks;
  int mine = -1;  ///< -1: not among them
  [[nodiscard]] int size() const { return static_cast<int>(ranks.size()); }
  /// The rank `offset` places on, round the end.
  [[nodiscard]] Rank at(int place) const {
    int n = size();
    return ranks[static_cast<std::size_t>(((place % n) + n) % n)];
  }
};

Members members(std::vector<Rank> ranks, Rank me);
/// All ranks, node by node, so that a ring or a chain crosses every node's link once.
Members node_order(const GroupShape& shape, Rank me);
/// The inner groups of two-level plans: nodes, or blocks of inner_size consecutive ranks.
std::vector<std::vector<Rank>> inner_groups(const PlanRequest& request);

/// What two-level plans need: this rank's inner group, and its rail (the ranks with the same place
/// in each group). There are as many rails as the smallest group has ranks; ranks beyond own no
/// shard and no rail.
struct Levels {
  Members inner;
  Members rail;  ///< rail.mine is -1 beyond the last rail
  int rails = 1;
  int groups = 1;
};
Levels levels(const PlanRequest& request, Rank me);

/// A binomial tree over the nodes' first ranks and, below each, over the node's ranks; `root` is
/// first in its node.
struct Tree {
  Rank parent = -1;            ///< -1: the root
  std::vector<Rank> children;  ///< the deepest subtree first
};
Tree node_tree(const GroupShape& shape, Rank root, Rank me);
/// `root`, then its node, then the other nodes one after the other.
Members chain_order(const GroupShape& shape, Rank root, Rank me);

}  // namespace paceline::plan
