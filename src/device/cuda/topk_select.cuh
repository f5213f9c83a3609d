// Top-k's one pass: what reaches the threshold goes into the encoding, the rest becomes the new residual.
//
// A block takes a tile. Its entries lie behind those of all tiles before it, in the order of their positions, so the
// bytes do not depend on which block runs when. How many there are before is found by looking back: each tile publishes
// its count, then the sum up to and including itself; a tile adds counts backwards until it meets such a sum (Merrill
// and Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016). A tile waits for earlier ones only;
// blocks start in the order of their numbers, so those are done or running.
#pragma once

#include "device/cuda/topk_sample.cuh"

namespace paceline::device::cuda {

inline constexpr uint64_t kCountKnown = uint64_t{1}
                                        << 32;            ///< the low half is the tile's own count
inline constexpr uint64_t kSumKnown = uint64_t{2} << 32;  ///< … the sum up to and including it

// One word holds the flag and the number, so no order among several accesses is needed.
__device__ inline void publish(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ inline uint64_t published(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

/// Entries in all tiles before `tile`. Called by one warp.
__device__ inline uint32_t look_back(const uint64_t* words, uint32_t tile) {
  uint32_t sum = 0;
  for (int64_t at = int64_t{tile} - 1 - threadIdx.x % 32;; at -= 32) {
    uint64_t word = at >= 0 ? 0 : kSumKnown;
    while (__any_sync(kAllLanes, word < kCountKnown))
      if (word < kCountKnown) word = published(words + at);
    const uint32_t ends = __ballot_sync(kAllLanes, word >= kSumKnown);
    const uint32_t last = ends != 0 ? __ffs(ends) - 1 : 31;
    sum += __reduce_add_sync(kAllLanes, threadIdx.x % 32 <= last ? static_cast<uint32_t>(word) : 0);
    if (ends != 0) return sum;
  }
}

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

/// A thread's share of a tile, from its inputs to what stays behind.
template <class From, bool kMomentum, bool kWhole>
struct Share {
  const TopK& k;
  uint64_t begin;  ///< of its elements in the tensor
  float v[kTurns][4];
  float u[kMomentum ? kTurns : 1][4];
  uint32_t mask = 0;     ///< bit 4 r + e: v[r][e] reaches the threshold
  uint32_t largest = 0;  ///< of |v|'s bits

  __device__ Share(const TopK& argument, uint64_t first) : k(argument), begin(first) {
    Fresh<From, kMomentum> fresh[kTurns];
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      if (kWhole)
        fresh[r].load(k, begin + r * 128);
      else
        fresh[r].load_some(k, begin + r * 128);
    }
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

  /// Writes what stays behind when all entries of the tile travel; that nearly always is so.
  __device__ void leave(const Unit& unit) const {
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      Pack<float, 4> left, velocity;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        left.of[e] = v[r][e];
        if (reaches(r, e))
          left.of[e] =
              k.fp16_values != 0 ? __fsub_rn(v[r][e], unit.decode(unit.encode(v[r][e]))) : 0.0F;
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
  /// Writes the entries, the first of them at `rank` in each turn; what has no place any more stays behind whole.
  __device__ void send(const Places& places, uint32_t first, const Unit& unit) const {
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      uint32_t rank = first + (places.before >> (8 * r) & 255U);
      first += places.totals >> (8 * r) & 255U;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!reaches(r, e)) continue;
        send_one(rank++, r, e, unit);
      }
    }
  }
  __device__ void send_one(uint32_t rank, int r, int e, const Unit& unit) const {
    const uint64_t i = begin + r * 128 + e;
    if (rank < k.entries) {
      at<uint16_t>(k.offsets)[rank] = static_cast<uint16_t>(i % kTopKTile);
      if (k.fp16_values != 0)
        at<uint16_t>(k.values)[rank] = unit.encode(v[r][e]);
      else
        at<float>(k.values)[rank] = v[r][e];
      return;
    }
    if (k.residual != 0) at<float>(k.next_residual)[i] = v[r][e];
    if constexpr (kMomentum) at<float>(k.next_velocity)[i] = u[r][e];
  }
};

template <class From, bool kMomentum, bool kWhole>
__device__ void select_tile(const TopK& k) {
  __shared__ uint32_t warp_counts[kWarps], warp_largest[kWarps], tiles_before;
  const uint32_t tile = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto* words = reinterpret_cast<uint64_t*>(at<TopKState>(k.state) + 1);
  Share<From, kMomentum, kWhole> share(
      k, uint64_t{tile} * kTopKTile + warp * (kTopKTile / kWarps) + lane * 4);

  const Places places(share.mask);
  uint32_t largest = __reduce_max_sync(kAllLanes, share.largest);
  if (lane == 0) {
    warp_counts[warp] = places.total();
    warp_largest[warp] = largest;
  }
  __syncthreads();
  const uint32_t counts = lane < kWarps ? warp_counts[lane] : 0;
  const uint32_t in_warps = __reduce_add_sync(kAllLanes, lane < warp ? counts : 0);
  largest = __reduce_max_sync(kAllLanes, lane < kWarps ? warp_largest[lane] : 0);
  const bool finite = largest < kInfinity;
  const uint32_t total = finite ? __reduce_add_sync(kAllLanes, counts) : 0;
  if (threadIdx.x == 0) publish(words + tile, (tile == 0 ? kSumKnown : kCountKnown) | total);

  const Unit unit(largest >> 23);
  if (finite)
    share.leave(unit);
  else
    share.keep();

  if (warp == 0) {
    const uint32_t before = tile == 0 ? 0 : look_back(words, tile);
    if (lane == 0) {
      if (tile != 0) publish(words + tile, kSumKnown | (before + total));
      tiles_before = before;
      at<uint32_t>(k.starts)[tile] = min(before, k.entries);
      at<uint8_t>(k.exponents)[tile] = static_cast<uint8_t>(min(largest >> 23, 255U));
      if (tile + 1 == k.tiles) at<uint32_t>(k.starts)[k.tiles] = min(before + total, k.entries);
      if (!finite && k.report != 0) atomicOr(at<uint32_t>(k.report), kNonFinite);
    }
  }
  if (total == 0) return;
  __syncthreads();
  share.send(places, tiles_before + in_warps, unit);
}

template <class From, bool kMomentum>
__device__ void select(const TopK& k) {
  if ((uint64_t{blockIdx.x} + 1) * kTopKTile <= k.elements)
    select_tile<From, kMomentum, true>(k);
  else
    select_tile<From, kMomentum, false>(k);
}

}  // namespace paceline::device::cuda
