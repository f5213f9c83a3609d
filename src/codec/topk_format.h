// The bytes of a top-k encoding, and how large they can become.
//
//   byte 0       4       5      6          8            16          24
//        +-------+-------+------+----------+------------+-----------+--------------------+-----------+
//        | "PTK1"| flags | zero | exponent | elements   | entries   | values             |
//        positions | |  u32  |  u8   |  u8  |   i16    |   u64      |   u64     | entries × 2 or 4
//        B | bits      |
//        +-------+-------+------+----------+------------+-----------+--------------------+-----------+
//
// All fields are little-endian. Flags: bit 0, an Inf or NaN was seen (entries is 0, nothing
// follows); bit 1, values are fp16. Values come in the order of their positions: float32, or fp16
// numbers that count in units of 2^-exponent (value = half · 2^-exponent, exact in float32;
// exponent is 0 for float32). The exponent is chosen from the largest magnitude, so that fp16's
// narrow range neither overflows nor starves small gradients.
//
// Positions are one stream of bits, least significant bit of each byte first, padded with zeros to
// a byte. Per block of 65,536 elements (the last one may be shorter):
//
//   5 bits   b, 0 to 16
//   17 bits  entries in this block
//   per entry, with gap = elements skipped since the previous entry of the block (or since the
//   block's start):
//            gap >> b zeros, a one, then the b low bits of gap           (Golomb-Rice code)
//
// Gaps between uniformly spread entries are distributed geometrically, for which this code is
// within 4 % of the entropy (R. F. Rice, "Some practical universal noiseless coding techniques",
// 1979): 8.1 bits a position at 1 % density, 11.5 at 0.1 %, less where entries cluster, against 32
// for plain indices. Each block has its own b, chosen by exact cost.
#pragma once

#include <algorithm>
#include <cstdint>

namespace paceline::codec::topk {

inline constexpr uint32_t kMagic = 0x314B5450;  // "PTK1"
inline constexpr uint8_t kFlagNonFinite = 1;
inline constexpr uint8_t kFlagFp16 = 2;
inline constexpr uint64_t kHeaderBytes = 24;
inline constexpr uint64_t kBlockElements = 65536;
inline constexpr int kMaxRice = 16;
inline constexpr int kRiceBits = 5;
inline constexpr int kCountBits = 17;
/// Positions are 32-bit numbers inside one encoding: 16 GiB of float32. No plan cuts a larger buffer: it is refused by
/// name (plan/validate.cc).
inline constexpr uint64_t kMaxElements = uint64_t{1} << 32;
inline constexpr uint64_t kSlackBytes =
    8;  ///< the encoder writes whole words at the end of the bits

/// Scales that keep every half · 2^-exponent a float32, and every product on the way normal or
/// irrelevant.
inline constexpr int kMinExponent = -113;
inline constexpr int kMaxExponent = 125;

/// Bits of the positions of `entries` among `elements`, at most, when every block uses `rice`: each
/// entry costs its stop bit and low bits, and all quotients together are at most (elements -
/// entries) >> rice.
constexpr uint64_t position_bits(uint64_t elements, uint64_t entries, int rice) {
  const uint64_t blocks = (elements + kBlockElements - 1) / kBlockElements;
  return blocks * (kRiceBits + kCountBits) + entries * static_cast<uint64_t>(rice + 1) +
         ((elements - entries) >> rice);
}

/// The Rice parameter with the least bound; blocks may use better ones.
constexpr int best_rice(uint64_t elements, uint64_t entries) {
  int best = 0;
  for (int rice = 1; rice <= kMaxRice; ++rice)
    if (position_bits(elements, entries, rice) < position_bits(elements, entries, best))
      best = rice;
  return best;
}

/// The most bytes that `entries` of `elements` take. Never exceeded by fewer entries either.
constexpr uint64_t encoded_bound(uint64_t elements, uint64_t entries, bool fp16_values) {
  const uint64_t bits = position_bits(elements, entries, best_rice(elements, entries));
  return kHeaderBytes + entries * (fp16_values ? 2 : 4) + (bits + 7) / 8 + kSlackBytes;
}

}  // namespace paceline::codec::topk
