// Element formats for the SIMD kernels: how each type is loaded into, computed in, and stored from
// vectors. Included once per SIMD target (Highway's foreach_target.h), hence the toggled guard.
//
// Every NaN that is stored is the canonical quiet one (sign 0, payload 0): which NaN an addition
// returns depends on the processor and on the order in which a compiler puts the operands.
#if defined(PACELINE_CPU_FORMATS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef PACELINE_CPU_FORMATS_INL_H
#undef PACELINE_CPU_FORMATS_INL_H
#else
#define PACELINE_CPU_FORMATS_INL_H
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace paceline::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Where the processor converts fp16 itself. It rounds as the integer code below does; NaN is made
// canonical by us.
#undef PACELINE_NATIVE_FP16
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define PACELINE_NATIVE_FP16 1
#else
#define PACELINE_NATIVE_FP16 0
#endif

template <class D, class V>
HWY_INLINE HWY_ATTR V canonical_nan(D d, V v) {
  using T = hn::TFromD<D>;
  return hn::IfThenElse(hn::IsNaN(v), hn::Set(d, std::numeric_limits<T>::quiet_NaN()), v);
}

/// Integers, as they are.
template <class T>
struct IntegerFormat {
  using Memory = T;
  using D = hn::ScalableTag<T>;
  static HWY_INLINE HWY_ATTR auto load(D d, const T* p) { return hn::LoadU(d, p); }
  template <class V>
  static HWY_INLINE HWY_ATTR void store(D d, V v, T* p) {
    hn::StoreU(v, d, p);
  }
};

/// float32 and float64.
template <class T>
struct FloatFormat {
  using Memory = T;
  using D = hn::ScalableTag<T>;
  static HWY_INLINE HWY_ATTR auto load(D d, const T* p) { return hn::LoadU(d, p); }
  template <class V>
  static HWY_INLINE HWY_ATTR void store(D d, V v, T* p) {
    hn::StoreU(canonical_nan(d, v), d, p);
  }
};

/// bfloat16, computed in float32: the upper half of the float's bits, rounded to nearest even.
struct BFloat16Format {
  using Memory = uint16_t;
  using D = hn::ScalableTag<float>;
  using DU = hn::Rebind<uint32_t, D>;
  using DI = hn::Rebind<int32_t, D>;
  using DH = hn::Rebind<uint16_t, D>;

  static HWY_INLINE HWY_ATTR auto load(D d, const uint16_t* p) {
    const auto wide = hn::PromoteTo(DU(), hn::LoadU(DH(), p));
    return hn::BitCast(d, hn::ShiftLeft<16>(wide));
  }
  template <class V>
  static HWY_INLINE HWY_ATTR void store(D d, V v, uint16_t* p) {
    const DU du;
    const auto bits = hn::BitCast(du, canonical_nan(d, v));
    // Adding half a unit less one, and one more where the kept part is odd, rounds to nearest even;
    // the canonical NaN (0x7FC00000) stays itself.
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd);
    const auto narrow = hn::BitCast(DI(), hn::ShiftRight<16>(rounded));
    hn::StoreU(hn::DemoteTo(DH(), narrow), DH(), p);
  }
};

/// IEEE 754 binary16, computed in float32; rounded to nearest even, denormals kept, overflow to
/// infinity.
struct Float16Format {
  using Memory = uint16_t;
  using D = hn::ScalableTag<float>;
  using DU = hn::Rebind<uint32_t, D>;
  using DI = hn::Rebind<int32_t, D>;
  using DH = hn::Rebind<uint16_t, D>;

