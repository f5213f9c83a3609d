// What the ranks of a node come together for, one operation after the other.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>

#include "gpu/node_page.h"

namespace paceline::gpu {

struct Operation;

/// Something for each kind of meeting.
template <class T>
struct ByMeeting : std::array<T, NodePage::kAll.size()> {
  T& operator[](NodePage::For what) { return this->at(static_cast<size_t>(what)); }
  const T& operator[](NodePage::For what) const { return this->at(static_cast<size_t>(what)); }
};

/// The pump's books of one kind.
struct NodeMeeting {
  using Operations = std::deque<std::shared_ptr<Operation>>;
  Operations to_ask;                ///< in order: this rank has not come to it, or has told nobody
  Operations asked;                 ///< in order: it has, and not all are known to have come
  std::atomic<bool> awaits{false};  ///< asked holds something
  uint64_t seen = 0;  ///< how far the page has shown all ranks to be; the pump thread's
};

}  // namespace paceline::gpu
