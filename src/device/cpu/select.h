// The pass over memory at the heart of top-k: add two arrays, take out what is large.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline::cpu {

/// What add_select() writes beyond the last entry that it found: room for whole vectors.
inline constexpr std::size_t kSelectSlack = 64;

struct Selected {
  uint64_t found = 0;  ///< entries appended
  uint32_t largest =
      0;  ///< bits of the largest |sum|; from 0x7F800000 on: an Inf or NaN was among them
};

/// With a[i] = gradient[i] + residual[i] (residual null: a = gradient) and |a[i]| compared as the
/// bits of a non-negative float: appends (first_index + i, a[i]) for every |a[i]| >= threshold, in
/// order of i, and stores rest[i] = 0 for those and rest[i] = a[i] for the others. One pass: every
/// array is read or written once.
///
/// `threshold` is at least 1, so that zeros are never taken. `index` and `value` have room for
/// elements + kSelectSlack. `rest` may be `gradient`, else nothing overlaps. `stream`: stores to
/// `rest` go round the cache (for arrays that won't be in it when they are next read).
Selected add_select(const float* gradient, const float* residual, float* rest, uint64_t elements,
                    uint32_t first_index, uint32_t threshold, bool stream, uint32_t* index,
                    float* value);

/// out[i] = bits of |gradient[i] + residual[i]| (residual null: of |gradient[i]|).
void add_magnitudes(const float* gradient, const float* residual, uint64_t elements, uint32_t* out);

}  // namespace paceline::cpu
