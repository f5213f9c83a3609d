// What top-k starts from at four neighbours (codec.h calls it v), and how a value is cast to fp16.
#pragma once

#include "device/cuda/device.cuh"

namespace paceline::device::cuda {

/// Four neighbours of each input. Loads first, arithmetic later: several are under way at a time. What lies beyond the
/// end counts as zero.
template <class From, bool kMomentum>
struct Fresh {
  Pack<typename From::Bits, 4> gradient;
  Pack<float, 4> residual, velocity;

  __device__ void load(const TopK& k, uint64_t begin) {
    gradient =
        Pack<typename From::Bits, 4>::load(at<const typename From::Bits>(k.gradient) + begin);
    residual.quad = make_uint4(0, 0, 0, 0);
    if (k.residual != 0) residual = Pack<float, 4>::load(at<const float>(k.residual) + begin);
    if (kMomentum) velocity = Pack<float, 4>::load(at<const float>(k.velocity) + begin);
  }
  /// Where the end may lie among the four.
  __device__ void load_some(const TopK& k, uint64_t begin) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint64_t i = begin + e;
      const bool inside = i < k.elements;
      gradient.of[e] =
          inside ? at<const typename From::Bits>(k.gradient)[i] : typename From::Bits{0};
      residual.of[e] = inside && k.residual != 0 ? at<const float>(k.residual)[i] : 0.0F;
      if (kMomentum) velocity.of[e] = inside ? at<const float>(k.velocity)[i] : 0.0F;
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
