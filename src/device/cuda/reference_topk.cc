#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "device/cuda/reference_kernels.h"

namespace paceline::device::cuda::reference {
namespace {

/// What the codec starts from at one element.
struct Fresh {
  float value;     ///< v of codec.h
  float velocity;  ///< the new one
};

/// What is added to it included.
template <class From>
float gradient(const TopK& k, uint64_t i) {
  using Bits = typename From::Bits;
  float sum = From::widen(at<const Bits>(k.gradient)[i]);
  for (uint32_t a = 0; a < k.addend_count; ++a) sum += From::widen(at<const Bits>(k.addends[a])[i]);
  return k.addend_count == 0 ? sum : From::widen(From::narrow(sum));
}

template <class From>
Fresh fresh(const TopK& k, uint64_t i) {
  const float g = gradient<From>(k, i);
  const float r = k.residual != 0 ? at<const float>(k.residual)[i] : 0.0F;
  if (k.velocity == 0) return {std::fma(g, k.scale, r), 0.0F};
  const float scaled = g * k.scale;
  const float u = std::fma(k.momentum, at<const float>(k.velocity)[i], scaled);
  return {u + r, u};
}

template <class From, class Visit>
void each_sample(const TopK& k, Visit visit) {
  for (uint32_t chunk = 0; chunk < k.sample_chunks; ++chunk) {
    const uint64_t begin = uint64_t{sampled_chunk(chunk, k.sample_step)} * kSampleChunk;
    for (uint64_t i = begin; i < std::min<uint64_t>(begin + kSampleChunk, k.elements); ++i)
      visit(magnitude_bits(fresh<From>(k, i).value));
  }
}

/// The bin in which the rank-th largest lies; `rank` becomes its rank in that bin.
uint32_t bin_of_rank(const uint32_t* bins, uint32_t& rank) {
  uint32_t bin = kBins - 1;
  while (bin > 0 && bins[bin] < rank) rank -= bins[bin--];
  return bin;
}

/// How a tile's values are cast to fp16: see layout.h.
struct Unit {
  explicit Unit(uint32_t exponent) {
    const uint32_t biased = std::max(exponent, 29U) - 14;
    unit = float_of(biased << 23);
    inverse = float_of((254 - biased) << 23);
  }
  float unit, inverse;

