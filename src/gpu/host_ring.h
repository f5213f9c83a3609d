// Pinned memory handed out in a ring, to operations in the order of their submission. Nobody waits here: who gets memory
// that an earlier operation used is told which, and waits for it where that costs nothing (on a stream).
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

namespace paceline::gpu {

class HostRing {
 public:
  explicit HostRing(uint64_t bytes = 0) : bytes_(bytes) {}

  struct Region {
    uint64_t offset = 0;
    uint64_t tenant = 0;  ///< the last earlier operation that used a part of it; 0: none
  };
  /// `bytes` must not be above size(); 0 gets a region that nobody waits for.
  Region take(uint64_t bytes, uint64_t sequence) {
    if (at_ + bytes > bytes_) at_ = 0;
    Region region{at_, 0};
    if (bytes == 0) return region;
    const uint64_t end = at_ + bytes;
    // Regions were handed out in order, so those in the way are the oldest. What the new one leaves of the last of them
    // still is its tenant's: whoever gets that next must wait for it, too.
    for (auto it = used_.begin(); it != used_.end();) {
      if (it->offset >= end || at_ >= it->end) {
        ++it;
        continue;
      }
      region.tenant = std::max(region.tenant, it->sequence);
      if (it->end > end) {
        it->offset = end;
        ++it;
      } else {
        it = used_.erase(it);
      }
    }
    used_.push_back({at_, end, sequence});
    at_ = end;
    return region;
  }
  [[nodiscard]] uint64_t size() const { return bytes_; }

 private:
  struct Used {
    uint64_t offset, end, sequence;
  };
  uint64_t bytes_;
  uint64_t at_ = 0;
  std::deque<Used> used_;
};

}  // namespace paceline::gpu
