#include "device/cpu/select.h"

#include <hwy/cache_control.h>

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/select.cc"
#include <hwy/foreach_target.h>
//
#include "device/cpu/formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace paceline::cpu::HWY_NAMESPACE {

using F = hn::ScalableTag<float>;
using I = hn::Rebind<int32_t, F>;
using U = hn::Rebind<uint32_t, F>;
static_assert(hn::MaxLanes(F()) <= kSelectSlack);

/// The state of one pass; step() handles one vector. Magnitudes are compared as signed integers: as bits without the
/// sign they order like the floats, with NaN above infinity.
template <bool kHalves>
struct Pass {
  HWY_INLINE HWY_ATTR Pass(const SelectInput& in, uint32_t* index_out, float* value_out)
      : index(index_out), value(value_out), limit(static_cast<int32_t>(in.threshold - 1)) {
    if constexpr (kHalves) {
      scale = std::ldexp(1.0F, in.half_exponent);
      unit = std::ldexp(1.0F, -in.half_exponent);
    }
  }

  /// Returns what is to be stored in `rest`.
  template <class VF, class VU, class VI>
  HWY_INLINE HWY_ATTR VF step(VF a, VU positions, VI& largest) {
    const F f;
    const I i;
    const auto magnitude = hn::And(hn::BitCast(i, a), hn::Set(i, 0x7FFFFFFF));
    largest = hn::Max(largest, magnitude);
    const auto taken = hn::Gt(magnitude, hn::Set(i, limit));
    if (HWY_UNLIKELY(!hn::AllFalse(i, taken))) {
      const auto taken_f = hn::RebindMask(f, taken);
      hn::StoreU(hn::Compress(positions, hn::RebindMask(U(), taken)), U(), index + found);
      hn::StoreU(hn::Compress(a, taken_f), f, value + found);
      found += hn::CountTrue(i, taken);
      if constexpr (kHalves) {
        const auto sent =
            hn::Mul(Float16Format::round(f, hn::Mul(a, hn::Set(f, scale))), hn::Set(f, unit));
        return hn::IfThenElse(taken_f, hn::Sub(a, sent), a);
      }
      return hn::IfThenZeroElse(taken_f, a);
    }
    return a;
  }

  uint32_t* index;
  float* value;
  int32_t limit;
  float scale = 1;
  float unit = 1;
  uint64_t found = 0;
};

/// What a pass adds up: the array alone, with the residual, with an addend and the residual.
enum class Terms { kOne, kTwo, kThree };

template <Terms kTerms>
HWY_INLINE HWY_ATTR auto load_sum(const float* g, const float* o, const float* r) {
  const F f;
  if constexpr (kTerms == Terms::kOne) return hn::LoadU(f, g);
  if constexpr (kTerms == Terms::kTwo) return hn::Add(hn::LoadU(f, g), hn::LoadU(f, r));
  return hn::Add(hn::Add(hn::LoadU(f, g), hn::LoadU(f, o)), hn::LoadU(f, r));
}

/// Fewer elements than a vector, from `at` on: through padded copies. Zeros are never taken: the padding stays out.
template <Terms kTerms, class P, class VI>
HWY_INLINE HWY_ATTR void select_few(P& pass, const SelectInput& in, uint64_t at, uint64_t elements,
                                    VI& largest) {
  const F f;
  HWY_ALIGN float in_g[hn::MaxLanes(F())] = {};
  HWY_ALIGN float in_o[hn::MaxLanes(F())] = {};
  HWY_ALIGN float in_r[hn::MaxLanes(F())] = {};
  HWY_ALIGN float out[hn::MaxLanes(F())];
  std::memcpy(in_g, in.gradient + at, elements * sizeof(float));
  if constexpr (kTerms == Terms::kThree)
    std::memcpy(in_o, in.addend + at, elements * sizeof(float));
  if constexpr (kTerms != Terms::kOne)
    std::memcpy(in_r, in.residual + at, elements * sizeof(float));
  const auto positions = hn::Iota(U(), in.first_index + static_cast<uint32_t>(at));
  hn::StoreU(pass.step(load_sum<kTerms>(in_g, in_o, in_r), positions, largest), f, out);
  std::memcpy(in.rest + at, out, elements * sizeof(float));
}

template <Terms kTerms, bool kStream, bool kHalves>
HWY_ATTR Selected select_pass(const SelectInput& in, uint32_t* index, float* value) {
  const F f;
  const I i;
  const U u;
  const uint64_t lanes = hn::Lanes(f);
  Pass<kHalves> pass(in, index, value);
  auto largest = hn::Zero(i);
  uint64_t at = 0;
  if constexpr (kStream) {  // such stores must be aligned
    const uint64_t bytes = lanes * sizeof(float);
    const uint64_t head =
        (bytes - reinterpret_cast<uintptr_t>(in.rest) % bytes) % bytes / sizeof(float);
    at = head < in.elements ? head : in.elements;
    if (at > 0) select_few<kTerms>(pass, in, 0, at, largest);
  }
  auto positions = hn::Iota(u, in.first_index + static_cast<uint32_t>(at));
  const auto stride = hn::Set(u, static_cast<uint32_t>(lanes));
  for (; at + lanes <= in.elements; at += lanes) {
    const auto kept = pass.step(
        load_sum<kTerms>(in.gradient + at, kTerms == Terms::kThree ? in.addend + at : nullptr,
                         kTerms == Terms::kOne ? nullptr : in.residual + at),
        positions, largest);
    if constexpr (kStream) {
      hn::Stream(kept, f, in.rest + at);
    } else {
      hn::StoreU(kept, f, in.rest + at);
    }
    positions = hn::Add(positions, stride);
  }
  if (at < in.elements) select_few<kTerms>(pass, in, at, in.elements - at, largest);
  return {pass.found, static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(i, largest)))};
}

template <Terms kTerms, bool kStream>
HWY_ATTR Selected select_values(const SelectInput& in, uint32_t* index, float* value) {
  return in.halves ? select_pass<kTerms, kStream, true>(in, index, value)
                   : select_pass<kTerms, kStream, false>(in, index, value);
}

template <Terms kTerms>
HWY_ATTR Selected select_sum(const SelectInput& in, uint32_t* index, float* value) {
  return in.stream ? select_values<kTerms, true>(in, index, value)
                   : select_values<kTerms, false>(in, index, value);
}

Selected add_select_impl(const SelectInput& in, uint32_t* index, float* value) {
  if (in.residual == nullptr) return select_values<Terms::kOne, false>(in, index, value);
  return in.addend == nullptr ? select_sum<Terms::kTwo>(in, index, value)
                              : select_sum<Terms::kThree>(in, index, value);
}

}  // namespace paceline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "device/cpu/float_mode.h"

namespace paceline::cpu {
HWY_EXPORT(add_select_impl);

Selected add_select(const SelectInput& input, uint32_t* index, float* value) {
  const FloatMode mode;
  return HWY_DYNAMIC_DISPATCH(add_select_impl)(input, index, value);
}
}  // namespace paceline::cpu
#endif
