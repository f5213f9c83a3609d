// The one thing that plans must know of codecs: how long an encoding can be. The formats' header is
// constants and formulas only; codec/ itself stands above plan/.
#include <algorithm>

#include "codec/topk_format.h"
#include "plan/plan.h"

namespace paceline::plan {
namespace {

uint64_t kept_entries(double ratio, uint64_t elements) {
  if (elements == 0) return 0;
  double wished = ratio * static_cast<double>(elements) + 0.5;
  if (!(wished >= 1)) return 1;
  return wished >= static_cast<double>(elements) ? elements : static_cast<uint64_t>(wished);
}

}  // namespace

uint64_t coded_bytes(const CodecSpec& spec, DType dtype, uint64_t elements) {
  switch (spec.codec) {
    case Codec::kNone:
      break;
    case Codec::kFp16:
    case Codec::kBf16:
      return elements * 2;
    case Codec::kTopK:
      return codec::topk::encoded_bound(elements, kept_entries(spec.ratio, elements),
                                        spec.fp16_values);
  }
  return elements * dtype_size(dtype);
}

}  // namespace paceline::plan
