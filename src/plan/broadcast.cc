// Broadcast: a pipelined chain for long buffers (every link carries the buffer once, whatever the
// number of nodes), a binomial tree for short ones. Both enter each node once; there, the first
// rank feeds the others.
#include <algorithm>

#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

struct Feed {
  Rank parent = -1;
  std::vector<Rank> children;
};

// A chain over the nodes' first ranks; a node's others hang on its first.
Feed chain_feed(const Builder& b) {
  const auto& shape = b.request().shape;
  auto order = chain_order(shape, b.request().root, b.me());
  std::vector<Rank> firsts;
  Rank my_first = -1;
  for (Rank r : order.ranks) {
    if (firsts.empty() || !b.same_node(firsts.back(), r)) firsts.push_back(r);
    if (b.same_node(r, b.me()) && my_first < 0) my_first = r;
  }
  Feed feed;
  if (my_first != b.me()) {
    feed.parent = my_first;
    return feed;
  }
  auto at = std::find(firsts.begin(), firsts.end(), b.me());
  if (at != firsts.begin()) feed.parent = *std::prev(at);
  if (std::next(at) != firsts.end()) feed.children.push_back(*std::next(at));
  for (Rank r : order.ranks) {
    if (r != b.me() && b.same_node(r, b.me())) feed.children.push_back(r);
  }
  return feed;
}

void broadcast(Builder& b, const Feed& feed) {
  auto cut = pieces(b.request(), {0, b.request().count}, b.request().count);
  bool root = b.me() == b.request().root;
  for (std::size_t p = 0; p < cut.size(); ++p) {
    Range value = root ? b.in(cut[p]) : b.out(cut[p]);
    if (!root) b.receive(feed.parent, value, p);
    for (Rank child : feed.children) b.send(child, value, p);
    if (root) b.copy(b.out(cut[p]), value);
  }
}

}  // namespace

void chain_broadcast(Builder& b) { broadcast(b, chain_feed(b)); }

void tree_broadcast(Builder& b) {
  Tree tree = node_tree(b.request().shape, b.request().root, b.me());
  broadcast(b, {tree.parent, tree.children});
}

}  // namespace paceline::plan
