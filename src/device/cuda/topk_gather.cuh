// Top-k's last step: the tiles' entries move from their slots into the encoding, in the order of the tiles.
#pragma once

#include "device/cuda/topk_value.cuh"

namespace paceline::device::cuda {

/// The sum over a block of kGatherThreads, for all of its threads.
__device__ inline uint32_t block_sum(uint32_t value) {
  __shared__ uint32_t sums[kGatherThreads / 32];
  value = __reduce_add_sync(kAllLanes, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < kGatherThreads / 32; ++warp) sum += sums[warp];
  return sum;
}

inline constexpr uint32_t kGatherTiles = kGatherThreads / 32;
static_assert(kTileGroup % kGatherTiles == 0);

/// A tile among the others.
struct Standing {
  uint32_t tile, count;  ///< entries of this tile
  uint32_t start;        ///< entries in the tiles before
  bool in_slot;
};

/// The standings of the block's tiles: a warp's own, then the next ones.
struct Standings {
  uint32_t first, start, total;  ///< the first tile, entries before it, entries in all

  explicit __device__ Standings(const TopK& k) : first(blockIdx.x * kGatherTiles) {
    const auto* groups = at<const uint32_t>(k.groups);
    const auto* counts = at<const uint32_t>(k.counts);
    const uint32_t group = first / kTileGroup, others = (k.tiles + kTileGroup - 1) / kTileGroup;
    uint32_t before = 0, all = 0;
    for (uint32_t g = threadIdx.x; g < others; g += kGatherThreads) {
      const uint32_t sum = groups[g];
      all += sum;
      if (g < group) before += sum;
    }
    for (uint32_t t = group * kTileGroup + threadIdx.x; t < first; t += kGatherThreads)
      before += counts[t] & ~kNoSlot;
    start = block_sum(before);
    total = block_sum(all);
  }
  /// Of the block's `index`-th tile; count 0 where there is none.
  [[nodiscard]] __device__ Standing of(const TopK& k, uint32_t index) const {
    Standing standing{first + index, 0, start, true};
    for (uint32_t i = 0; i <= index && first + i < k.tiles; ++i) {
      const uint32_t count = at<const uint32_t>(k.counts)[first + i];
      if (i < index) {
        standing.start += count & ~kNoSlot;
      } else {
        standing.count = count & ~kNoSlot;
        standing.in_slot = (count & kNoSlot) == 0;
      }
    }
    return standing;
  }
};

__device__ inline void put(const TopK& k, uint32_t rank, uint16_t offset, float value,
                           uint16_t half) {
  at<uint16_t>(k.offsets)[rank] = offset;
  if (k.fp16_values != 0)
    at<uint16_t>(k.values)[rank] = half;
  else
    at<float>(k.values)[rank] = value;
}

/// From the slot, by one warp. What has no place any more goes back: what was left of it and what was to be sent sum to v exactly.
__device__ inline void move_slot(const TopK& k, const Standing& my, const Unit& unit) {
  for (uint32_t i = threadIdx.x % 32; i < my.count; i += 32) {
    const uint64_t from = uint64_t{my.tile} * k.slot + i;
    const uint16_t offset = at<const uint16_t>(k.slot_offsets)[from];
    uint16_t half = 0;
    float value = 0;
    if (k.fp16_values != 0)
      half = at<const uint16_t>(k.slot_values)[from];
    else
      value = at<const float>(k.slot_values)[from];
    const uint32_t rank = my.start + i;
    if (rank < k.entries) {
      put(k, rank, offset, value, half);
    } else if (k.residual != 0) {
      float* left = at<float>(k.next_residual) + uint64_t{my.tile} * kTopKTile + offset;
      *left = __fadd_rn(*left, k.fp16_values != 0 ? unit.decode(half) : value);
    }
  }
}

/// From v itself, which select has left as the residual; by the block.
template <class From>
__device__ void find_entries(const TopK& k, const Standing& my, const Unit& unit) {
  const uint32_t threshold = at<const TopKState>(k.state)->threshold;
  float* next = at<float>(k.next_residual);
  uint32_t start = my.start;
  for (uint32_t offset = threadIdx.x; offset < kTopKTile; offset += kGatherThreads) {
    const uint64_t i = uint64_t{my.tile} * kTopKTile + offset;
    float v = 0;
    if (i < k.elements)
      v = k.residual != 0 ? next[i] : __fmaf_rn(gradient_at<From>(k, i), k.scale, 0.0F);
    const bool sent = magnitude_bits(v) >= threshold;
    const uint32_t lanes = __ballot_sync(kAllLanes, sent);
    __shared__ uint32_t in_warps[kGatherThreads / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) in_warps[threadIdx.x / 32] = __popc(lanes);
    __syncthreads();
    uint32_t rank = start + __popc(lanes & ((1U << threadIdx.x % 32) - 1));
#pragma unroll
    for (uint32_t warp = 0; warp < kGatherThreads / 32; ++warp) {
      if (warp < threadIdx.x / 32) rank += in_warps[warp];
      start += in_warps[warp];
    }
    if (!sent || rank >= k.entries) continue;
    const uint16_t half = k.fp16_values != 0 ? unit.encode(v) : 0;
    put(k, rank, static_cast<uint16_t>(offset), v, half);
    if (k.residual != 0) next[i] = k.fp16_values != 0 ? __fsub_rn(v, unit.decode(half)) : 0.0F;
  }
}

__device__ inline void clear_bytes(Address from, Address to) {
  for (Address i = from + threadIdx.x; i < to; i += kGatherThreads) *at<uint8_t>(i) = 0;
}

/// Unused entries and what pads the parts to 16 bytes.
__device__ inline void clear_unused(const TopK& k, uint32_t total) {
  const uint32_t used = min(total, k.entries), value_bytes = k.fp16_values != 0 ? 2 : 4;
  for (uint64_t i = uint64_t{used} + uint64_t{blockIdx.x} * kGatherThreads + threadIdx.x;
       i < k.entries; i += uint64_t{gridDim.x} * kGatherThreads)
    put(k, static_cast<uint32_t>(i), 0, 0.0F, 0);
  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) at<uint32_t>(k.starts)[k.tiles] = used;
  clear_bytes(k.starts + (uint64_t{k.tiles} + 1) * sizeof(uint32_t), k.exponents);
  clear_bytes(k.exponents + k.tiles, k.offsets);
  clear_bytes(k.offsets + uint64_t{k.entries} * sizeof(uint16_t), k.values);
  clear_bytes(k.values + uint64_t{k.entries} * value_bytes, k.end);
}

template <class From>
__device__ void gather(const TopK& k) {
  const Standings standings(k);
  const Standing my = standings.of(k, threadIdx.x / 32);
  if (my.tile < k.tiles) {
    if (threadIdx.x % 32 == 0) at<uint32_t>(k.starts)[my.tile] = min(my.start, k.entries);
    if (my.in_slot) move_slot(k, my, Unit(at<const uint8_t>(k.exponents)[my.tile]));
  }
  clear_unused(k, standings.total);
  for (uint32_t index = 0; index < kGatherTiles; ++index) {
    const Standing one = standings.of(k, index);
    if (!one.in_slot) find_entries<From>(k, one, Unit(at<const uint8_t>(k.exponents)[one.tile]));
  }
}

}  // namespace paceline::device::cuda
