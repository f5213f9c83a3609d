// The r-th largest of many magnitudes, by counting.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace paceline::codec {

/// |value| as bits: orders like the magnitude (NaN above infinity), below 2^31.
inline uint32_t magnitude_bits(float value) { return std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU; }

struct RankSelect {
  uint32_t key = 0;    ///< magnitude_bits of the rank-th largest
  uint64_t above = 0;  ///< values of greater magnitude; less than rank
};

/// 1 <= rank <= values.size(). Two passes when the answer lies within a factor of 2 above `floor` (bits that no
/// magnitude lies below; 0 if unknown), else five at most, whatever the values are.
RankSelect rank_select(std::span<const float> values, uint64_t rank, uint32_t floor = 0);

}  // namespace paceline::codec
