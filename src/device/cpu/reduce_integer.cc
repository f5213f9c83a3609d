// Reductions of integers and bool, and the streaming copy: compiled once per SIMD target. Integers
// wrap.
#include <hwy/cache_control.h>

#include "device/cpu/kernels_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/reduce_integer.cc"
#include <hwy/foreach_target.h>
//
#include "device/cpu/formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace paceline::cpu::HWY_NAMESPACE {

template <class T, class Op>
void reduce_type(void* dst, const void* a, const void* b, std::size_t elements) {
  using Format = IntegerFormat<T>;
  map_two<Format, Format>(static_cast<T*>(dst), static_cast<const T*>(a), static_cast<const T*>(b),
                          elements,
                          [](auto d, auto x, auto y) HWY_ATTR { return Op::apply(d, x, y); });
}

/// Not every target multiplies vectors of 8-bit and 64-bit lanes. Unsigned 64-bit arithmetic wraps
/// as wanted.
template <class T>
void product_type(void* dst, const void* a, const void* b, std::size_t elements) {
  auto* out = static_cast<T*>(dst);
  const auto* x = static_cast<const T*>(a);
  const auto* y = static_cast<const T*>(b);
  for (std::size_t i = 0; i < elements; ++i)
    out[i] = static_cast<T>(static_cast<uint64_t>(x[i]) * static_cast<uint64_t>(y[i]));
}

template <class T>
void reduce_integer_op(ReduceOp op, void* dst, const void* a, const void* b, std::size_t elements) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return reduce_type<T, SumOp>(dst, a, b, elements);
    case ReduceOp::kMin:
      return reduce_type<T, MinOp>(dst, a, b, elements);
    case ReduceOp::kMax:
      return reduce_type<T, MaxOp>(dst, a, b, elements);
    case ReduceOp::kProduct:
      return product_type<T>(dst, a, b, elements);
  }
}

void reduce_integer_impl(DType dtype, ReduceOp op, void* dst, const void* a, const void* b,
                         std::size_t elements) {
  switch (dtype) {
    case DType::kInt8:
      return reduce_integer_op<int8_t>(op, dst, a, b, elements);
    case DType::kUInt8:
      return reduce_integer_op<uint8_t>(op, dst, a, b, elements);
    case DType::kInt16:
      return reduce_integer_op<int16_t>(op, dst, a, b, elements);
    case DType::kInt32:
      return reduce_integer_op<int32_t>(op, dst, a, b, elements);
    case DType::kInt64:
      return reduce_integer_op<int64_t>(op, dst, a, b, elements);
    case DType::kBool:
      if (op == ReduceOp::kMin || op == ReduceOp::kProduct)
        return reduce_type<uint8_t, AndOp>(dst, a, b, elements);
      return reduce_type<uint8_t, OrOp>(dst, a, b, elements);
    default:
      return;
  }
}

void stream_copy_impl(void* dst, const void* src, std::size_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  const std::size_t lanes = hn::Lanes(d);
  auto* to = static_cast<uint8_t*>(dst);
  const auto* from = static_cast<const uint8_t*>(src);
  for (std::size_t i = 0; i + lanes <= bytes; i += lanes)
    hn::Stream(hn::LoadU(d, from + i), d, to + i);
  hwy::FlushStream();
}

const char* target_name_impl() { return hwy::TargetName(HWY_TARGET); }

}  // namespace paceline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "device/cpu/kernels.h"

namespace paceline::cpu {
HWY_EXPORT(reduce_integer_impl);
HWY_EXPORT(stream_copy_impl);
HWY_EXPORT(target_name_impl);

void reduce_integer(DType dtype, ReduceOp op, void* dst, const void* a, const void* b,
                    uint64_t elements) {
  HWY_DYNAMIC_DISPATCH(reduce_integer_impl)(dtype, op, dst, a, b, elements);
}

void stream_copy(void* dst, const void* src, std::size_t bytes) {
  HWY_DYNAMIC_DISPATCH(stream_copy_impl)(dst, src, bytes);
}

const char* simd_target() { return HWY_DYNAMIC_DISPATCH(target_name_impl)(); }
}  // namespace paceline::cpu
#endif
