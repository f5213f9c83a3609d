// What the kernels share: number formats, packs of elements that move in one access, reports.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "device/cuda/emulation.h"
#endif

#include <cstdint>

#include "device/cuda/kernel_arguments.h"

namespace paceline::device::cuda {

// The report's bits, as in codec.h.
inline constexpr uint32_t kNonFinite = 1, kSaturated = 2, kCorrupted = 4, kTooManyRows = 8;

inline constexpr uint32_t kInfinity = 0x7F800000U;
inline constexpr uint32_t kNan = 0x7FC00000U;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFU;

#ifdef __CUDACC__
__device__ inline uint32_t magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7FFFFFFFU;
}
#endif

/// All addresses are device memory (or 0): the compiler may use the instructions for that.
template <class T>
__device__ T* at(Address address) {
  auto* pointer = reinterpret_cast<T*>(address);
  __builtin_assume(__isGlobal(pointer) != 0);
  return pointer;
}

// As in numbers.h.
struct F32 {
  using Bits = float;
  static constexpr uint32_t kOverflow = kInfinity;
  static __device__ float largest() { return __uint_as_float(0x7F7FFFFFU); }
  static __device__ float widen(float value) { return value; }
  static __device__ float narrow(float value) { return value; }
};
struct F16 {
  using Bits = uint16_t;
  static constexpr uint32_t kOverflow = 0x477FF000U;
  static __device__ float largest() { return 65504.0F; }
  static __device__ float widen(uint16_t half) { return __half2float(__ushort_as_half(half)); }
  static __device__ uint16_t narrow(float value) {
    return __half_as_ushort(__float2half_rn(value));
  }
};
struct BF16 {
  using Bits = uint16_t;
  static constexpr uint32_t kOverflow = 0x7F7F8000U;
  static __device__ float largest() { return __uint_as_float(0x7F7F0000U); }
  static __device__ float widen(uint16_t half) { return __uint_as_float(uint32_t{half} << 16); }
  static __device__ uint16_t narrow(float value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

/// What is finite and out of range becomes the largest number.
template <class Wire>
__device__ typename Wire::Bits saturated(float value, uint32_t& report) {
  const uint32_t magnitude = magnitude_bits(value);
  if (magnitude >= kInfinity) {
    report |= kNonFinite;
  } else if (magnitude >= Wire::kOverflow) {
    report |= kSaturated;
    value = copysignf(Wire::largest(), value);
  }
  return Wire::narrow(value);
}

/// `kCount` neighbours of one type, loaded and stored in one access of 4, 8 or 16 bytes (by intrinsics: plain
/// assignments were seen to be taken apart).
template <class Bits, int kCount>
struct Pack {
  static constexpr int kBytes = kCount * sizeof(Bits);
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  union {
    Bits of[kCount];
    uint32_t word;
    uint2 words;
    uint4 quad;
  };

  static __device__ Pack load(const Bits* from) {
    Pack pack;
    if constexpr (kBytes == 16) pack.quad = __ldca(reinterpret_cast<const uint4*>(from));
    if constexpr (kBytes == 8) pack.words = __ldca(reinterpret_cast<const uint2*>(from));
    if constexpr (kBytes == 4) pack.word = __ldca(reinterpret_cast<const uint32_t*>(from));
    return pack;
  }
  __device__ void store(Bits* to) const {
    if constexpr (kBytes == 16) __stwb(reinterpret_cast<uint4*>(to), quad);
    if constexpr (kBytes == 8) __stwb(reinterpret_cast<uint2*>(to), words);
    if constexpr (kBytes == 4) __stwb(reinterpret_cast<uint32_t*>(to), word);
  }
};

/// Called by whole warps.
__device__ inline void add_report(Address report, uint32_t bits) {
  bits = __reduce_or_sync(kAllLanes, bits);
  if (bits != 0 && report != 0 && threadIdx.x % 32 == 0) atomicOr(at<uint32_t>(report), bits);
}

}  // namespace paceline::device::cuda
