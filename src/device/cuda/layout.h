// The bytes of an encoding on the wire, little-endian. Parts begin at multiples of 16; what is between them is zero.
//
//   exact, fp16, bf16   elements × 4 or 2 bytes
//
//   int8     scales  f32 × blocks      one per kInt8Block elements; NaN: the block held an Inf or NaN
//            values  i8 × elements     element = value · scale
//
//   top-k    starts     u32 × tiles + 1   entries before each tile of kTopKTile elements; the last: entries in all
//            exponents  u8 × tiles        biased exponent of the tile's largest magnitude; 255: it held an Inf or NaN
//            offsets    u16 × entries     position in the tile, ascending
//            values     f16 or f32 × entries
//
// Entries beyond starts[tiles] are unused, and zero. A top-k value in fp16 counts in units of 2^(max(exponent, 29) - 141):
// the tile's largest lies at 2^14 … 2^15, so nothing overflows, and what is up to 2^28 times smaller keeps 11 bits.
// At 1 % density and fp16 an entry takes 4.12 bytes with its share of the table, at 0.1 % 5.2.
#pragma once

#include <cstdint>

#include "device/cuda/codec.h"

namespace paceline::device::cuda {

struct Int8Layout {
  uint64_t blocks, values, bytes;  ///< scales come first
};
struct TopKLayout {
  uint32_t entries, tiles;
  uint64_t exponents, offsets, values, bytes;  ///< starts come first
};

/// Where things lie in EncodeArguments::state, behind TopKState.
struct TopKScratch {
  uint64_t groups, counts, slot_offsets, slot_values, bytes;
  uint32_t
      slot;  ///< entries that a tile may hand from select to gather; tiles with more take longer
};

[[nodiscard]] Int8Layout int8_layout(uint64_t elements);
[[nodiscard]] TopKLayout top_k_layout(const WireFormat& format, uint64_t elements);

[[nodiscard]] TopKScratch top_k_scratch(const WireFormat& format, uint64_t elements);

/// The type of a dense codec's elements on the wire.
[[nodiscard]] DType dense_wire_dtype(const WireFormat& format);

}  // namespace paceline::device::cuda
