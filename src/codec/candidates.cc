#include "codec/candidates.h"

#include <bit>
#include <cassert>

#include "codec/rank_select.h"
#include "device/cpu/select.h"

namespace paceline::codec::topk {

uint32_t Candidates::shrink(std::span<const ResidualRun> runs) {
  if (size_ < keep_) return 1;
  thread_local Scratch<uint32_t> magnitudes;
  uint32_t* keys = magnitudes.room(size_);
  cpu::add_magnitudes(value_, nullptr, size_, keys);
  const RankSelect cut = rank_select({keys, size_}, keep_);
  if (size_ == keep_) return cut.key + 1;
  uint64_t ties = keep_ - cut.above;  // entries equal to the cut that stay
  RestCursor rest(runs);
  uint64_t kept = 0;
  for (uint64_t i = 0; i < size_; ++i) {
    bool stays = keys[i] > cut.key;
    if (keys[i] == cut.key && ties > 0) {
      stays = true;
      --ties;
    }
    if (stays) {
      index_[kept] = index_[i];
      value_[kept++] = value_[i];
    } else {
      rest.at(index_[i]) = value_[i];
    }
  }
  assert(kept == keep_);
  size_ = kept;
  return cut.key + 1;
}

void Candidates::merge(const Candidates& other) {
  assert(size_ + other.size_ <= capacity_);
  uint64_t mine = size_;
  uint64_t theirs = other.size_;
  uint64_t out = size_ + other.size_;
  size_ = out;
  while (theirs > 0) {
    const bool take_mine = mine > 0 && index_[mine - 1] > other.index_[theirs - 1];
    const uint64_t from = take_mine ? --mine : --theirs;
    --out;
    index_[out] = take_mine ? index_[from] : other.index_[from];
    value_[out] = take_mine ? value_[from] : other.value_[from];
  }
}

}  // namespace paceline::codec::topk
