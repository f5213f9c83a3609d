// The entries that may travel, in the order of their positions, while top-k passes over the buffer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "codec/codec.h"

namespace paceline::codec::topk {

/// Walks residual runs by ascending position in the concatenation of all runs.
class RestCursor {
 public:
  explicit RestCursor(std::span<const ResidualRun> runs) : runs_(runs) {}
  /// Where the rest of element `position` is stored. Positions ascend from call to call.
  float& at(uint64_t position) {
    while (position >= begin_ + runs_[run_].elements) begin_ += runs_[run_++].elements;
    return runs_[run_].after[position - begin_];
  }

 private:
  std::span<const ResidualRun> runs_;
  std::size_t run_ = 0;
  uint64_t begin_ = 0;
};

/// Memory for one encoder, kept from call to call: grows to about 8 bytes × (2 k + 16,384) + 4
/// bytes × samples.
template <class T>
class Scratch {
 public:
  T* room(std::size_t elements) {
    if (elements > size_) {
      memory_.reset();
      size_ = 0;  // if there is no memory, nobody is to be given what was there
      memory_ = std::make_unique_for_overwrite<T[]>(elements);
      size_ = elements;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<T[]> memory_;
  std::size_t size_ = 0;
};

/// What shrink() works with.
struct Leaving {
  Scratch<uint32_t> index;
  Scratch<float> value;
};

/// Keeps the `keep` largest of the entries that it is given: by magnitude, among equals the lower
/// position first. An entry that leaves goes back to the rest (after[position] = value).
class Candidates {
 public:
  /// `index` and `value` have `capacity` slots.
  Candidates(uint32_t* index, float* value, uint64_t capacity, uint64_t keep, Leaving& leaving)
      : index_(index), value_(value), capacity_(capacity), keep_(keep), leaving_(&leaving) {}

  /// Where new entries (of higher positions than all before) are put; then add() says how many.
  [[nodiscard]] uint32_t* index_end() const { return index_ + size_; }
  [[nodiscard]] float* value_end() const { return value_ + size_; }
  [[nodiscard]] uint64_t room() const { return capacity_ - size_; }
  void add(uint64_t entries) { size_ += entries; }

  [[nodiscard]] uint64_t size() const { return size_; }
  [[nodiscard]] std::span<const uint32_t> index() const { return {index_, size_}; }
  [[nodiscard]] std::span<const float> value() const { return {value_, size_}; }

  /// Drops all but the `keep` largest. Returns the threshold (bits of a magnitude) that a later
  /// entry must reach to have a chance: one above the smallest kept when there are `keep` of them,
  /// else 1.
  /// `floor`: bits that no entry lies below (a hint that saves time; 0 if unknown).
  uint32_t shrink(std::span<const ResidualRun> runs, uint32_t floor);
  /// Takes over `other`'s entries, in the order of positions. Room must suffice.
  void merge(const Candidates& other);

 private:
  uint32_t* index_;
  float* value_;
  uint64_t capacity_;
  uint64_t keep_;
  uint64_t size_ = 0;
  Leaving* leaving_;
};

}  // namespace paceline::codec::topk
