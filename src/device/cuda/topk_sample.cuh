// Top-k's threshold, read off a sample of what will be selected from: two histograms over the bits of |v|.
#pragma once

#include "device/cuda/topk_value.cuh"

namespace paceline::device::cuda {

/// Whether the end does not lie among the four from `begin` on.
__device__ inline bool whole(const TopK& k, uint32_t begin) {
  return uint64_t{begin} + 4 <= k.elements;
}

/// Calls visit(|v|'s bits) for the thread's samples, `kBatch` × 4 of them under way at a time.
template <class From, bool kMomentum, bool kSum, int kBatch, class Visit>
__device__ void visit_samples(const TopK& k, Visit visit) {
  constexpr uint32_t kUnits = kSampleChunk / 4;
  const uint32_t units = k.sample_chunks * kUnits;
  const uint32_t stride = gridDim.x * kSampleThreads;
  for (uint32_t first = blockIdx.x * kSampleThreads + threadIdx.x; first < units;
       first += kBatch * stride) {
    Fresh<From, kMomentum, kSum> fresh[kBatch];
    uint32_t begin[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const uint32_t unit = first + b * stride;
      begin[b] = unit < units ? sampled_chunk(unit / kUnits, k.sample_step) * kSampleChunk +
                                    unit % kUnits * 4
                              : 0xFFFFFFF0U;
      if (whole(k, begin[b]))
        fresh[b].template load<true>(k, begin[b]);
      else
        fresh[b].template load<false>(k, begin[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (whole(k, begin[b]))
        fresh[b].template add<true>(k, begin[b]);
      else
        fresh[b].template add<false>(k, begin[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (uint64_t{begin[b]} + e < k.elements) visit(magnitude_bits(fresh[b].value(k, e)));
  }
}

/// As many under way as registers hold.
template <class From, class Visit>
__device__ void each_sample(const TopK& k, Visit visit) {
  if (k.addend_count != 0 && k.velocity != 0)
    visit_samples<From, true, true, 1>(k, visit);
  else if (k.addend_count != 0)
    visit_samples<From, false, true, 1>(k, visit);
  else if (k.velocity != 0)
    visit_samples<From, true, false, 2>(k, visit);
  else
    visit_samples<From, false, false, 4>(k, visit);
}

/// The sum over the lanes up to this one.
__device__ inline uint32_t warp_inclusive(uint32_t value) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

/// The bin that holds the rank-th largest, and its rank there. All threads of a block of kSampleThreads call it; one of
/// them is given the answer (found).
struct BinOfRank {
  uint32_t bin, rank;
  bool found;
};

__device__ inline BinOfRank bin_of_rank(const uint32_t* bins, uint32_t rank) {
  constexpr uint32_t kEach = kBins / kSampleThreads;
  __shared__ uint32_t warp_sums[kSampleThreads / 32];
  const uint32_t top = kBins - 1 - threadIdx.x * kEach;
  uint32_t count[kEach], own = 0;
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) {
    count[j] = __ldcg(bins + top - j);
    own += count[j];
  }
  const uint32_t inclusive = warp_inclusive(own);
  if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = inclusive;
  __syncthreads();
  uint32_t above = inclusive - own;
  for (uint32_t warp = 0; warp < threadIdx.x / 32; ++warp) above += warp_sums[warp];
  const bool last = threadIdx.x == kSampleThreads - 1;
  BinOfRank answer{0, rank - above, above < rank && (rank <= above + own || last)};
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) {
    answer.bin = top - j;
    if (answer.rank <= count[j]) break;
    if (answer.bin != 0) answer.rank -= count[j];
  }
  return answer;
}

/// Adds the block's histogram to the one in memory; true in the block that is the last to do so.
__device__ inline bool add_histogram(const uint32_t* own, uint32_t* bins, uint32_t* done) {
  __shared__ bool is_last;
  __syncthreads();
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kSampleThreads)
    if (own[bin] != 0) atomicAdd(bins + bin, own[bin]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(done, 1) + 1 == gridDim.x;
  __syncthreads();
  return is_last;
}

template <class From>
__device__ void sample_coarse(const TopK& k) {
  __shared__ uint32_t bins[kBins];
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kSampleThreads) bins[bin] = 0;
  __syncthreads();
  each_sample<From>(k, [&](uint32_t bits) { atomicAdd(&bins[bits >> kCoarseShift], 1); });
  auto* state = at<TopKState>(k.state);
  if (!add_histogram(bins, state->coarse, &state->coarse_done)) return;
  const BinOfRank answer = bin_of_rank(state->coarse, k.sample_rank);
  if (!answer.found) return;
  state->coarse_bin = answer.bin;
  state->coarse_rank = answer.rank;
}

template <class From>
__device__ void sample_fine(const TopK& k) {
  __shared__ uint32_t bins[kBins];
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kSampleThreads) bins[bin] = 0;
  __syncthreads();
  auto* state = at<TopKState>(k.state);
  const uint32_t coarse = state->coarse_bin;
  each_sample<From>(k, [&](uint32_t bits) {
    if (bits >> kCoarseShift == coarse) atomicAdd(&bins[(bits >> kFineShift) % kBins], 1);
  });
  if (!add_histogram(bins, state->fine, &state->fine_done)) return;
  const BinOfRank answer = bin_of_rank(state->fine, state->coarse_rank);
  // A zero never travels.
  if (answer.found) state->threshold = max(1U, coarse << kCoarseShift | answer.bin << kFineShift);
}

}  // namespace paceline::device::cuda
