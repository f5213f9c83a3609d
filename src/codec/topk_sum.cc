#include "codec/topk_sum.h"

#include <algorithm>
#include <cstring>

#include "device/cpu/kernels.h"

namespace paceline::codec::topk {

void GradientSum::make(uint64_t first, uint64_t elements, float* out) const {
  const float* whole = gradient_.data() + first;  // null: `out` has what was summed so far
  for (const Addend& addend : addends_) {
    const uint64_t from = std::max(first, addend.first);
    const uint64_t to = std::min(first + elements, addend.first + addend.elements);
    if (from >= to) continue;
    const float* data = addend.data + (from - addend.first);
    if (whole != nullptr && to - from == elements) {
      cpu::reduce_into(DType::kFloat32, ReduceOp::kSum, out, whole, data, elements);
    } else {
      if (whole != nullptr) std::memcpy(out, whole, elements * sizeof(float));
      cpu::reduce(DType::kFloat32, ReduceOp::kSum, out + (from - first), data, to - from);
    }
    whole = nullptr;
  }
  if (whole != nullptr) std::memcpy(out, whole, elements * sizeof(float));
}

GradientSum::Terms GradientSum::terms(uint64_t first, uint64_t elements, float* scratch) const {
  const float* own = gradient_.data() + first;
  if (is_plain()) return {own, nullptr};
  if (const float* addend = only_addend(first, elements)) return {own, addend};
  make(first, elements, scratch);
  return {scratch, nullptr};
}

/// Null: it takes more than one, or a part of one.
const float* GradientSum::only_addend(uint64_t first, uint64_t elements) const {
  const float* only = nullptr;
  for (const Addend& addend : addends_) {
    if (first >= addend.first + addend.elements || addend.first >= first + elements) continue;
    const bool covers = first >= addend.first && first + elements <= addend.first + addend.elements;
    if (only != nullptr || !covers) return nullptr;
    only = addend.data + (first - addend.first);
  }
  return only;
}

void GradientSum::prefetch(uint64_t first) const {
  __builtin_prefetch(gradient_.data() + first);
  for (const Addend& addend : addends_) {
    if (first >= addend.first && first - addend.first < addend.elements)
      __builtin_prefetch(addend.data + (first - addend.first));
  }
}

}  // namespace paceline::codec::topk