  static HWY_INLINE HWY_ATTR auto load(D d, const uint16_t* p) {
#if PACELINE_NATIVE_FP16
    const hn::Rebind<hwy::float16_t, D> dh;
    return canonical_nan(d, hn::PromoteTo(d, hn::BitCast(dh, hn::LoadU(DH(), p))));
#else
    const DU du;
    const auto h = hn::PromoteTo(du, hn::LoadU(DH(), p));
    const auto sign = hn::ShiftLeft<16>(hn::And(h, hn::Set(du, 0x8000u)));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(h, hn::Set(du, 0x7FFFu)));
    const auto exponent = hn::And(magnitude, hn::Set(du, 0x0F800000u));
    const auto normal = hn::Add(magnitude, hn::Set(du, (127u - 15u) << 23));
    // Infinity and NaN: the exponent becomes 255.
    const auto special = hn::Add(normal, hn::Set(du, (128u - 16u) << 23));
    // Zero and denormals: give them the implicit bit that they lack, then subtract it as a float
    // (exact).
    const auto with_bit = hn::BitCast(d, hn::Add(normal, hn::Set(du, 1u << 23)));
    const auto denormal =
        hn::BitCast(du, hn::Sub(with_bit, hn::BitCast(d, hn::Set(du, 113u << 23))));
    auto bits = hn::IfThenElse(hn::Eq(exponent, hn::Zero(du)), denormal, normal);
    bits = hn::IfThenElse(hn::Eq(exponent, hn::Set(du, 0x0F800000u)), special, bits);
    return canonical_nan(d, hn::BitCast(d, hn::Or(bits, sign)));
#endif
  }
  /// The nearest fp16 number, still as float32.
  template <class V>
  static HWY_INLINE HWY_ATTR V round(D d, V v) {
#if PACELINE_NATIVE_FP16
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::PromoteTo(d, hn::DemoteTo(dh, v));
#else
    HWY_ALIGN uint16_t halves[hn::MaxLanes(D())];
    store(d, v, halves);
    return load(d, halves);
#endif
  }
  template <class V>
  static HWY_INLINE HWY_ATTR void store(D d, V v, uint16_t* p) {
    v = canonical_nan(d, v);
#if PACELINE_NATIVE_FP16
    const hn::Rebind<hwy::float16_t, D> dh;
    hn::StoreU(hn::BitCast(DH(), hn::DemoteTo(dh, v)), DH(), p);
#else
    const DU du;
    const DI di;
    const auto all = hn::BitCast(du, v);
    const auto sign = hn::And(all, hn::Set(du, 0x80000000u));
    const auto bits = hn::Xor(all, sign);
    const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(du, 1u));
    const auto rebiased = hn::Sub(bits, hn::Set(du, (127u - 15u) << 23));
    const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(rebiased, hn::Set(du, 0xFFFu)), odd));
    // Adding 0.5 puts the denormal's last bit at the float's last bit: the addition rounds it.
    const auto half = hn::Set(du, 0x3F000000u);
    const auto sum = hn::Add(hn::BitCast(d, bits), hn::BitCast(d, half));
    const auto denormal = hn::Sub(hn::BitCast(du, sum), half);
    // Compared as signed integers: magnitudes are below 2^31.
    const auto magnitude = hn::BitCast(di, bits);
    const auto is_denormal = hn::RebindMask(du, hn::Lt(magnitude, hn::Set(di, 113 << 23)));
    const auto is_huge = hn::RebindMask(du, hn::Gt(magnitude, hn::Set(di, (143 << 23) - 1)));
    const auto is_nan = hn::RebindMask(du, hn::Gt(magnitude, hn::Set(di, 255 << 23)));
    auto half_bits = hn::IfThenElse(is_denormal, denormal, normal);
    half_bits = hn::IfThenElse(is_huge, hn::Set(du, 0x7C00u), half_bits);
    half_bits = hn::IfThenElse(is_nan, hn::Set(du, 0x7E00u), half_bits);
    half_bits = hn::Or(half_bits, hn::ShiftRight<16>(sign));
    hn::StoreU(hn::DemoteTo(DH(), hn::BitCast(di, half_bits)), DH(), p);
#endif
  }
};

// Reductions on vectors.

struct SumOp {
  template <class D, class V>
  static HWY_INLINE HWY_ATTR V apply(D, V a, V b) {
    return hn::Add(a, b);
  }
};

struct ProductOp {
  template <class D, class V>
  static HWY_INLINE HWY_ATTR V apply(D, V a, V b) {
    return hn::Mul(a, b);
  }
};

