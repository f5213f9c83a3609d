// The pass over memory at the heart of top-k: add two arrays, take out what is large.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline::cpu {

/// What add_select() writes beyond the last entry that it found: room for whole vectors.
inline constexpr std::size_t kSelectSlack = 64;

struct SelectInput {
  const float* gradient = nullptr;
  const float* addend =
      nullptr;  ///< added to the gradient first; null: zeros (always where residual is null)
  const float* residual = nullptr;  ///< null: zeros
  float* rest = nullptr;            ///< may be `gradient`, else nothing overlaps
  uint64_t elements = 0;
  uint32_t first_index = 0;
  uint32_t threshold = 1;  ///< bits of a magnitude, at least 1: zeros are never taken
  bool halves = false;     ///< what is taken travels as fp16 in units of 2^-half_exponent
  int half_exponent = 0;   ///< -126 to 126
  bool stream =
      false;  ///< stores to `rest` go round the cache: it won't be there when it is next read
};

struct Selected {
  uint64_t found = 0;  ///< entries appended
  uint32_t largest =
      0;  ///< bits of the largest |sum|; from 0x7F800000 on: an Inf or NaN was among them
};

/// With a[i] = (gradient[i] + addend[i]) + residual[i], and |a[i]| compared as the bits of a non-negative float: appends
/// (first_index + i, a[i]) for every |a[i]| >= threshold, in order of i. rest[i] is a[i] where that was not taken, and
/// where it was 0, or a[i] minus the fp16 number nearest to it. One pass: every array is read or written once.
/// `index` and `value` have room for elements + kSelectSlack.
Selected add_select(const SelectInput& input, uint32_t* index, float* value);

}  // namespace paceline::cpu
