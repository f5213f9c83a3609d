// CUDA's language on the host, as far as the kernels of this folder use it: the .cu files compile as C++ and run block
// by block, so that their logic is tested where there is no GPU. For tests; clear rather than fast.
//
// The threads of a block are fibers of one thread. They run in a random order (seeded) until each comes to a barrier or
// to an operation of its warp; blocks run one after the other, in a random order too. A missing barrier shows as a
// result that depends on the seed; a barrier that not all reach ends the program with a sentence.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include "device/cuda/numbers.h"

namespace paceline::device::cuda::emulation {

/// Runs `kernel` for each thread of the grid.
void run(uint32_t blocks, uint32_t threads, uint32_t seed, const std::function<void()>& kernel);

/// All threads of the block (or of the warp) that have not returned come here before one goes on.
void block_barrier();
void warp_barrier();
/// Every lane gives a value and gets all 32, its own warp's.
const uint32_t* exchange(uint32_t value);

}  // namespace paceline::device::cuda::emulation

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __isGlobal(pointer) 1
#ifndef __clang__
#define __builtin_assume(condition)
#endif

struct EmulatedIndex {
  uint32_t x;
};
inline EmulatedIndex threadIdx, blockIdx, gridDim;  // NOLINT: CUDA's names

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class A, class B>
auto min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}
template <class A, class B>
auto max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) > static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}

inline uint32_t __float_as_uint(float value) { return paceline::device::cuda::bits_of(value); }
inline float __uint_as_float(uint32_t bits) { return paceline::device::cuda::float_of(bits); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }

struct EmulatedHalf {
  uint16_t bits;
};
inline EmulatedHalf __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(EmulatedHalf half) { return half.bits; }
inline uint16_t __bfloat16_as_ushort(EmulatedHalf half) { return half.bits; }
inline float __half2float(EmulatedHalf half) {
  return paceline::device::cuda::Float16::widen(half.bits);
}
inline EmulatedHalf __float2half_rn(float value) {
  return {paceline::device::cuda::Float16::narrow(value)};
}
inline EmulatedHalf __float2bfloat16_rn(float value) {
  return {paceline::device::cuda::BFloat16::narrow(value)};
}

template <class T>
T __ldca(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
void __stwb(T* to, T value) {
  *to = value;
}
template <class T>
T atomicAdd(T* to, std::type_identity_t<T> value) {
  const T before = *to;
  *to += value;
  return before;
}
template <class T>
T atomicOr(T* to, std::type_identity_t<T> value) {
  const T before = *to;
  *to |= value;
  return before;
}

inline void __threadfence() {}
inline void __syncthreads() { paceline::device::cuda::emulation::block_barrier(); }
inline void __syncwarp() { paceline::device::cuda::emulation::warp_barrier(); }
inline uint32_t __ballot_sync(uint32_t /*mask*/, bool value) {
  const uint32_t* all = paceline::device::cuda::emulation::exchange(value ? 1 : 0);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= all[lane] << lane;
  return bits;
}
inline bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) == ~0U; }
inline uint32_t __reduce_add_sync(uint32_t /*mask*/, uint32_t value) {
  const uint32_t* all = paceline::device::cuda::emulation::exchange(value);
  uint32_t sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += all[lane];
  return sum;
}
inline uint32_t __reduce_max_sync(uint32_t /*mask*/, uint32_t value) {
  const uint32_t* all = paceline::device::cuda::emulation::exchange(value);
  uint32_t most = 0;
  for (int lane = 0; lane < 32; ++lane) most = max(most, all[lane]);
  return most;
}
inline uint32_t __reduce_or_sync(uint32_t /*mask*/, uint32_t value) {
  const uint32_t* all = paceline::device::cuda::emulation::exchange(value);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= all[lane];
  return bits;
}
inline uint32_t __shfl_sync(uint32_t /*mask*/, uint32_t value, int lane) {
  return paceline::device::cuda::emulation::exchange(value)[lane];
}
inline uint32_t __shfl_up_sync(uint32_t /*mask*/, uint32_t value, uint32_t step) {
  const uint32_t* all = paceline::device::cuda::emulation::exchange(value);
  const uint32_t lane = threadIdx.x % 32;
  return lane >= step ? all[lane - step] : value;
}
