// How large an encoding can be. Plans reserve and predict with the same numbers.
#include "codec/codec.h"

namespace paceline::codec {

uint64_t encoded_bytes(const plan::CodecSpec& spec, DType dtype, uint64_t elements) {
  return plan::coded_bytes(spec, dtype, elements);
}

uint64_t top_k_count(const plan::CodecSpec& spec, uint64_t elements) {
  if (elements == 0) return 0;
  const double wished = spec.ratio * static_cast<double>(elements) + 0.5;
  if (!(wished >= 1)) return 1;
  if (wished >= static_cast<double>(elements)) return elements;
  return static_cast<uint64_t>(wished);
}

}  // namespace paceline::codec
