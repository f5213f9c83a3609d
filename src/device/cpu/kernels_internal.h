// What kernels.cc hands on to the files that hold the SIMD loops. `op` is never kAverage here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace paceline::cpu {

void reduce_float(DType dtype, ReduceOp op, void* dst, const void* a, const void* b,
                  uint64_t elements);
void reduce_integer(DType dtype, ReduceOp op, void* dst, const void* a, const void* b,
                    uint64_t elements);
/// data[i] / divisor where the division in float32 (float64) followed by the rounding to dtype is
/// correctly rounded.
void divide_fast(DType dtype, void* data, double divisor, uint64_t elements);
/// Stores that go round the cache. dst is 64-byte aligned, bytes a multiple of 64.
void stream_copy(void* dst, const void* src, std::size_t bytes);

}  // namespace paceline::cpu
