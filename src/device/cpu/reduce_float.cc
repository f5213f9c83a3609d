// Reductions and division of fp16, bf16, float32, float64: compiled once per SIMD target.
#include "device/cpu/kernels_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/reduce_float.cc"
#include <hwy/foreach_target.h>
//
#include "device/cpu/formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace paceline::cpu::HWY_NAMESPACE {

template <class Format, class Op>
void reduce_format(void* dst, const void* a, const void* b, std::size_t elements) {
  using M = typename Format::Memory;
  map_two<Format, Format>(static_cast<M*>(dst), static_cast<const M*>(a), static_cast<const M*>(b),
                          elements,
                          [](auto d, auto x, auto y) HWY_ATTR { return Op::apply(d, x, y); });
}

template <class Format>
void reduce_op(ReduceOp op, void* dst, const void* a, const void* b, std::size_t elements) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return reduce_format<Format, SumOp>(dst, a, b, elements);
    case ReduceOp::kMin:
      return reduce_format<Format, MinOp>(dst, a, b, elements);
    case ReduceOp::kMax:
      return reduce_format<Format, MaxOp>(dst, a, b, elements);
    case ReduceOp::kProduct:
      return reduce_format<Format, ProductOp>(dst, a, b, elements);
  }
}

void reduce_float_impl(DType dtype, ReduceOp op, void* dst, const void* a, const void* b,
                       std::size_t elements) {
  switch (dtype) {
    case DType::kFloat32:
      return reduce_op<FloatFormat<float>>(op, dst, a, b, elements);
    case DType::kFloat64:
      return reduce_op<FloatFormat<double>>(op, dst, a, b, elements);
    case DType::kFloat16:
      return reduce_op<Float16Format>(op, dst, a, b, elements);
    case DType::kBFloat16:
      return reduce_op<BFloat16Format>(op, dst, a, b, elements);
    default:
      return;
  }
}

template <class Format>
void divide_format(void* data, double divisor, std::size_t elements) {
  using M = typename Format::Memory;
  using T = hn::TFromD<typename Format::D>;
  const typename Format::D d;
  const auto by = hn::Set(d, static_cast<T>(divisor));
  auto* p = static_cast<M*>(data);
  map_one<Format, Format>(p, p, elements, [by](auto, auto x) HWY_ATTR { return hn::Div(x, by); });
}

void divide_impl(DType dtype, void* data, double divisor, std::size_t elements) {
  switch (dtype) {
    case DType::kFloat32:
      return divide_format<FloatFormat<float>>(data, divisor, elements);
    case DType::kFloat64:
      return divide_format<FloatFormat<double>>(data, divisor, elements);
    case DType::kFloat16:
      return divide_format<Float16Format>(data, divisor, elements);
    case DType::kBFloat16:
      return divide_format<BFloat16Format>(data, divisor, elements);
    default:
      return;
  }
}

}  // namespace paceline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace paceline::cpu {
HWY_EXPORT(reduce_float_impl);
HWY_EXPORT(divide_impl);

void reduce_float(DType dtype, ReduceOp op, void* dst, const void* a, const void* b,
                  uint64_t elements) {
  HWY_DYNAMIC_DISPATCH(reduce_float_impl)(dtype, op, dst, a, b, elements);
}

void divide_fast(DType dtype, void* data, double divisor, uint64_t elements) {
  HWY_DYNAMIC_DISPATCH(divide_impl)(dtype, data, divisor, elements);
}
}  // namespace paceline::cpu
#endif
