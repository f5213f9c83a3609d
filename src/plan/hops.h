// How often a collective crosses the network, one message after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace paceline::plan {

/// Matching plans of one request, of which only the order of their steps is kept: all that is in those of a thousand
/// ranks would be gigabytes.
class Hops {
 public:
  /// `shape` must outlive it.
  explicit Hops(const GroupShape& shape);
  void add(const Plan& plan);
  /// Messages between nodes on the longest chain in which each can leave only when the one before has come. Of a rank
  /// whose plan was not added nothing is known: its messages wait for none. What tells the sender of a long message that
  /// the receiver is ready for it is not counted: but for a chain's first it goes ahead.
  [[nodiscard]] int longest() const;

 private:
  struct Message {
    Rank peer = -1;
    uint32_t slot = 0;
    uint32_t step = 0;
  };
  /// One rank's. What step i waits for is after[begins[i]] to after[begins[i + 1]].
  struct Order {
    std::vector<uint32_t> begins{0};
    std::vector<uint32_t> after;
    std::vector<Message> received;  ///< by step; of no peer: it receives nothing
    std::vector<Message> sent;      ///< by peer and slot
  };
  struct Place {
    Rank rank;
    uint32_t step;
  };
  /// The step that sends it; kNoStep: not known.
  [[nodiscard]] uint32_t sender_of(const Message& received, Rank receiver) const;

  const GroupShape& shape_;
  std::vector<Order> ranks_;
};

}  // namespace paceline::plan
