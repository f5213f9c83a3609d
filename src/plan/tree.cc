// All-reduce up and down a binomial tree: 2 log2 n hops; each node's link carries the buffer a
// logarithmic number of times at most, most nodes' just once each way. For short buffers on many
// ranks of few nodes.
#include "plan/algorithms.h"

namespace paceline::plan {

void tree_all_reduce(Builder& b) {
  Tree tree = node_tree(b.request().shape, 0, b.me());
  auto cut = pieces(b.request(), {0, b.request().count}, b.request().count);
  for (std::size_t p = 0; p < cut.size(); ++p) {
    Range value = b.in(cut[p]);
    Range out = b.out(cut[p]);
    // The nearest subtree, the shallowest, is ready first.
    for (auto child = tree.children.rbegin(); child != tree.children.rend(); ++child) {
      b.receive_reduce(*child, out, value, p);
      value = out;
    }
    if (tree.parent >= 0) {
      b.send(tree.parent, value, p);
      b.receive(tree.parent, out, p);
    } else {
      b.copy(out, value);
      b.finish_sum(out);
    }
    for (Rank child : tree.children) b.send(child, out, p);
  }
}

}  // namespace paceline::plan
