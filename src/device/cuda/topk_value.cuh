// What top-k starts from at four neighbours (codec.h calls it v), and how a value is cast to fp16.
#pragma once

#include "device/cuda/device.cuh"

namespace paceline::device::cuda {

/// Four neighbours of a tensor.
template <class T, bool kWhole>
__device__ Pack<T, 4> four(const TopK& k, Address tensor, uint64_t begin) {
  if constexpr (kWhole) {
    return Pack<T, 4>::load(at<const T>(tensor) + begin);
  } else {
    Pack<T, 4> pack;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint64_t i = begin + e;
      pack.of[e] = i < k.elements ? at<const T>(tensor)[i] : T{0};
    }
    return pack;
  }
}

/// The gradient at one element, what is added to it included.
template <class From>
__device__ float gradient_at(const TopK& k, uint64_t i) {
  using Bits = typename From::Bits;
  float sum = From::widen(at<const Bits>(k.gradient)[i]);
  for (uint32_t a = 0; a < k.addend_count; ++a)
    sum = __fadd_rn(sum, From::widen(at<const Bits>(k.addends[a])[i]));
  return k.addend_count == 0 ? sum : From::widen(From::narrow(sum));
}

/// Four neighbours of each input. Loads first, arithmetic later: several are under way at a time. kSum: others are added to
/// the gradient; kWhole: the end does not lie among the four. What lies beyond it counts as zero.
template <class From, bool kMomentum, bool kSum>
struct Fresh {
  using Bits = typename From::Bits;
  Pack<Bits, 4> gradient, addend;
  Pack<float, 4> residual, velocity;

  template <bool kWhole>
  __device__ void load(const TopK& k, uint64_t begin) {
    gradient = four<Bits, kWhole>(k, k.gradient, begin);
    if constexpr (kSum) addend = four<Bits, kWhole>(k, k.addends[0], begin);
    residual.quad = make_uint4(0, 0, 0, 0);
    if (k.residual != 0) residual = four<float, kWhole>(k, k.residual, begin);
    if constexpr (kMomentum) velocity = four<float, kWhole>(k, k.velocity, begin);
  }
  /// After load(): gradient becomes the sum.
  template <bool kWhole>
  __device__ void add(const TopK& k, uint64_t begin) {
    if constexpr (kSum) {
      float sum[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sum[e] = __fadd_rn(From::widen(gradient.of[e]), From::widen(addend.of[e]));
      for (uint32_t a = 1; a < k.addend_count; ++a) {
        addend = four<Bits, kWhole>(k, k.addends[a], begin);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = __fadd_rn(sum[e], From::widen(addend.of[e]));
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) gradient.of[e] = From::narrow(sum[e]);
    }
  }
  /// velocity' = momentum · velocity + gradient · scale
  [[nodiscard]] __device__ float new_velocity(const TopK& k, int e) const {
    return __fmaf_rn(k.momentum, velocity.of[e], __fmul_rn(From::widen(gradient.of[e]), k.scale));
  }
  [[nodiscard]] __device__ float value(const TopK& k, int e) const {
    if (kMomentum) return __fadd_rn(new_velocity(k, e), residual.of[e]);
    return __fmaf_rn(From::widen(gradient.of[e]), k.scale, residual.of[e]);
  }
};

/// The power of two in which a tile's fp16 values count: see layout.h.
struct Unit {
  float unit, inverse;

  explicit __device__ Unit(uint32_t exponent) {
    const uint32_t biased = max(exponent, 29U) - 14;
    unit = __uint_as_float(biased << 23);
    inverse = __uint_as_float((254 - biased) << 23);
  }
  [[nodiscard]] __device__ float decode(uint16_t half) const {
    return __fmul_rn(F16::widen(half), unit);
  }
  [[nodiscard]] __device__ uint16_t encode(float value) const {
    uint16_t half = F16::narrow(__fmul_rn(value, inverse));
    if (magnitude_bits(decode(half)) >= kInfinity) --half;  // rounded up beyond float32
    return half;
  }
};

}  // namespace paceline::device::cuda