  [[nodiscard]] uint16_t encode(float value) const {
    uint16_t half = Float16::narrow(value * inverse);
    if (!is_finite(decode(half))) --half;  // rounded up beyond float32
    return half;
  }
  [[nodiscard]] float decode(uint16_t half) const { return Float16::widen(half) * unit; }
};

/// One tile: its values, and which are large enough.
struct Tile {
  uint64_t begin, count;
  std::array<Fresh, kTopKTile> fresh;
  uint32_t largest = 0;
};

void keep_all(const TopK& k, const Tile& tile) {
  for (uint64_t i = tile.begin; i < tile.begin + tile.count; ++i) {
    if (k.residual != 0) at<float>(k.next_residual)[i] = at<const float>(k.residual)[i];
    if (k.velocity != 0) at<float>(k.next_velocity)[i] = at<const float>(k.velocity)[i];
  }
}

/// Puts the entry into the encoding and returns what stays behind.
float send(const TopK& k, uint64_t rank, uint64_t offset, float value, const Unit& unit) {
  at<uint16_t>(k.offsets)[rank] = static_cast<uint16_t>(offset);
  if (k.fp16_values == 0) {
    at<float>(k.values)[rank] = value;
    return 0.0F;
  }
  const uint16_t half = unit.encode(value);
  at<uint16_t>(k.values)[rank] = half;
  return value - unit.decode(half);
}

}  // namespace

template <class From>
void sample_coarse(const TopK& k) {
  std::memset(at<void>(k.starts), 0, k.end - k.starts);
  auto* state = at<TopKState>(k.state);
  each_sample<From>(k, [&](uint32_t bits) { ++state->coarse[bits >> kCoarseShift]; });
  state->coarse_rank = k.sample_rank;
  state->coarse_bin = bin_of_rank(state->coarse, state->coarse_rank);
}

template <class From>
void sample_fine(const TopK& k) {
  auto* state = at<TopKState>(k.state);
  each_sample<From>(k, [&](uint32_t bits) {
    if (bits >> kCoarseShift == state->coarse_bin) ++state->fine[(bits >> kFineShift) % kBins];
  });
  uint32_t rank = state->coarse_rank;
  const uint32_t fine = bin_of_rank(state->fine, rank);
  // A zero never travels.
  state->threshold = std::max(1U, state->coarse_bin << kCoarseShift | fine << kFineShift);
}

template <class From>
void select_top_k(const TopK& k) {
  const uint32_t threshold = at<const TopKState>(k.state)->threshold;
  auto* starts = at<uint32_t>(k.starts);
  auto* next = at<float>(k.next_residual);
  auto* next_velocity = at<float>(k.next_velocity);
  uint64_t rank = 0;
  auto tile = std::make_unique<Tile>();
  for (uint32_t t = 0; t < k.tiles; ++t) {
    tile->begin = uint64_t{t} * kTopKTile;
    tile->count = std::min<uint64_t>(kTopKTile, k.elements - tile->begin);
    tile->largest = 0;
    for (uint64_t i = 0; i < tile->count; ++i) {
      tile->fresh[i] = fresh<From>(k, tile->begin + i);
      tile->largest = std::max(tile->largest, magnitude_bits(tile->fresh[i].value));
    }
    starts[t] = static_cast<uint32_t>(std::min<uint64_t>(rank, k.entries));
    at<uint8_t>(k.exponents)[t] = static_cast<uint8_t>(std::min(tile->largest >> 23, 255U));
    if (tile->largest >= 0x7F800000U) {
      add_report(k.report, kReportNonFinite);
      keep_all(k, *tile);
      continue;
    }
    const Unit unit(tile->largest >> 23);
    for (uint64_t i = 0; i < tile->count; ++i) {
      auto [stays, velocity] = tile->fresh[i];
      if (magnitude_bits(stays) >= threshold) {
        velocity = 0;
        if (rank < k.entries) stays = send(k, rank, i, stays, unit);
        ++rank;
      }
      if (k.residual != 0) next[tile->begin + i] = stays;
      if (k.velocity != 0) next_velocity[tile->begin + i] = velocity;
    }
  }
  starts[k.tiles] = static_cast<uint32_t>(std::min<uint64_t>(rank, k.entries));
}

/// The device selects into slots first and gathers them here; on the host select has written the encoding already.
void gather_top_k(const TopK& /*argument*/) {}

template <class To>
void combine_top_k(const TopKCombine& c) {
  auto* output = at<typename To::Bits>(c.output);
  std::array<float, kTopKTile> sum{};
  for (uint32_t t = 0; t < c.tiles; ++t) {
    const uint64_t begin = uint64_t{t} * kTopKTile;
    const uint64_t count = std::min<uint64_t>(kTopKTile, c.elements - begin);
    sum.fill(0);
    for (uint32_t source = 0; source < c.sources; ++source) {
      const Address encoded = c.encoded[source];
      const uint32_t from = at<const uint32_t>(encoded)[t];
      const uint32_t to = at<const uint32_t>(encoded)[t + 1];
      const uint8_t exponent = at<const uint8_t>(encoded + c.exponents_offset)[t];
      const Unit unit(std::min<uint32_t>(exponent, 254));
      if (exponent == 255) sum.fill(float_of(0x7FC00000U));
      if (from > to || to > c.entries) {
        add_report(c.report, kReportCorrupted);
        continue;
      }
      for (uint32_t i = from; i < to; ++i) {
        const uint16_t offset = at<const uint16_t>(encoded + c.offsets_offset)[i];
        if (offset >= count) {
          add_report(c.report, kReportCorrupted);
          continue;
        }
        sum[offset] += c.fp16_values != 0
                           ? unit.decode(at<const uint16_t>(encoded + c.values_offset)[i])
                           : at<const float>(encoded + c.values_offset)[i];
      }
    }
    for (uint64_t i = 0; i < count; ++i) output[begin + i] = To::narrow(sum[i] * c.scale);
  }
}

#define PACELINE_INSTANTIATE(Number)                \
  template void sample_coarse<Number>(const TopK&); \
  template void sample_fine<Number>(const TopK&);   \
  template void select_top_k<Number>(const TopK&);  \
  template void combine_top_k<Number>(const TopKCombine&);
PACELINE_INSTANTIATE(Float32)
PACELINE_INSTANTIATE(Float16)
PACELINE_INSTANTIATE(BFloat16)
#undef PACELINE_INSTANTIATE

}  // namespace paceline::device::cuda::reference
