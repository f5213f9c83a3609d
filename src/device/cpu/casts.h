// Casts between float32 and 16-bit floats, with a scale and a reduction fused in: one pass over
// memory each.
//
// Rounding is to nearest even; denormals are kept; what is beyond the range becomes infinite; a NaN
// becomes the canonical NaN. `half` is kFloat16 or kBFloat16. Buffers need their element's
// alignment only and don't overlap. Bits are the same on every SIMD target.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace paceline::cpu {

/// dst[i] = half(src[i] · scale); the product is rounded to float32 first (exact for powers of two
/// in range).
void narrow(DType half, void* dst, const float* src, float scale, uint64_t elements);
/// dst[i] = float32(src[i]) / scale, rounded once.
void widen(DType half, float* dst, const void* src, float scale, uint64_t elements);
/// dst[i] = op(dst[i], float32(src[i]) / scale): the quotient is rounded, then the reduction.
void widen_reduce(DType half, ReduceOp op, float* dst, const void* src, float scale,
                  uint64_t elements);

// One element, without SIMD: the reference for the kernels' tests and the slow paths' tool.

/// The element at `p` as a double (exact). Floating types only.
double load_wide(DType dtype, const void* p);
/// Rounds once from double to `dtype`, to nearest even; NaN becomes canonical. Floating types only.
void store_rounded(DType dtype, double value, void* p);

}  // namespace paceline::cpu
