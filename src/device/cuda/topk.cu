// Top-k with error feedback: threshold, selection, and decoding of several encodings at once.
#include "device/cuda/topk_gather.cuh"
#include "device/cuda/topk_select.cuh"

namespace paceline::device::cuda {
namespace {

struct Entry {
  uint32_t offset, value;  ///< the value's bits as they were sent
};

__device__ inline Entry load_entry(const TopKCombine& c, uint32_t source, uint32_t i) {
  const Address encoded = c.encoded[source];
  return {__ldca(at<const uint16_t>(encoded + c.offsets_offset) + i),
          c.fp16_values != 0 ? __ldca(at<const uint16_t>(encoded + c.values_offset) + i)
                             : __ldca(at<const uint32_t>(encoded + c.values_offset) + i)};
}

constexpr uint32_t kCombined = kCombineTiles * kTopKTile;

/// Where a source's entries for the block's tiles lie; entries from `middle` on are the second tile's.
struct Ranges {
  uint32_t from[kSourceLimit], middle[kSourceLimit], to[kSourceLimit];
  uint8_t exponents[kSourceLimit][kCombineTiles];
};
static_assert(kCombineTiles == 2);

/// Bits of the tiles that hold an Inf or NaN.
__device__ inline uint32_t read_ranges(const TopKCombine& c, Ranges& ranges, uint32_t& report) {
  const uint32_t tile = blockIdx.x * kCombineTiles;
  uint32_t poisoned = 0;
  for (uint32_t source = threadIdx.x; source < c.sources; source += kTopKCombineThreads) {
    const auto* starts = at<const uint32_t>(c.encoded[source]);
    const auto* exponents = at<const uint8_t>(c.encoded[source] + c.exponents_offset);
    const uint32_t from = __ldca(starts + tile);
    const uint32_t middle = __ldca(starts + tile + 1);
    const uint32_t to = __ldca(starts + min(tile + 2, c.tiles));
#pragma unroll
    for (uint32_t i = 0; i < kCombineTiles; ++i) {
      ranges.exponents[source][i] = tile + i < c.tiles ? __ldca(exponents + tile + i) : 0;
      if (ranges.exponents[source][i] == 255) poisoned |= 1U << i;
    }
    const bool possible = from <= middle && middle <= to && to <= c.entries;
    if (!possible) report |= kCorrupted;
    ranges.from[source] = possible ? from : 0;
    ranges.middle[source] = possible ? middle : 0;
    ranges.to[source] = possible ? to : 0;
  }
  return poisoned;
}

/// Two tiles of the output lie in shared memory while the sources' entries are added, source after source; inside a
/// source no two entries meet. So the sum's order is the sources', whatever runs first.
template <class To>
__device__ void combine(const TopKCombine& c) {
  __shared__ float4 sum_of_four[kCombined / 4];
  auto* sum = reinterpret_cast<float*>(sum_of_four);
  __shared__ Ranges ranges;
  __shared__ uint32_t poisoned;
  const uint64_t begin = uint64_t{blockIdx.x} * kCombined;
  const auto count = static_cast<uint32_t>(min(uint64_t{kCombined}, c.elements - begin));
  uint32_t report = 0;
  if (threadIdx.x == 0) poisoned = 0;
  for (uint32_t i = threadIdx.x; i < kCombined / 4; i += kTopKCombineThreads)
    sum_of_four[i] = make_float4(0, 0, 0, 0);
  __syncthreads();
  const uint32_t found = read_ranges(c, ranges, report);
  if (found != 0) atomicOr(&poisoned, found);
  __syncthreads();

  // The first entries of several sources are under way together; they are added in turn.
  constexpr uint32_t kBatch = 4;
  for (uint32_t first = 0; first < c.sources; first += kBatch) {
    Entry entries[kBatch];
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      const uint32_t source = first + j;
      if (source >= c.sources) break;
      const uint32_t i = ranges.from[source] + threadIdx.x;
      if (i < ranges.to[source]) entries[j] = load_entry(c, source, i);
    }
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      const uint32_t source = first + j;
      if (source >= c.sources) break;
      const uint32_t middle = ranges.middle[source], to = ranges.to[source];
      const auto add = [&](const Entry& entry, uint32_t i) {
        const uint32_t second = i >= middle ? 1 : 0;
        const Unit unit(min(ranges.exponents[source][second], 254));
        const float value = c.fp16_values != 0 ? unit.decode(static_cast<uint16_t>(entry.value))
                                               : __uint_as_float(entry.value);
        const uint32_t offset = second * kTopKTile + entry.offset;
        if (entry.offset < kTopKTile && offset < count)
          sum[offset] = __fadd_rn(sum[offset], value);
        else
          report |= kCorrupted;
      };
      uint32_t i = ranges.from[source] + threadIdx.x;
      if (i < to) add(entries[j], i);
      for (i += kTopKCombineThreads; i < to; i += kTopKCombineThreads)
        add(load_entry(c, source, i), i);
      __syncthreads();
    }
  }

  auto* output = at<typename To::Bits>(c.output) + begin;
  for (uint32_t i = threadIdx.x * 4; i < count; i += kTopKCombineThreads * 4) {
    const bool finite = (poisoned >> (i / kTopKTile) & 1U) == 0;
    const float4 four = sum_of_four[i / 4];
    const float values[4] = {four.x, four.y, four.z, four.w};
    Pack<typename To::Bits, 4> out;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      out.of[e] = To::narrow(finite ? __fmul_rn(values[e], c.scale) : __uint_as_float(kNan));
    if (i + 4 <= count) {
      out.store(output + i);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (i + e < count) output[i + e] = out.of[e];
  }
  add_report(c.report, report);
}

}  // namespace

#define PACELINE_TOPK(name, Number)                                                \
  extern "C" __global__ void __launch_bounds__(kSampleThreads, 2)                  \
      paceline_topk_coarse_##name(const __grid_constant__ TopK argument) {         \
    sample_coarse<Number>(argument);                                               \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kSampleThreads, 2)                  \
      paceline_topk_fine_##name(const __grid_constant__ TopK argument) {           \
    sample_fine<Number>(argument);                                                 \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kTopKThreads, 4)                    \
      paceline_topk_select_##name(const __grid_constant__ TopK argument) {         \
    select<Number, false, false>(argument);                                        \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kTopKThreads, 3)                    \
      paceline_topk_select_sum_##name(const __grid_constant__ TopK argument) {     \
    select<Number, false, true>(argument);                                         \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kTopKThreads, 3)                    \
      paceline_topk_momentum_##name(const __grid_constant__ TopK argument) {       \
    select<Number, true, false>(argument);                                         \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kTopKThreads, 2)                    \
      paceline_topk_momentum_sum_##name(const __grid_constant__ TopK argument) {   \
    select<Number, true, true>(argument);                                          \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kGatherThreads)                     \
      paceline_topk_gather_##name(const __grid_constant__ TopK argument) {         \
    gather<Number>(argument);                                                      \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kTopKCombineThreads)                \
      paceline_topk_combine_##name(const __grid_constant__ TopKCombine argument) { \
    combine<Number>(argument);                                                     \
  }

PACELINE_TOPK(f32, F32)
PACELINE_TOPK(f16, F16)
PACELINE_TOPK(bf16, BF16)

}  // namespace paceline::device::cuda
