// How the ranks of a node, and the threads of each on the wire, share the node's link: by what they have to send.
//
// With even parts (PACELINE_LINK_RATE) nobody is through early, as long as all begin together and none is held up. Whoever
// begins later, or had no processor for a while, has more left than the others at the end, sends it at its even part, and
// leaves the rest of the link idle meanwhile. So parts go by the bytes that wait: all are through together, and the parts'
// sum stays the link.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.h"
#include "gpu/node_page.h"

namespace paceline::gpu {

/// One rank's view. Not thread-safe: the pump's.
class LinkShare {
 public:
  /// Parts stay as they are for so long.
  static constexpr Time kEvery = 500 * kMicrosecond;
  /// Who has less than this fraction of the most counts as having so much: a short message is not stretched to the time of
  /// all others' long ones.
  static constexpr uint64_t kLeastOfMost = 4;

  /// page: where the `ranks` ranks of the node tell each other what waits; null: each has an even part, which its wires
  /// share by what waits. So it is, too, while a rank has written nothing there (it can't reach the page).
  LinkShare(NodePage* page, int rank, int ranks, int wires);

  /// waiting: bytes to send, by wire. Returns how many even parts each wire of this rank takes from now on (1: its own;
  /// all of the node's add up to their number), or nothing where that is about what it was.
  std::span<const double> deal(std::span<const uint64_t> waiting, Time now);

 private:
  void tell(std::span<const uint64_t> waiting);
  [[nodiscard]] bool all_have_told() const;

  NodePage* page_;
  int rank_, ranks_, wires_;
  Time dealt_at_ = 0;
  std::vector<uint64_t> told_;  ///< on the page
  std::vector<double> parts_;
};

}  // namespace paceline::gpu
