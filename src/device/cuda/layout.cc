#include "device/cuda/layout.h"

#include <algorithm>
#include <cmath>

#include "device/cuda/kernel_arguments.h"

namespace paceline::device::cuda {
namespace {

constexpr uint64_t padded(uint64_t bytes) { return (bytes + 15) / 16 * 16; }
constexpr uint64_t parts(uint64_t elements, uint64_t each) { return (elements + each - 1) / each; }

}  // namespace

static_assert(kMaxSources == kSourceLimit);
static_assert(kMaxAddends == kAddendLimit);

DType dense_wire_dtype(const WireFormat& format) {
  if (format.codec == WireCodec::kFp16) return DType::kFloat16;
  if (format.codec == WireCodec::kBf16) return DType::kBFloat16;
  return format.dtype;
}

Int8Layout int8_layout(uint64_t elements) {
  Int8Layout layout{};
  layout.blocks = parts(elements, kInt8Block);
  layout.values = padded(layout.blocks * sizeof(float));
  layout.bytes = layout.values + padded(elements);
  return layout;
}

TopKLayout top_k_layout(const WireFormat& format, uint64_t elements) {
  TopKLayout layout{};
  layout.entries = static_cast<uint32_t>(top_k_entries(format, elements));
  layout.tiles = static_cast<uint32_t>(parts(elements, kTopKTile));
  layout.exponents = padded((uint64_t{layout.tiles} + 1) * sizeof(uint32_t));
  layout.offsets = layout.exponents + padded(layout.tiles);
  layout.values = layout.offsets + padded(uint64_t{layout.entries} * sizeof(uint16_t));
  layout.bytes = layout.values + padded(uint64_t{layout.entries} * (format.fp16_values ? 2 : 4));
  return layout;
}

TopKScratch top_k_scratch(const WireFormat& format, uint64_t elements) {
  const TopKLayout layout = top_k_layout(format, elements);
  TopKScratch scratch{};
  // Four times a tile's share: at most a quarter of the tiles can have more, unless the ratio is above 6 %.
  const double share = format.ratio * kTopKTile * 4;
  scratch.slot = static_cast<uint32_t>(
      padded(static_cast<uint64_t>(std::clamp(share, 64.0, double{kMostSlot}))));
  scratch.groups = sizeof(TopKState);
  scratch.counts = scratch.groups + padded(parts(layout.tiles, kTileGroup) * sizeof(uint32_t));
  scratch.slot_offsets = scratch.counts + padded(uint64_t{layout.tiles} * sizeof(uint32_t));
  const uint64_t slots = uint64_t{layout.tiles} * scratch.slot;
  scratch.slot_values = scratch.slot_offsets + slots * sizeof(uint16_t);
  scratch.bytes = scratch.slot_values + slots * (format.fp16_values ? 2 : 4);
  return scratch;
}

uint64_t top_k_entries(const WireFormat& format, uint64_t elements) {
  if (format.codec != WireCodec::kTopK || elements == 0) return 0;
  const double share = std::floor(format.ratio * static_cast<double>(elements));
  return std::clamp<uint64_t>(share > 1 ? static_cast<uint64_t>(share) : 1, 1, elements);
}

uint64_t encoded_bytes(const WireFormat& format, uint64_t elements) {
  if (elements == 0) return 0;
  switch (format.codec) {
    case WireCodec::kTopK:
      return top_k_layout(format, elements).bytes;
    case WireCodec::kInt8:
      return int8_layout(elements).bytes;
    case WireCodec::kExact:
    case WireCodec::kFp16:
    case WireCodec::kBf16:
      return padded(elements * dtype_size(dense_wire_dtype(format)));
  }
  return 0;
}

uint64_t state_bytes(const WireFormat& format, uint64_t elements) {
  if (format.codec != WireCodec::kTopK || elements == 0) return 0;
  return top_k_scratch(format, elements).bytes;
}

}  // namespace paceline::device::cuda
