#include "plan/shape.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace paceline::plan {

std::vector<std::vector<Rank>> GroupShape::nodes() const {
  std::vector<std::vector<Rank>> out;
  std::unordered_map<int32_t, std::size_t> seen;
  for (Rank r = 0; r < size; ++r) {
    int32_t id = node_of.empty() ? 0 : node_of[static_cast<std::size_t>(r)];
    auto [at, fresh] = seen.emplace(id, out.size());
    if (fresh) out.emplace_back();
    out[at->second].push_back(r);
  }
  return out;
}

int GroupShape::node_count() const {
  std::vector<int32_t> ids = node_of;
  std::sort(ids.begin(), ids.end());
  auto distinct = std::unique(ids.begin(), ids.end()) - ids.begin();
  return std::max(1, static_cast<int>(distinct));
}

Members members(std::vector<Rank> ranks, Rank me) {
  Members m;
  m.ranks = std::move(ranks);
  auto at = std::find(m.ranks.begin(), m.ranks.end(), me);
  if (at != m.ranks.end()) m.mine = static_cast<int>(at - m.ranks.begin());
  return m;
}

Members node_order(const GroupShape& shape, Rank me) {
  std::vector<Rank> order;
  for (const auto& node : shape.nodes()) order.insert(order.end(), node.begin(), node.end());
  return members(std::move(order), me);
}

std::vector<std::vector<Rank>> inner_groups(const PlanRequest& request) {
  bool every_rank_encodes = request.codec.codec == Codec::kTopK && request.codec.inside_node;
  int size = every_rank_encodes ? 1 : request.inner_size;
  if (size == 0) return request.shape.nodes();
  std::vector<std::vector<Rank>> out;
  for (Rank r = 0; r < request.shape.size; ++r) {
    if (r % size == 0) out.emplace_back();
    out.back().push_back(r);
  }
  return out;
}

Levels levels(const PlanRequest& request, Rank me) {
  auto groups = inner_groups(request);
  Levels l;
  l.groups = static_cast<int>(groups.size());
  std::size_t smallest = SIZE_MAX;
  for (const auto& g : groups) smallest = std::min(smallest, g.size());
  l.rails = static_cast<int>(smallest);
  for (auto& g : groups) {
    if (std::find(g.begin(), g.end(), me) != g.end()) l.inner = members(g, me);
  }
  if (l.inner.mine >= l.rails) return l;
  std::vector<Rank> rail;
  rail.reserve(groups.size());
  for (const auto& g : groups) rail.push_back(g[static_cast<std::size_t>(l.inner.mine)]);
  l.rail = members(std::move(rail), me);
  return l;
}

namespace {

// Nodes with `root`'s first, and `root` first in it.
std::vector<std::vector<Rank>> rooted_nodes(const GroupShape& shape, Rank root) {
  auto nodes = shape.nodes();
  auto home = std::find_if(nodes.begin(), nodes.end(), [&](const auto& node) {
    return std::find(node.begin(), node.end(), root) != node.end();
  });
  std::rotate(nodes.begin(), home, nodes.end());
  auto at = std::find(nodes[0].begin(), nodes[0].end(), root);
  std::rotate(nodes[0].begin(), at, nodes[0].end());
  return nodes;
}

// Adds to `tree` the edges of a binomial tree over `ranks` (root first) that touch me.
void add_binomial(const std::vector<Rank>& ranks, Rank me, Tree& tree) {
  auto at = std::find(ranks.begin(), ranks.end(), me);
  if (at == ranks.end()) return;
  auto mine = static_cast<std::size_t>(at - ranks.begin());
  std::size_t reach = 1;  // the lowest set bit: my subtree's size
  while (reach < ranks.size() && (mine & reach) == 0) reach <<= 1;
  if (mine != 0) tree.parent = ranks[mine & (mine - 1)];
  for (std::size_t step = reach >> 1; step != 0; step >>= 1) {
    if (mine + step < ranks.size()) tree.children.push_back(ranks[mine + step]);
  }
}

}  // namespace

Tree node_tree(const GroupShape& shape, Rank root, Rank me) {
  auto nodes = rooted_nodes(shape, root);
  std::vector<Rank> firsts;
  firsts.reserve(nodes.size());
  for (const auto& node : nodes) firsts.push_back(node[0]);
  Tree tree;
  add_binomial(firsts, me, tree);
  for (const auto& node : nodes) add_binomial(node, me, tree);
  return tree;
}

Members chain_order(const GroupShape& shape, Rank root, Rank me) {
  std::vector<Rank> order;
  for (const auto& node : rooted_nodes(shape, root)) {
    order.insert(order.end(), node.begin(), node.end());
  }
  return members(std::move(order), me);
}

}  // namespace paceline::plan
