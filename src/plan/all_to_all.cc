// All-to-all of uneven blocks: at offset k every rank sends to the one k places on and receives
// from the one k places back, so that no rank is aimed at by two at once.
#include "plan/algorithms.h"

namespace paceline::plan {

void all_to_all(Builder& b) {
  const PlanRequest& request = b.request();
  auto n = static_cast<std::size_t>(b.size());
  auto me = static_cast<std::size_t>(b.me());
  std::vector<uint64_t> outgoing = request.send_counts;
  std::vector<uint64_t> incoming = request.receive_counts;
  if (incoming.empty()) {
    outgoing.assign(request.send_counts.begin() + static_cast<std::ptrdiff_t>(me * n),
                    request.send_counts.begin() + static_cast<std::ptrdiff_t>((me + 1) * n));
    for (std::size_t r = 0; r < n; ++r) incoming.push_back(request.send_counts[r * n + me]);
  }
  auto from = blocks(outgoing);
  auto into = blocks(incoming);
  // The pieces of a block follow from its own length: that is all both ends know.
  auto cut = [&](Span s) { return pieces(request, s, s.size()); };
  auto m = node_order(request.shape, b.me());
  for (int offset = 1; offset < m.size(); ++offset) {
    Rank to = m.at(m.mine + offset);
    Rank source = m.at(m.mine - offset);
    auto leaving = cut(from[static_cast<std::size_t>(to)]);
    for (std::size_t p = 0; p < leaving.size(); ++p) b.send(to, b.in(leaving[p]), p);
    auto coming = cut(into[static_cast<std::size_t>(source)]);
    for (std::size_t p = 0; p < coming.size(); ++p) b.receive(source, b.out(coming[p]), p);
  }
  b.copy(b.out(into[me]), b.in(from[me]));
}

}  // namespace paceline::plan
