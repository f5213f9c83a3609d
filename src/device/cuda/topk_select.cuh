// Top-k's pass over memory: what reaches the threshold goes into the tile's slot, the rest becomes the new residual.
//
// Blocks do not wait for one another. A block takes a tile, writes its entries into a slot of the state in the order of
// their positions, and its count beside; the next launch (topk_gather.cuh) knows all counts and moves the slots into
// the encoding. The slots are small: they stay in the cache in between. A tile with more entries than a slot holds
// leaves all of v as its residual, from where gather takes the entries.
//
// All of v goes out as the residual first, without a branch. The few entries collect in shared memory; then as many
// threads as there are entries cast them, put them into the slot, and correct the residual behind them.
#pragma once

#include "device/cuda/topk_sample.cuh"

namespace paceline::device::cuda {

/// A thread's share of a tile: four neighbours in each of kTurns runs of its warp's part.
inline constexpr int kTurns = kTopKTile / (kTopKThreads * 4);
inline constexpr uint32_t kWarps = kTopKThreads / 32;

/// Where a thread's entries of each turn stand among its warp's, four bytes in one word (a turn has at most 128).
struct Places {
  uint32_t before;  ///< in lanes before, per turn
  uint32_t totals;  ///< of the warp, per turn

  explicit __device__ Places(uint32_t mask) {
    uint32_t counts = 0;
#pragma unroll
    for (int r = 0; r < kTurns; ++r) counts |= __popc(mask >> (4 * r) & 15U) << (8 * r);
    before = totals = 0;
    if (!__any_sync(kAllLanes, mask != 0)) return;
    const uint32_t inclusive = warp_inclusive(counts);
    before = inclusive - counts;
    totals = __shfl_sync(kAllLanes, inclusive, 31);
  }
  [[nodiscard]] __device__ uint32_t total() const {
    uint32_t sum = 0;
#pragma unroll
    for (int r = 0; r < kTurns; ++r) sum += totals >> (8 * r) & 255U;
    return sum;
  }
};
static_assert(kTurns <= 4);

struct Collected {
  float values[kMostSlot];
  uint16_t offsets[kMostSlot];
};

/// A thread's share of a tile, from its inputs to what stays behind.
template <class From, bool kMomentum, bool kSum, bool kWhole>
struct Share {
  const TopK& k;
  uint64_t begin;  ///< of its elements in the tensor
  float v[kTurns][4];
  float u[kMomentum ? kTurns : 1][4];
  uint32_t mask = 0;     ///< bit 4 r + e: v[r][e] reaches the threshold
  uint32_t largest = 0;  ///< of |v|'s bits

  __device__ Share(const TopK& argument, uint64_t first) : k(argument), begin(first) {
    Fresh<From, kMomentum, kSum> fresh[kTurns];
#pragma unroll
    for (int r = 0; r < kTurns; ++r) fresh[r].template load<kWhole>(k, begin + r * 128);
#pragma unroll
    for (int r = 0; r < kTurns; ++r) fresh[r].template add<kWhole>(k, begin + r * 128);
    const uint32_t threshold = at<const TopKState>(k.state)->threshold;
#pragma unroll
    for (int r = 0; r < kTurns; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        v[r][e] = fresh[r].value(k, e);
        if constexpr (kMomentum) u[r][e] = fresh[r].new_velocity(k, e);
        const uint32_t bits = magnitude_bits(v[r][e]);
        largest = max(largest, bits);
        mask |= (bits >= threshold ? 1U : 0U) << (4 * r + e);
      }
  }
  [[nodiscard]] __device__ bool reaches(int r, int e) const {
    return (mask >> (4 * r + e) & 1U) != 0;
  }
  /// Whether v[r][e] is there.
  [[nodiscard]] __device__ bool inside(int r, int e) const {
    return kWhole || begin + r * 128 + e < k.elements;
  }
  __device__ void store(Address to, int r, const Pack<float, 4>& pack) const {
    float* at_turn = at<float>(to) + begin + r * 128;
    if constexpr (kWhole) {
      pack.store(at_turn);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (inside(r, e)) at_turn[e] = pack.of[e];
    }
  }