/// A NaN in either operand gives NaN, and -0 is less than +0: instructions of different processors
/// disagree on both.
struct MinOp {
  template <class D, class V>
  static HWY_INLINE HWY_ATTR V apply([[maybe_unused]] D d, V a, V b) {
    if constexpr (hwy::IsFloat<hn::TFromD<D>>()) {
      // Equal operands have equal bits, unless they are zeros (or unordered: "or" keeps a NaN a
      // NaN, and what is stored is made canonical).
      const auto tie = hn::Or(a, b);
      return hn::IfThenElse(hn::Lt(a, b), a, hn::IfThenElse(hn::Lt(b, a), b, tie));
    } else {
      return hn::Min(a, b);
    }
  }
};

struct MaxOp {
  template <class D, class V>
  static HWY_INLINE HWY_ATTR V apply([[maybe_unused]] D d, V a, V b) {
    if constexpr (hwy::IsFloat<hn::TFromD<D>>()) {
      const auto greater =
          hn::IfThenElse(hn::Gt(a, b), a, hn::IfThenElse(hn::Gt(b, a), b, hn::And(a, b)));
      const auto nan = hn::Set(d, std::numeric_limits<hn::TFromD<D>>::quiet_NaN());
      return hn::IfThenElse(hn::IsNaN(a), nan, hn::IfThenElse(hn::IsNaN(b), nan, greater));
    } else {
      return hn::Max(a, b);
    }
  }
};

/// bool: any byte but 0 is true; results are 0 or 1.
struct OrOp {
  template <class D, class V>
  static HWY_INLINE HWY_ATTR V apply(D d, V a, V b) {
    return hn::Min(hn::Or(a, b), hn::Set(d, hn::TFromD<D>{1}));
  }
};

struct AndOp {
  template <class D, class V>
  static HWY_INLINE HWY_ATTR V apply(D d, V a, V b) {
    return hn::Min(hn::Min(a, b), hn::Set(d, hn::TFromD<D>{1}));
  }
};

// Loops. `body(lanes)` style: whole vectors in place, the rest through a padded copy, so that no
// byte outside of the caller's buffers is touched and the same instructions do all elements.

/// dst[i] = fn(a[i]).
template <class To, class From, class Fn>
HWY_INLINE HWY_ATTR void map_one(typename To::Memory* dst, const typename From::Memory* a,
                                 std::size_t elements, Fn fn) {
  const typename From::D d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= elements; i += lanes) To::store(d, fn(d, From::load(d, a + i)), dst + i);
  if (const std::size_t rest = elements - i; rest > 0) {
    HWY_ALIGN typename From::Memory in[hn::MaxLanes(typename From::D())] = {};
    HWY_ALIGN typename To::Memory out[hn::MaxLanes(typename From::D())] = {};
    std::memcpy(in, a + i, rest * sizeof(in[0]));
    To::store(d, fn(d, From::load(d, in)), out);
    std::memcpy(dst + i, out, rest * sizeof(out[0]));
  }
}

/// dst[i] = fn(a[i], b[i]); dst may be a.
template <class To, class From, class Fn>
HWY_INLINE HWY_ATTR void map_two(typename To::Memory* dst, const typename To::Memory* a,
                                 const typename From::Memory* b, std::size_t elements, Fn fn) {
  const typename To::D d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + 2 * lanes <= elements; i += 2 * lanes) {
    const auto first = fn(d, To::load(d, a + i), From::load(d, b + i));
    const auto second = fn(d, To::load(d, a + i + lanes), From::load(d, b + i + lanes));
    To::store(d, first, dst + i);
    To::store(d, second, dst + i + lanes);
  }
  for (; i + lanes <= elements; i += lanes)
    To::store(d, fn(d, To::load(d, a + i), From::load(d, b + i)), dst + i);
  if (const std::size_t rest = elements - i; rest > 0) {
    HWY_ALIGN typename To::Memory in_a[hn::MaxLanes(typename To::D())] = {};
    HWY_ALIGN typename From::Memory in_b[hn::MaxLanes(typename To::D())] = {};
    HWY_ALIGN typename To::Memory out[hn::MaxLanes(typename To::D())] = {};
    std::memcpy(in_a, a + i, rest * sizeof(in_a[0]));
    std::memcpy(in_b, b + i, rest * sizeof(in_b[0]));
    To::store(d, fn(d, To::load(d, in_a), From::load(d, in_b)), out);
    std::memcpy(dst + i, out, rest * sizeof(out[0]));
  }
}

}  // namespace paceline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
