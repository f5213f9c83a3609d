// Element-wise kernels on the CPU: SIMD through Highway, dispatched at run time, bit-equal on every
// target (no FMA-dependent sums, no reassociation).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.h"

namespace paceline::cpu {

/// dst[i] = op(dst[i], src[i]) for `elements` elements of `dtype`; kAverage reduces as kSum. fp16
/// and bf16 add in float32 and round once to nearest even. Buffers need the element's alignment
/// only, and don't overlap.
void reduce(DType dtype, ReduceOp op, void* dst, const void* src, uint64_t elements);
/// dst[i] = op(a[i], b[i]).
void reduce_into(DType dtype, ReduceOp op, void* dst, const void* a, const void* b,
                 uint64_t elements);
/// data[i] = data[i] / divisor, rounded once (floating types only).
void divide(DType dtype, void* data, double divisor, uint64_t elements);
/// memcpy that goes round the cache when the copy is larger than it.
void copy(void* dst, const void* src, std::size_t bytes);

/// The SIMD target in use: "AVX3", "AVX2", "SSE4", "NEON" …
const char* simd_target();

}  // namespace paceline::cpu