  /// Writes v as the residual, whole, and the new velocity.
  __device__ void leave() const {
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      Pack<float, 4> left, velocity;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        left.of[e] = v[r][e];
        if constexpr (kMomentum) velocity.of[e] = reaches(r, e) ? 0.0F : u[r][e];
      }
      if (k.residual != 0) store(k.next_residual, r, left);
      if (kMomentum) store(k.next_velocity, r, velocity);
    }
  }
  /// The tile holds an Inf or NaN: residual and velocity stay as they were.
  __device__ void keep() const {
    for (int r = 0; r < kTurns; ++r)
      for (int e = 0; e < 4; ++e) {
        const uint64_t i = begin + r * 128 + e;
        if (!inside(r, e)) continue;
        if (k.residual != 0) at<float>(k.next_residual)[i] = at<const float>(k.residual)[i];
        if (kMomentum) at<float>(k.next_velocity)[i] = at<const float>(k.velocity)[i];
      }
  }
  /// Puts the entries into shared memory; the warp's first is the tile's `first`-th.
  __device__ void collect(const Places& places, uint32_t first, Collected& entries) const {
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      uint32_t rank = first + (places.before >> (8 * r) & 255U);
      first += places.totals >> (8 * r) & 255U;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!reaches(r, e)) continue;
        entries.values[rank] = v[r][e];
        entries.offsets[rank] = static_cast<uint16_t>((begin + r * 128 + e) % kTopKTile);
        ++rank;
      }
    }
  }
};

/// From shared memory into the tile's slot, and out of the residual.
__device__ inline void send(const TopK& k, uint32_t tile, uint32_t count, const Unit& unit,
                            const Collected& entries) {
  for (uint32_t i = threadIdx.x; i < count; i += kTopKThreads) {
    const uint64_t to = uint64_t{tile} * k.slot + i;
    const uint16_t offset = entries.offsets[i];
    const float value = entries.values[i];
    float left = 0.0F;
    at<uint16_t>(k.slot_offsets)[to] = offset;
    if (k.fp16_values != 0) {
      const uint16_t half = unit.encode(value);
      at<uint16_t>(k.slot_values)[to] = half;
      left = __fsub_rn(value, unit.decode(half));
    } else {
      at<float>(k.slot_values)[to] = value;
    }
    if (k.residual != 0) at<float>(k.next_residual)[uint64_t{tile} * kTopKTile + offset] = left;
  }
}

template <class From, bool kMomentum, bool kSum, bool kWhole>
__device__ void select_tile(const TopK& k, Collected& entries) {
  __shared__ uint32_t warp_counts[kWarps], warp_largest[kWarps];
  const uint32_t tile = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Share<From, kMomentum, kSum, kWhole> share(
      k, uint64_t{tile} * kTopKTile + warp * (kTopKTile / kWarps) + lane * 4);

  const Places places(share.mask);
  uint32_t largest = __reduce_max_sync(kAllLanes, share.largest);
  if (lane == 0) {
    warp_counts[warp] = places.total();
    warp_largest[warp] = largest;
  }
  __syncthreads();
  const uint32_t counts = lane < kWarps ? warp_counts[lane] : 0;
  const uint32_t before = __reduce_add_sync(kAllLanes, lane < warp ? counts : 0);
  largest = __reduce_max_sync(kAllLanes, lane < kWarps ? warp_largest[lane] : 0);
  const bool finite = largest < kInfinity;
  const uint32_t total = finite ? __reduce_add_sync(kAllLanes, counts) : 0;
  const bool fits = total <= k.slot;
  if (threadIdx.x == 0) {
    at<uint32_t>(k.counts)[tile] = total | (fits ? 0 : kNoSlot);
    atomicAdd(at<uint32_t>(k.groups) + tile / kTileGroup, total);
    at<uint8_t>(k.exponents)[tile] = static_cast<uint8_t>(largest >> 23);
    if (!finite && k.report != 0) atomicOr(at<uint32_t>(k.report), kNonFinite);
  }
  if (!finite) {
    share.keep();
    return;
  }
  share.leave();
  if (!fits || total == 0) return;
  if (places.totals != 0) share.collect(places, before, entries);
  __syncthreads();
  send(k, tile, total, Unit(largest >> 23), entries);
}

template <class From, bool kMomentum, bool kSum>
__device__ void select(const TopK& k) {
  __shared__ Collected entries;
  if ((uint64_t{blockIdx.x} + 1) * kTopKTile <= k.elements)
    select_tile<From, kMomentum, kSum, true>(k, entries);
  else
    select_tile<From, kMomentum, kSum, false>(k, entries);
}

}  // namespace paceline::device::cuda
