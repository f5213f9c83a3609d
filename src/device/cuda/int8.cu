// int8 in blocks of kInt8Block elements with a scale each: a warp takes a block, all of it in registers.
#include "device/cuda/device.cuh"

namespace paceline::device::cuda {
namespace {

/// Blocks whose largest magnitude is below 2^-100 send zeros: 1 / scale would overflow.
constexpr uint32_t kTiny = 0x0D800000U;
constexpr int kRounds = kInt8Block / (32 * 4);

struct Scale {
  float step, inverse;
  bool finite;
};

__device__ Scale scale_of(uint32_t largest) {
  if (largest >= kInfinity) return {__uint_as_float(kNan), 0.0F, false};
  if (largest < kTiny) return {0.0F, 0.0F, true};
  const float step = __fdiv_rn(__uint_as_float(largest), 127.0F);
  return {step, __fdiv_rn(1.0F, step), true};
}

__device__ int quantised(float value, const Scale& scale) {
  if (!scale.finite) return 0;
  return max(-127, min(127, __float2int_rn(__fmul_rn(value, scale.inverse))));
}

/// A lane's share of a block: four neighbours in each of kRounds runs of 128.
template <class From, bool kWhole>
struct Share {
  const Int8Encode& a;
  uint64_t begin;  ///< of its elements in the tensor
  float v[kRounds][4];

  __device__ Share(const Int8Encode& argument, uint64_t first) : a(argument), begin(first) {
    Pack<typename From::Bits, 4> g[kRounds];
    Pack<float, 4> residual[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      g[r] = load<typename From::Bits>(a.gradient, r);
      residual[r].quad = make_uint4(0, 0, 0, 0);
      if (a.residual != 0) residual[r] = load<float>(a.residual, r);
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        v[r][e] = __fmaf_rn(From::widen(g[r].of[e]), a.scale, residual[r].of[e]);
  }
  [[nodiscard]] __device__ bool inside(int r, int e) const {
    return kWhole || begin + r * 128 + e < a.elements;
  }
  template <class Bits>
  [[nodiscard]] __device__ Pack<Bits, 4> load(Address from, int r) const {
    const Bits* here = at<const Bits>(from) + begin + r * 128;
    Pack<Bits, 4> pack;
    if constexpr (kWhole) {
      pack = Pack<Bits, 4>::load(here);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) pack.of[e] = inside(r, e) ? here[e] : Bits{0};
    }
    return pack;
  }
  [[nodiscard]] __device__ uint32_t largest() const {
    uint32_t bits = 0;
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e) bits = max(bits, magnitude_bits(v[r][e]));
    return __reduce_max_sync(kAllLanes, bits);
  }
  __device__ void store(const Scale& scale) const {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      Pack<int8_t, 4> out;
      Pack<float, 4> left;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int steps = quantised(v[r][e], scale);
        out.of[e] = static_cast<int8_t>(steps);
        left.of[e] = __fsub_rn(v[r][e], __fmul_rn(static_cast<float>(steps), scale.step));
      }
      if (!scale.finite && a.residual != 0) left = load<float>(a.residual, r);
      int8_t* values = at<int8_t>(a.values) + begin + r * 128;
      float* next = at<float>(a.next_residual) + begin + r * 128;
      if constexpr (kWhole) {
        out.store(values);
        if (a.residual != 0) left.store(next);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (begin + r * 128 + e < (a.elements + 15) / 16 * 16) values[e] = out.of[e];
          if (a.residual != 0 && inside(r, e)) next[e] = left.of[e];
        }
      }
    }
  }
};

