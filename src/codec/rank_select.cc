#include "codec/rank_select.h"

#include <array>
#include <cassert>

namespace paceline::codec {
namespace {

constexpr int kBins = 2048;

/// Four histograms side by side: neighbouring keys often share a bin, and incrementing one counter
/// twice in a row waits for the first store.
class Histogram {
 public:
  void count(std::span<const uint32_t> keys, int shift, uint32_t mask) {
    std::size_t i = 0;
    for (; i + 4 <= keys.size(); i += 4)
      for (std::size_t j = 0; j < 4; ++j) ++bins_[j][(keys[i + j] >> shift) & mask];
    for (; i < keys.size(); ++i) ++bins_[0][(keys[i] >> shift) & mask];
  }
  /// Only keys whose bits above `prefix_shift` equal `prefix`.
  void count_within(std::span<const uint32_t> keys, int shift, uint32_t mask, int prefix_shift,
                    uint32_t prefix) {
    for (std::size_t i = 0; i < keys.size(); ++i)
      if ((keys[i] >> prefix_shift) == prefix) ++bins_[i % 4][(keys[i] >> shift) & mask];
  }
  /// The bin, from the top, in which the count passes `rank`; adds what lies above it to `above`.
  uint32_t find(uint64_t rank, uint64_t& above) const {
    for (uint32_t bin = kBins; bin-- > 0;) {
      const uint64_t here = bins_[0][bin] + bins_[1][bin] + bins_[2][bin] + bins_[3][bin];
      if (above + here >= rank) return bin;
      above += here;
    }
    assert(false && "rank is larger than the number of keys");
    return 0;
  }

 private:
  std::array<std::array<uint64_t, kBins>, 4> bins_{};
};

}  // namespace

RankSelect rank_select(std::span<const uint32_t> keys, uint64_t rank) {
  assert(rank >= 1 && rank <= keys.size());
  RankSelect result;
  Histogram upper;
  upper.count(keys, 20, 0x7FF);
  uint32_t prefix = upper.find(rank, result.above);
  Histogram middle;
  middle.count_within(keys, 10, 0x3FF, 20, prefix);
  prefix = prefix << 10 | middle.find(rank, result.above);
  Histogram lower;
  lower.count_within(keys, 0, 0x3FF, 10, prefix);
  result.key = prefix << 10 | lower.find(rank, result.above);
  return result;
}

}  // namespace paceline::codec
