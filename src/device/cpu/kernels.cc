#include "device/cpu/kernels.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "device/cpu/casts.h"
#include "device/cpu/float_mode.h"
#include "device/cpu/kernels_internal.h"

namespace paceline::cpu {
namespace {

/// Above this size neither source nor destination would stay in a core's share of the cache.
constexpr std::size_t kStreamBytes = std::size_t{8} << 20;

/// x / divisor in double, rounded to odd: a later rounding to any narrower type is then the only
/// one that shows.
double divide_to_odd(double x, double divisor) {
  double quotient = x / divisor;
  if (!std::isfinite(quotient) || quotient == 0) return quotient;
  const double remainder = std::fma(-quotient, divisor, x);
  if (remainder == 0) return quotient;
  uint64_t bits = 0;
  std::memcpy(&bits, &quotient, sizeof(bits));
  if ((bits & 1) != 0) return quotient;
  // Inexact and even: the odd neighbour on the side of the true value.
  const bool away = ((remainder > 0) == (divisor > 0)) == (quotient > 0);
  bits = away ? bits + 1 : bits - 1;
  std::memcpy(&quotient, &bits, sizeof(bits));
  return quotient;
}

/// The largest integer divisor for which dividing in float32 and then rounding to `dtype` equals
/// one rounding: 2^p for p bits of precision. (A quotient of p-bit numbers is never nearer to the
/// middle between two p-bit numbers, without being on it, than float32's 24 >= 2 p + 2 bits can
/// tell; p = 8 and 11.)
double fast_divisor_limit(DType dtype) {
  if (dtype == DType::kFloat16) return 2048;
  if (dtype == DType::kBFloat16) return 256;
  return 16777216;
}

}  // namespace

void reduce_into(DType dtype, ReduceOp op, void* dst, const void* a, const void* b,
                 uint64_t elements) {
  if (elements == 0) return;
  if (op == ReduceOp::kAverage) op = ReduceOp::kSum;
  if (dtype_is_float(dtype)) {
    const FloatMode mode;
    reduce_float(dtype, op, dst, a, b, elements);
  } else {
    reduce_integer(dtype, op, dst, a, b, elements);
  }
}

void reduce(DType dtype, ReduceOp op, void* dst, const void* src, uint64_t elements) {
  reduce_into(dtype, op, dst, dst, src, elements);
}

void divide(DType dtype, void* data, double divisor, uint64_t elements) {
  if (elements == 0 || !dtype_is_float(dtype)) return;
  const FloatMode mode;
  const bool small_integer = std::abs(divisor) <= fast_divisor_limit(dtype) &&
                             divisor == std::trunc(divisor) && divisor != 0;
  if (dtype == DType::kFloat64 || small_integer) {
    divide_fast(dtype, data, divisor, elements);
    return;
  }
  auto* bytes = static_cast<std::byte*>(data);
  const std::size_t size = dtype_size(dtype);
  for (uint64_t i = 0; i < elements; ++i, bytes += size)
    store_rounded(dtype, divide_to_odd(load_wide(dtype, bytes), divisor), bytes);
}

void copy(void* dst, const void* src, std::size_t bytes) {
  if (bytes < kStreamBytes) {
    if (bytes > 0) std::memcpy(dst, src, bytes);
    return;
  }
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const std::size_t head = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
  const std::size_t body = (bytes - head) / 64 * 64;
  std::memcpy(to, from, head);
  stream_copy(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, bytes - head - body);
}

}  // namespace paceline::cpu