template <class From, bool kWhole>
__device__ void encode_block(const Int8Encode& a, uint64_t block, uint64_t blocks) {
  const uint32_t lane = threadIdx.x % 32;
  const Share<From, kWhole> share(a, block * kInt8Block + lane * 4);
  const Scale scale = scale_of(share.largest());
  float* scales = at<float>(a.scales);
  if (lane == 0) scales[block] = scale.step;
  const uint64_t unused =
      blocks + lane;  // zeros behind the last scale, up to a multiple of 16 bytes
  if (block + 1 == blocks && unused / 4 == (blocks - 1) / 4) scales[unused] = 0;
  add_report(a.report, scale.finite ? 0 : kNonFinite);
  share.store(scale);
}

template <class From>
__device__ void encode(const Int8Encode& a) {
  const uint64_t block = uint64_t{blockIdx.x} * (kInt8Threads / 32) + threadIdx.x / 32;
  const uint64_t blocks = (a.elements + kInt8Block - 1) / kInt8Block;
  if (block >= blocks) return;
  if ((block + 1) * kInt8Block <= a.elements)
    encode_block<From, true>(a, block, blocks);
  else
    encode_block<From, false>(a, block, blocks);
}

template <class To>
__device__ void combine(const Int8Combine& a) {
  constexpr int kCount = 8;
  constexpr int kTurns = kDenseTile / (kDenseThreads * kCount);
  auto* output = at<typename To::Bits>(a.output);
  for (uint64_t base = uint64_t{blockIdx.x} * kDenseTile; base < a.elements;
       base += uint64_t{gridDim.x} * kDenseTile) {
    if (base + kDenseTile <= a.elements) {
      float sum[kTurns][kCount];
#pragma unroll 4
      for (uint32_t source = 0; source < a.sources; ++source) {
        const float* scales = at<const float>(a.encoded[source]);
        const int8_t* values = at<const int8_t>(a.encoded[source] + a.values_offset);
        Pack<int8_t, kCount> in[kTurns];
        float step[kTurns];
#pragma unroll
        for (int r = 0; r < kTurns; ++r) {
          const uint64_t i = base + (r * kDenseThreads + threadIdx.x) * kCount;
          in[r] = Pack<int8_t, kCount>::load(values + i);
          step[r] = scales[i / kInt8Block];
        }
#pragma unroll
        for (int r = 0; r < kTurns; ++r)
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
            const float value = __fmul_rn(static_cast<float>(in[r].of[e]), step[r]);
            sum[r][e] = source == 0 ? value : __fadd_rn(sum[r][e], value);
          }
      }
#pragma unroll
      for (int r = 0; r < kTurns; ++r) {
#pragma unroll
        for (int half = 0; half < kCount; half += 4) {
          Pack<typename To::Bits, 4> out;
#pragma unroll
          for (int e = 0; e < 4; ++e) out.of[e] = To::narrow(__fmul_rn(sum[r][half + e], a.scale));
          out.store(output + base + (r * kDenseThreads + threadIdx.x) * kCount + half);
        }
      }
    } else {
      for (uint64_t i = base + threadIdx.x; i < a.elements; i += kDenseThreads) {
        float sum = 0;
        for (uint32_t source = 0; source < a.sources; ++source) {
          const int8_t steps = at<const int8_t>(a.encoded[source] + a.values_offset)[i];
          const float value = __fmul_rn(static_cast<float>(steps),
                                        at<const float>(a.encoded[source])[i / kInt8Block]);
          sum = source == 0 ? value : __fadd_rn(sum, value);
        }
        output[i] = To::narrow(__fmul_rn(sum, a.scale));
      }
    }
  }
}

}  // namespace

#define PACELINE_INT8(name, Number)                                                \
  extern "C" __global__ void __launch_bounds__(kInt8Threads)                       \
      paceline_int8_encode_##name(const __grid_constant__ Int8Encode argument) {   \
    encode<Number>(argument);                                                      \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(kDenseThreads)                      \
      paceline_int8_combine_##name(const __grid_constant__ Int8Combine argument) { \
    combine<Number>(argument);                                                     \
  }

PACELINE_INT8(f32, F32)
PACELINE_INT8(f16, F16)
PACELINE_INT8(bf16, BF16)

}  // namespace paceline::device::cuda
