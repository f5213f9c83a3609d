// How large an encoding can be: what plans reserve for it.
#include <algorithm>
#include <cmath>

#include "codec/codec.h"
#include "codec/topk_format.h"

namespace paceline::codec {

uint64_t encoded_bytes(const plan::CodecSpec& spec, DType dtype, uint64_t elements) {
  switch (spec.codec) {
    case plan::Codec::kNone:
      break;
    case plan::Codec::kFp16:
    case plan::Codec::kBf16:
      if (dtype == DType::kFloat32) return elements * 2;
      break;  // other types travel as they are
    case plan::Codec::kTopK:
      return topk::encoded_bound(elements, top_k_count(spec, elements), spec.fp16_values);
  }
  return elements * dtype_size(dtype);
}

uint64_t top_k_count(const plan::CodecSpec& spec, uint64_t elements) {
  if (elements == 0) return 0;
  const double wished = spec.ratio * static_cast<double>(elements) + 0.5;
  if (!(wished >= 1)) return 1;
  if (wished >= static_cast<double>(elements)) return elements;
  return static_cast<uint64_t>(wished);
}

}  // namespace paceline::codec
