#include "engine/scratch.h"

#include <algorithm>
#include <cstdlib>

namespace paceline::engine {

ScratchPool::~ScratchPool() {
  for (auto& s : idle_) std::free(s.data);
  for (auto& s : lent_) std::free(s.data);
}

void ScratchPool::note_bucket(uint64_t bytes) {
  if (++noted_ > kRemembered) {
    noted_ = 1;
    largest_before_ = largest_;
    largest_ = 0;
  }
  largest_ = std::max(largest_, bytes);
  drop_idle();
}

uint64_t ScratchPool::bound(size_t pieces) const {
  const uint64_t largest = std::max(largest_, largest_before_);
  if (pieces <= 2) return std::max(floor_, largest + largest / 2);
  const uint64_t beside_others = 2 * largest - std::min(kOthers, 2 * largest);
  return std::max(floor_, std::min(largest, beside_others));
}

void ScratchPool::serve(bool several_groups) {
  floor_ = several_groups ? kFloorOfSeveral : kFloor;
  drop_idle();
}

void ScratchPool::forget_buckets() {
  noted_ = largest_ = largest_before_ = 0;
  for (const Scratch& s : idle_) {
    held_ -= s.bytes;
    std::free(s.data);
  }
  idle_.clear();
}

std::optional<Scratch> ScratchPool::acquire(uint64_t bytes, bool force) {
  if (bytes == 0) return Scratch{};
  bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  // The smallest idle piece that fits and wastes at most half of itself.
  auto best = idle_.end();
  for (auto it = idle_.begin(); it != idle_.end(); ++it) {
    if (it->bytes >= bytes && it->bytes <= 2 * bytes &&
        (best == idle_.end() || it->bytes < best->bytes))
      best = it;
  }
  if (best != idle_.end()) {
    Scratch found = *best;
    *best = idle_.back();
    idle_.pop_back();
    return lend(found);
  }
  if (loaned_ > 0 && loaned_ + bytes > bound(lent_.size() + 1) && !force) return std::nullopt;
  drop_idle(bytes);
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlign, bytes));
  if (data == nullptr) return Scratch{nullptr, bytes};
  held_ += bytes;
  high_water_ = std::max(high_water_, held_);
  return lend({data, bytes});
}

Scratch ScratchPool::lend(Scratch scratch) {
  loaned_ += scratch.bytes;
  lent_.push_back(scratch);
  return scratch;
}

void ScratchPool::release(Scratch scratch) {
  if (scratch.data == nullptr) return;
  loaned_ -= scratch.bytes;
  std::erase_if(lent_, [&](const Scratch& s) { return s.data == scratch.data; });
  idle_.push_back(scratch);
  drop_idle();
}

// Oldest first.
void ScratchPool::drop_idle(uint64_t bytes) {
  const size_t more = bytes > 0 ? 1 : 0;
  while (!idle_.empty() && held_ + bytes > bound(idle_.size() + lent_.size() + more)) {
    held_ -= idle_.front().bytes;
    std::free(idle_.front().data);
    idle_.erase(idle_.begin());
  }
}

}  // namespace paceline::engine
