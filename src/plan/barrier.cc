// Dissemination barrier: in round k every rank tells the one 2^k places on that all before it have
// come; after ⌈log2 n⌉ rounds everybody has heard of everybody (D. Hensgen, R. Finkel and U.
// Manber, 1988).
#include "plan/algorithms.h"

namespace paceline::plan {

void barrier(Builder& b) {
  auto m = node_order(b.request().shape, b.me());
  if (m.size() == 1) return;
  Range token = b.scratch(1);
  b.zero(token);
  std::vector<uint32_t> heard;
  for (int distance = 1; distance < m.size(); distance *= 2) {
    for (uint32_t step : heard) b.wait_for(step);
    b.send(m.at(m.mine + distance), token);
    heard.push_back(b.receive(m.at(m.mine - distance), b.scratch(1)));
  }
}

}  // namespace paceline::plan
