#include "codec/candidates.h"

#include <cassert>

#include "codec/rank_select.h"

namespace paceline::codec::topk {

namespace {

/// Rests lie far apart in memory: each is asked for some stores ahead.
void put_back(std::span<const ResidualRun> runs, std::span<const uint32_t> index,
              const float* value) {
  constexpr std::size_t kAhead = 16;
  RestCursor rest(runs);
  RestCursor ahead(runs);
  for (std::size_t i = 0; i < index.size(); ++i) {
    if (i + kAhead < index.size()) __builtin_prefetch(&ahead.at(index[i + kAhead]), 1);
    rest.at(index[i]) = value[i];
  }
}

}  // namespace

uint32_t Candidates::shrink(std::span<const ResidualRun> runs, uint32_t floor) {
  if (size_ < keep_) return 1;
  const RankSelect cut = rank_select(value(), keep_, floor);
  if (size_ == keep_) return cut.key + 1;
  uint64_t ties = keep_ - cut.above;  // entries equal to the cut that stay
  const uint64_t leaving = size_ - keep_;
  // Both lists are written for every entry and only one is advanced: no branch to mispredict.
  uint32_t* out_index = leaving_->index.room(leaving + 1);
  float* out_value = leaving_->value.room(leaving + 1);
  uint64_t kept = 0;
  uint64_t left = 0;
  for (uint64_t i = 0; i < size_; ++i) {
    const uint32_t position = index_[i];
    const float value = value_[i];
    const uint32_t key = magnitude_bits(value);
    const bool tie = key == cut.key && ties > 0;
    const bool stays = key > cut.key || tie;
    ties -= tie ? 1 : 0;
    index_[kept] = position;
    value_[kept] = value;
    out_index[left] = position;
    out_value[left] = value;
    kept += stays ? 1 : 0;
    left += stays ? 0 : 1;
  }
  assert(left == leaving);
  put_back(runs, {out_index, leaving}, out_value);
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
