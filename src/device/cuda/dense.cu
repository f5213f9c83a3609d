// Copies and casts with a scale, and their decoding: pure streams over memory.
#include "device/cuda/device.cuh"

namespace paceline::device::cuda {
namespace {

/// Elements in one access of the wider type: 16 bytes of float32 beside 8 of a half, 16 beside 16.
template <class A, class B>
constexpr int kUnit = sizeof(typename A::Bits) == 4 || sizeof(typename B::Bits) == 4 ? 4 : 8;

template <class From, class Wire>
__device__ void encode(const DenseEncode& a) {
  constexpr int kCount = kUnit<From, Wire>;
  constexpr int kRounds = kDenseTile / (kDenseThreads * kCount);
  using In = Pack<typename From::Bits, kCount>;
  using Out = Pack<typename Wire::Bits, kCount>;
  const auto* gradient = at<const typename From::Bits>(a.gradient);
  auto* encoded = at<typename Wire::Bits>(a.encoded);
  uint32_t report = 0;
  for (uint64_t base = uint64_t{blockIdx.x} * kDenseTile; base < a.elements;
       base += uint64_t{gridDim.x} * kDenseTile) {
    if (base + kDenseTile <= a.elements) {
      In in[kRounds];
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
        in[r] = In::load(gradient + base + (r * kDenseThreads + threadIdx.x) * kCount);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        Out out;
#pragma unroll
        for (int e = 0; e < kCount; ++e)
          out.of[e] = saturated<Wire>(__fmul_rn(From::widen(in[r].of[e]), a.scale), report);
        out.store(encoded + base + (r * kDenseThreads + threadIdx.x) * kCount);
      }
    } else {
      constexpr uint64_t kPad = 16 / sizeof(typename Wire::Bits);
      const uint64_t end = (a.elements + kPad - 1) / kPad * kPad;
      for (uint64_t i = base + threadIdx.x; i < end; i += kDenseThreads)
        encoded[i] = i < a.elements
                         ? saturated<Wire>(__fmul_rn(From::widen(gradient[i]), a.scale), report)
                         : typename Wire::Bits{0};
    }
  }
  add_report(a.report, report);
}

template <class Wire, class To>
__device__ void combine(const DenseCombine& a) {
  constexpr int kCount = kUnit<Wire, To>;
  constexpr int kRounds = kDenseTile / (kDenseThreads * kCount);
  using In = Pack<typename Wire::Bits, kCount>;
  using Out = Pack<typename To::Bits, kCount>;
  auto* output = at<typename To::Bits>(a.output);
  for (uint64_t base = uint64_t{blockIdx.x} * kDenseTile; base < a.elements;
       base += uint64_t{gridDim.x} * kDenseTile) {
    if (base + kDenseTile <= a.elements) {
      float sum[kRounds][kCount];
#pragma unroll 2
      for (uint32_t source = 0; source < a.sources; ++source) {
        const auto* encoded = at<const typename Wire::Bits>(a.encoded[source]) + base;
        In in[kRounds];
#pragma unroll
        for (int r = 0; r < kRounds; ++r)
          in[r] = In::load(encoded + (r * kDenseThreads + threadIdx.x) * kCount);
#pragma unroll
        for (int r = 0; r < kRounds; ++r)
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
            const float value = Wire::widen(in[r].of[e]);
            sum[r][e] = source == 0 ? value : __fadd_rn(sum[r][e], value);
          }
      }
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        Out out;
#pragma unroll
        for (int e = 0; e < kCount; ++e) out.of[e] = To::narrow(__fmul_rn(sum[r][e], a.scale));
        out.store(output + base + (r * kDenseThreads + threadIdx.x) * kCount);
      }
    } else {
      for (uint64_t i = base + threadIdx.x; i < a.elements; i += kDenseThreads) {
        float sum = Wire::widen(at<const typename Wire::Bits>(a.encoded[0])[i]);
        for (uint32_t source = 1; source < a.sources; ++source)
          sum = __fadd_rn(sum, Wire::widen(at<const typename Wire::Bits>(a.encoded[source])[i]));
        output[i] = To::narrow(__fmul_rn(sum, a.scale));
      }
    }
  }
}

}  // namespace

#define PACELINE_ENCODE(name, From, Wire)                                    \
  extern "C" __global__ void __launch_bounds__(kDenseThreads)                \
      paceline_encode_##name(const __grid_constant__ DenseEncode argument) { \
    encode<From, Wire>(argument);                                            \
  }
#define PACELINE_COMBINE(name, Wire, To)                                       \
  extern "C" __global__ void __launch_bounds__(kDenseThreads)                  \
      paceline_combine_##name(const __grid_constant__ DenseCombine argument) { \
    combine<Wire, To>(argument);                                               \
  }

PACELINE_ENCODE(f32_f32, F32, F32)
PACELINE_ENCODE(f32_f16, F32, F16)
PACELINE_ENCODE(f32_bf16, F32, BF16)
PACELINE_ENCODE(f16_f16, F16, F16)
PACELINE_ENCODE(f16_bf16, F16, BF16)
PACELINE_ENCODE(bf16_f16, BF16, F16)
PACELINE_ENCODE(bf16_bf16, BF16, BF16)
PACELINE_COMBINE(f32_f32, F32, F32)
PACELINE_COMBINE(f16_f32, F16, F32)
PACELINE_COMBINE(bf16_f32, BF16, F32)
PACELINE_COMBINE(f16_f16, F16, F16)
PACELINE_COMBINE(bf16_f16, BF16, F16)
PACELINE_COMBINE(f16_bf16, F16, BF16)
PACELINE_COMBINE(bf16_bf16, BF16, BF16)

}  // namespace paceline::device::cuda
