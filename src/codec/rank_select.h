// The r-th largest of many integers, by counting digits.
#pragma once

#include <cstdint>
#include <span>

namespace paceline::codec {

struct RankSelect {
  uint32_t key = 0;    ///< the rank-th largest key
  uint64_t above = 0;  ///< keys greater than it; less than rank
};

/// `keys` are below 2^31; 1 <= rank <= keys.size(). Three passes at most, whatever the values are:
/// the histogram of the upper 11 bits says in which bin the rank lies, the next 10 bits of that
/// bin's keys where in it, and so on.
RankSelect rank_select(std::span<const uint32_t> keys, uint64_t rank);

}  // namespace paceline::codec
