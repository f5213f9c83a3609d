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

/// A tile of the output lies in shared memory while the sources' entries are added, source after source; inside a
/// source no two entries meet. So the sum's order is the sources', whatever runs first.
template <class To>
__device__ void combine(const TopKCombine& c) {
  __shared__ alignas(16) float sum[kTopKTile];
  __shared__ uint32_t from[kSourceLimit], to[kSourceLimit];
  __shared__ uint8_t exponents[kSourceLimit];
  const uint32_t tile = blockIdx.x;
  const uint64_t begin = uint64_t{tile} * kTopKTile;
  const auto count = static_cast<uint32_t>(min(uint64_t{kTopKTile}, c.elements - begin));
  uint32_t report = 0;
  bool finite = true;
  for (uint32_t source = threadIdx.x; source < c.sources; source += kTopKCombineThreads) {
    const auto* starts = at<const uint32_t>(c.encoded[source]);
    from[source] = __ldca(starts + tile);
    to[source] = __ldca(starts + tile + 1);
    exponents[source] = __ldca(at<const uint8_t>(c.encoded[source] + c.exponents_offset) + tile);
    if (exponents[source] == 255) finite = false;
    if (from[source] > to[source] || to[source] > c.entries) {
      report |= kCorrupted;
      from[source] = to[source] = 0;
    }
  }
  for (uint32_t i = threadIdx.x; i < kTopKTile / 4; i += kTopKCombineThreads)
    reinterpret_cast<float4*>(sum)[i] = make_float4(0, 0, 0, 0);
  finite = __syncthreads_and(finite ? 1 : 0) != 0;

  // The first entries of several sources are under way together; they are added in turn.
  constexpr uint32_t kBatch = 4;
  for (uint32_t first = 0; first < c.sources; first += kBatch) {
    Entry entries[kBatch];
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      const uint32_t source = first + j;
      if (source >= c.sources) break;
      const uint32_t i = from[source] + threadIdx.x;
      if (i < to[source]) entries[j] = load_entry(c, source, i);
    }
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      const uint32_t source = first + j;
      if (source >= c.sources) break;
      const Unit unit(min(exponents[source], 254));
      const auto add = [&](const Entry& entry) {
        const float value = c.fp16_values != 0 ? unit.decode(static_cast<uint16_t>(entry.value))
                                               : __uint_as_float(entry.value);
        if (entry.offset < count)
          sum[entry.offset] = __fadd_rn(sum[entry.offset], value);
        else
          report |= kCorrupted;
      };
      uint32_t i = from[source] + threadIdx.x;
      if (i < to[source]) add(entries[j]);
      for (i += kTopKCombineThreads; i < to[source]; i += kTopKCombineThreads)
        add(load_entry(c, source, i));
      __syncthreads();
    }
  }

  auto* output = at<typename To::Bits>(c.output) + begin;
  const float poison = __uint_as_float(finite ? 0 : kNan);
  for (uint32_t i = threadIdx.x * 4; i < count; i += kTopKCombineThreads * 4) {
    const float4 four = *reinterpret_cast<const float4*>(sum + i);
    const float values[4] = {four.x, four.y, four.z, four.w};
    Pack<typename To::Bits, 4> out;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      out.of[e] = To::narrow(finite ? __fmul_rn(values[e], c.scale) : poison);
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
  extern "C" __global__ void __launch_bounds__(kTopKThreads, 2)                    \
      paceline_topk_select_##name(const __grid_constant__ TopK argument) {         \
    select<Number, false>(argument);                                               \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kTopKThreads, 1)                    \
      paceline_topk_momentum_##name(const __grid_constant__ TopK argument) {       \
    select<Number, true>(argument);                                                \
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
