#include "device/cpu/casts.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/casts.cc"
#include <hwy/foreach_target.h>
//
#include "device/cpu/formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace paceline::cpu::HWY_NAMESPACE {

using F32 = FloatFormat<float>;

template <class Half>
void narrow_format(void* dst, const float* src, float scale, std::size_t elements) {
  auto* out = static_cast<uint16_t*>(dst);
  if (scale == 1.0f)
    return map_one<Half, F32>(out, src, elements, [](auto, auto x) HWY_ATTR { return x; });
  const auto by = hn::Set(F32::D(), scale);
  map_one<Half, F32>(out, src, elements, [by](auto, auto x) HWY_ATTR { return hn::Mul(x, by); });
}

template <class Half>
void widen_format(float* dst, const void* src, float scale, std::size_t elements) {
  const auto* in = static_cast<const uint16_t*>(src);
  if (scale == 1.0f)
    return map_one<F32, Half>(dst, in, elements, [](auto, auto x) HWY_ATTR { return x; });
  const auto by = hn::Set(F32::D(), scale);
  map_one<F32, Half>(dst, in, elements, [by](auto, auto x) HWY_ATTR { return hn::Div(x, by); });
}

template <class Half, class Op>
void widen_reduce_format(float* dst, const void* src, float scale, std::size_t elements) {
  const auto* in = static_cast<const uint16_t*>(src);
  if (scale == 1.0f)
    return map_two<F32, Half>(dst, dst, in, elements,
                              [](auto d, auto x, auto y) HWY_ATTR { return Op::apply(d, x, y); });
  const auto by = hn::Set(F32::D(), scale);
  map_two<F32, Half>(dst, dst, in, elements, [by](auto d, auto x, auto y) HWY_ATTR {
    return Op::apply(d, x, hn::Div(y, by));
  });
}

template <class Half>
void widen_reduce_op(ReduceOp op, float* dst, const void* src, float scale, std::size_t elements) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return widen_reduce_format<Half, SumOp>(dst, src, scale, elements);
    case ReduceOp::kMin:
      return widen_reduce_format<Half, MinOp>(dst, src, scale, elements);
    case ReduceOp::kMax:
      return widen_reduce_format<Half, MaxOp>(dst, src, scale, elements);
    case ReduceOp::kProduct:
      return widen_reduce_format<Half, ProductOp>(dst, src, scale, elements);
  }
}

void narrow_impl(bool bf16, void* dst, const float* src, float scale, std::size_t elements) {
  if (bf16) return narrow_format<BFloat16Format>(dst, src, scale, elements);
  narrow_format<Float16Format>(dst, src, scale, elements);
}

void widen_impl(bool bf16, float* dst, const void* src, float scale, std::size_t elements) {
  if (bf16) return widen_format<BFloat16Format>(dst, src, scale, elements);
  widen_format<Float16Format>(dst, src, scale, elements);
}

void widen_reduce_impl(bool bf16, ReduceOp op, float* dst, const void* src, float scale,
                       std::size_t elements) {
  if (bf16) return widen_reduce_op<BFloat16Format>(op, dst, src, scale, elements);
  widen_reduce_op<Float16Format>(op, dst, src, scale, elements);
}

}  // namespace paceline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <bit>
#include <cmath>
#include <limits>

#include "device/cpu/float_mode.h"

namespace paceline::cpu {
HWY_EXPORT(narrow_impl);
HWY_EXPORT(widen_impl);
HWY_EXPORT(widen_reduce_impl);

void narrow(DType half, void* dst, const float* src, float scale, uint64_t elements) {
  const FloatMode mode;
  HWY_DYNAMIC_DISPATCH(narrow_impl)(half == DType::kBFloat16, dst, src, scale, elements);
}

void widen(DType half, float* dst, const void* src, float scale, uint64_t elements) {
  const FloatMode mode;
  HWY_DYNAMIC_DISPATCH(widen_impl)(half == DType::kBFloat16, dst, src, scale, elements);
}

void widen_reduce(DType half, ReduceOp op, float* dst, const void* src, float scale,
                  uint64_t elements) {
  const FloatMode mode;
  HWY_DYNAMIC_DISPATCH(widen_reduce_impl)
  (half == DType::kBFloat16, op, dst, src, scale, elements);
}

namespace {

/// A binary format with `mantissa` stored bits and exponents from `lowest` (the exponent of
/// denormals) to `highest`.
struct Layout {
  int mantissa;
  int lowest;
  int highest;
};
constexpr Layout kFloat16{10, -14, 15};
constexpr Layout kBFloat16{7, -126, 127};

double decode(const Layout& layout, uint16_t bits) {
  const int exponent = (bits & 0x7FFF) >> layout.mantissa;
  const int fraction = bits & ((1 << layout.mantissa) - 1);
  double magnitude = 0;
  if (exponent == layout.highest - layout.lowest + 2)
    magnitude = fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                              : std::numeric_limits<double>::infinity();
  else if (exponent == 0)
    magnitude = std::ldexp(fraction, layout.lowest - layout.mantissa);
  else
    magnitude = std::ldexp(fraction + (1 << layout.mantissa),
                           layout.lowest - 1 + exponent - layout.mantissa);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

uint16_t encode(const Layout& layout, double value) {
  const int all_ones = layout.highest - layout.lowest + 2;
  if (std::isnan(value))
    return static_cast<uint16_t>((all_ones << layout.mantissa) | (1 << (layout.mantissa - 1)));
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(value);
  const auto infinity = static_cast<uint16_t>(sign | (all_ones << layout.mantissa));
  if (std::isinf(magnitude)) return infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), layout.lowest);
  if (exponent > layout.highest) return infinity;
  // In units of the last place; nearbyint rounds to nearest even. A carry into the exponent does
  // what it should, up to infinity.
  const auto units =
      static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, layout.mantissa - exponent)));
  const uint32_t base = static_cast<uint32_t>(exponent - layout.lowest) << layout.mantissa;
  return static_cast<uint16_t>(sign | (base + units));
}

}  // namespace

double load_wide(DType dtype, const void* p) {
  if (dtype == DType::kFloat64) {
    double value = 0;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, p, sizeof(bits));
  return decode(dtype == DType::kFloat16 ? kFloat16 : kBFloat16, bits);
}

void store_rounded(DType dtype, double value, void* p) {
  if (std::isnan(value)) value = std::numeric_limits<double>::quiet_NaN();
  if (dtype == DType::kFloat64) {
    std::memcpy(p, &value, sizeof(value));
  } else if (dtype == DType::kFloat32) {
    const auto narrow = static_cast<float>(value);
    std::memcpy(p, &narrow, sizeof(narrow));
  } else {
    const uint16_t bits = encode(dtype == DType::kFloat16 ? kFloat16 : kBFloat16, value);
    std::memcpy(p, &bits, sizeof(bits));
  }
}

}  // namespace paceline::cpu
#endif
