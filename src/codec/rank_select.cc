#include "codec/rank_select.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <functional>
#include <optional>
#include <vector>

namespace paceline::codec {
namespace {

constexpr uint32_t kBins = 2048;

/// Four histograms side by side: neighbours often share a bin, and incrementing one counter twice in a row waits for
/// the first store.
class Histogram {
 public:
  template <class Bin>
  void count(std::span<const float> values, Bin bin) {
    std::size_t i = 0;
    for (; i + 4 <= values.size(); i += 4)
      for (std::size_t j = 0; j < 4; ++j) ++bins_[j][bin(magnitude_bits(values[i + j]))];
    for (; i < values.size(); ++i) ++bins_[0][bin(magnitude_bits(values[i]))];
  }
  /// The bin, from the top, in which the count reaches `rank`; adds what lies above it to `above`.
  uint32_t find(uint64_t rank, uint64_t& above) const {
    for (uint32_t bin = kBins; bin-- > 0;) {
      const uint64_t here = bins_[0][bin] + bins_[1][bin] + bins_[2][bin] + bins_[3][bin];
      if (above + here >= rank) return bin;
      above += here;
    }
    assert(false && "rank is larger than the number of values");
    return 0;
  }

 private:
  std::array<std::array<uint64_t, kBins>, 4> bins_{};
};

/// The rank-th largest of all, given that it lies in the bin `low` <= key < `high` and `above` lie above that.
RankSelect select_within(std::span<const float> values, uint64_t rank, uint32_t low, uint32_t high,
                         uint64_t above) {
  std::vector<uint32_t> keys;
  for (const float v : values)
    if (const uint32_t key = magnitude_bits(v); key >= low && key < high) keys.push_back(key);
  const auto at = keys.begin() + static_cast<std::ptrdiff_t>(rank - above - 1);
  std::nth_element(keys.begin(), at, keys.end(), std::greater<>());
  const uint32_t key = *at;
  above += static_cast<uint64_t>(
      std::count_if(keys.begin(), at, [key](uint32_t other) { return other > key; }));
  return {key, above};
}

/// Bins of 4,096 units of the last place above `floor`: the answer lies near it when the floor was a good guess.
std::optional<RankSelect> select_near(std::span<const float> values, uint64_t rank,
                                      uint32_t floor) {
  constexpr int kShift = 12;
  Histogram near;
  near.count(values,
             [floor](uint32_t key) { return std::min((key - floor) >> kShift, kBins - 1); });
  uint64_t above = 0;
  const uint32_t bin = near.find(rank, above);
  if (bin == kBins - 1) return std::nullopt;
  const uint32_t low = floor + (bin << kShift);
  return select_within(values, rank, low, low + (1U << kShift), above);
}

}  // namespace

RankSelect rank_select(std::span<const float> values, uint64_t rank, uint32_t floor) {
  assert(rank >= 1 && rank <= values.size());
  if (floor > 0)
    if (const auto near = select_near(values, rank, floor)) return *near;
  // Upper 11 bits (an eighth of an octave), then the next 10 of those in the bin, then those values themselves.
  RankSelect result;
  Histogram upper;
  upper.count(values, [](uint32_t key) { return key >> 20; });
  const uint32_t octave = upper.find(rank, result.above);
  Histogram middle;
  // Values of other bins go to bin 0 or the last: below or above all that matter.
  uint64_t above = 0;
  middle.count(values, [octave](uint32_t key) {
    const uint32_t prefix = key >> 20;
    return prefix > octave ? kBins - 1 : (prefix < octave ? 0 : 1 + ((key >> 10) & 0x3FF));
  });
  const uint32_t bin = middle.find(rank, above);
  const uint32_t low = octave << 20 | (bin - 1) << 10;
  return select_within(values, rank, low, low + 1024, above);
}

}  // namespace paceline::codec
