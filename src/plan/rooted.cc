// Reduce, gather and scatter. A long reduction runs down the chain on which a broadcast would run
// up, a short one down its tree; partial sums on their way lie in scratch, for only the root has an
// output.
#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

void reduce_along(Builder& b, Rank parent, const std::vector<Rank>& children) {
  auto cut = pieces(b.request(), {0, b.request().count}, b.request().count);
  bool root = b.me() == b.request().root;
  constexpr std::size_t kWindows = 8;
  std::vector<Range> windows;
  auto window = [&](std::size_t p, uint64_t bytes) {
    // The first piece is the longest.
    if (windows.size() < kWindows && p == windows.size()) windows.push_back(b.scratch(bytes));
    Range at = windows[p % kWindows];
    at.bytes = bytes;
    return at;
  };
  for (std::size_t p = 0; p < cut.size(); ++p) {
    // Others' inputs are theirs: only the root may reduce in place.
    Range value = root ? b.in(cut[p]) : b.bytes_of(Buffer::kInput, cut[p]);
    if (!children.empty() || root) {
      Range sum = root ? b.out(cut[p]) : window(p, value.bytes);
      for (Rank child : children) {
        b.receive_reduce(child, sum, value, p);
        value = sum;
      }
      if (root) b.finish_sum(sum);
    }
    if (!root) b.send(parent, value, p);
  }
}

}  // namespace

void chain_reduce(Builder& b) {
  auto order = chain_order(b.request().shape, b.request().root, b.me());
  std::vector<Rank> children;
  if (order.mine + 1 < order.size()) children.push_back(order.at(order.mine + 1));
  reduce_along(b, order.mine == 0 ? -1 : order.at(order.mine - 1), children);
}

void tree_reduce(Builder& b) {
  Tree tree = node_tree(b.request().shape, b.request().root, b.me());
  reduce_along(b, tree.parent, {tree.children.rbegin(), tree.children.rend()});
}

void gather(Builder& b) {
  auto whole = blocks(b.request().counts);
  Rank root = b.request().root;
  Span mine = whole[static_cast<std::size_t>(b.me())];
  Range own = b.in({0, mine.size()});
  if (b.me() != root) {
    auto cut = pieces(b.request(), {0, mine.size()}, mine.size());
    for (std::size_t p = 0; p < cut.size(); ++p) b.send(root, b.in(cut[p]), p);
    return;
  }
  for (Rank offset = 1; offset < b.size(); ++offset) {
    Rank from = (root + offset) % b.size();
    Span block = whole[static_cast<std::size_t>(from)];
    auto cut = pieces(b.request(), block, block.size());
    for (std::size_t p = 0; p < cut.size(); ++p) b.receive(from, b.out(cut[p]), p);
  }
  b.copy(b.out(mine), own);
}

void scatter(Builder& b) {
  auto whole = blocks(b.request().counts);
  Rank root = b.request().root;
  Span mine = whole[static_cast<std::size_t>(b.me())];
  if (b.me() != root) {
    auto cut = pieces(b.request(), {0, mine.size()}, mine.size());
    for (std::size_t p = 0; p < cut.size(); ++p) b.receive(root, b.out(cut[p]), p);
    return;
  }
  for (Rank offset = 1; offset < b.size(); ++offset) {
    Rank to = (root + offset) % b.size();
    Span block = whole[static_cast<std::size_t>(to)];
    auto cut = pieces(b.request(), block, block.size());
    for (std::size_t p = 0; p < cut.size(); ++p) b.send(to, b.in(cut[p]), p);
  }
  b.copy(b.out({0, mine.size()}), b.in(mine));
}

}  // namespace paceline::plan
