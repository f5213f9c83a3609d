// The gradient as top-k sees it: one rank's, or the sum of those of a node's ranks, which is made as it is read.
#pragma once

#include <cstdint>
#include <span>

#include "codec/codec.h"

namespace paceline::codec::topk {

/// A gradient and what is added to it. Thread-safe: it is only read.
class GradientSum {
 public:
  GradientSum(std::span<const float> gradient, std::span<const Addend> addends)
      : gradient_(gradient), addends_(addends) {}

  [[nodiscard]] uint64_t size() const { return gradient_.size(); }
  /// The gradient is all there is: no sum need be made.
  [[nodiscard]] bool is_plain() const { return addends_.empty(); }
  [[nodiscard]] const float* plain() const { return gradient_.data(); }

  /// Two arrays whose sum it is, of these elements; the second is null where the first is all. Where it takes more
  /// addends than one, or a part of one, the first is `scratch` (room for `elements`), made here.
  struct Terms {
    const float* first = nullptr;
    const float* second = nullptr;
  };
  [[nodiscard]] Terms terms(uint64_t first, uint64_t elements, float* scratch) const;
  /// out[i] = the sum at first + i: the gradient's element, then each addend's in their order, one rounding each.
  void make(uint64_t first, uint64_t elements, float* out) const;
  /// Asks for the memory of elements from `first` on, as many as a cache line holds.
  void prefetch(uint64_t first) const;

 private:
  [[nodiscard]] const float* only_addend(uint64_t first, uint64_t elements) const;

  std::span<const float> gradient_;
  std::span<const Addend> addends_;
};

}  // namespace paceline::codec::topk
