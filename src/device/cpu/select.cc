#include "device/cpu/select.h"

#include <hwy/cache_control.h>

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

/// The state of one pass; step() handles one vector. Magnitudes are compared as signed integers: as
/// bits without the sign they order like the floats, with NaN above infinity.
struct Pass {
  HWY_INLINE HWY_ATTR Pass(uint32_t threshold, uint32_t* index_out, float* value_out)
      : index(index_out), value(value_out), limit(static_cast<int32_t>(threshold - 1)) {}

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
      return hn::IfThenZeroElse(taken_f, a);
    }
    return a;
  }

  uint32_t* index;
  float* value;
  int32_t limit;
  uint64_t found = 0;
};

template <bool kResidual>
HWY_INLINE HWY_ATTR auto load_sum(const float* g, const float* r) {
  const F f;
  if constexpr (kResidual) return hn::Add(hn::LoadU(f, g), hn::LoadU(f, r));
  return hn::LoadU(f, g);
}

/// Fewer elements than a vector: through padded copies. Zeros are never taken, so the padding stays
/// out.
template <bool kResidual, class VI>
HWY_INLINE HWY_ATTR void select_rest(Pass& pass, const float* g, const float* r, float* rest,
                                     uint64_t elements, uint32_t first_index, VI& largest) {
  const F f;
  HWY_ALIGN float in_g[hn::MaxLanes(F())] = {};
  HWY_ALIGN float in_r[hn::MaxLanes(F())] = {};
  HWY_ALIGN float out[hn::MaxLanes(F())];
  std::memcpy(in_g, g, elements * sizeof(float));
  if constexpr (kResidual) std::memcpy(in_r, r, elements * sizeof(float));
  hn::StoreU(pass.step(load_sum<kResidual>(in_g, in_r), hn::Iota(U(), first_index), largest), f,
             out);
  std::memcpy(rest, out, elements * sizeof(float));
}

template <bool kResidual, bool kStream>
HWY_ATTR Selected select_pass(const float* g, const float* r, float* rest, uint64_t elements,
                              uint32_t first_index, uint32_t threshold, uint32_t* index,
                              float* value) {
  const F f;
  const I i;
  const U u;
  const uint64_t lanes = hn::Lanes(f);
  Pass pass(threshold, index, value);
  auto largest = hn::Zero(i);
  uint64_t at = 0;
  if constexpr (kStream) {
    const uint64_t bytes = lanes * sizeof(float);
    const uint64_t head =
        (bytes - reinterpret_cast<uintptr_t>(rest) % bytes) % bytes / sizeof(float);
    at = head < elements ? head : elements;
    if (at > 0) select_rest<kResidual>(pass, g, r, rest, at, first_index, largest);
  }
  auto positions = hn::Iota(u, first_index + static_cast<uint32_t>(at));
  const auto stride = hn::Set(u, static_cast<uint32_t>(lanes));
  for (; at + lanes <= elements; at += lanes) {
    const auto kept = pass.step(load_sum<kResidual>(g + at, r + at), positions, largest);
    if constexpr (kStream) {
      hn::Stream(kept, f, rest + at);
    } else {
      hn::StoreU(kept, f, rest + at);
    }
    positions = hn::Add(positions, stride);
  }
  if (at < elements)
    select_rest<kResidual>(pass, g + at, kResidual ? r + at : nullptr, rest + at, elements - at,
                           first_index + static_cast<uint32_t>(at), largest);
  const auto top = hn::MaxOfLanes(i, largest);
  return {pass.found, static_cast<uint32_t>(hn::GetLane(top))};
}

Selected add_select_impl(const float* g, const float* r, float* rest, uint64_t elements,
                         uint32_t first_index, uint32_t threshold, bool stream, uint32_t* index,
                         float* value) {
  if (r == nullptr)
    return select_pass<false, false>(g, g, rest, elements, first_index, threshold, index, value);
  if (stream)
    return select_pass<true, true>(g, r, rest, elements, first_index, threshold, index, value);
  return select_pass<true, false>(g, r, rest, elements, first_index, threshold, index, value);
}

template <bool kResidual>
HWY_ATTR void magnitudes(const float* g, const float* r, uint64_t elements, uint32_t* out) {
  const F f;
  const U u;
  const uint64_t lanes = hn::Lanes(f);
  const auto keep = hn::Set(u, 0x7FFFFFFFu);
  uint64_t at = 0;
  for (; at + lanes <= elements; at += lanes)
    hn::StoreU(hn::And(hn::BitCast(u, load_sum<kResidual>(g + at, r + at)), keep), u, out + at);
  for (; at < elements; ++at) {
    const float a = kResidual ? g[at] + r[at] : g[at];
    uint32_t bits = 0;
    std::memcpy(&bits, &a, sizeof(bits));
    out[at] = bits & 0x7FFFFFFFu;
  }
}

void add_magnitudes_impl(const float* g, const float* r, uint64_t elements, uint32_t* out) {
  if (r == nullptr) return magnitudes<false>(g, g, elements, out);
  magnitudes<true>(g, r, elements, out);
}

}  // namespace paceline::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "device/cpu/float_mode.h"

namespace paceline::cpu {
HWY_EXPORT(add_select_impl);
HWY_EXPORT(add_magnitudes_impl);

Selected add_select(const float* gradient, const float* residual, float* rest, uint64_t elements,
                    uint32_t first_index, uint32_t threshold, bool stream, uint32_t* index,
                    float* value) {
  const FloatMode mode;
  return HWY_DYNAMIC_DISPATCH(add_select_impl)(gradient, residual, rest, elements, first_index,
                                               threshold, stream, index, value);
}

void add_magnitudes(const float* gradient, const float* residual, uint64_t elements,
                    uint32_t* out) {
  const FloatMode mode;
  HWY_DYNAMIC_DISPATCH(add_magnitudes_impl)(gradient, residual, elements, out);
}
}  // namespace paceline::cpu
#endif
