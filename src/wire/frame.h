// The frame: what one peer tells another, on a TCP flow or as one packet of the simulated network.
//
//   byte 0        4     5      6          8        12       16
//        ┌────────┬─────┬──────┬──────────┬────────┬────────┐
//        │ crc    │type │flags │ reserved │ length │ digest │   crc: CRC-32C of bytes 4 … 63
//        ├────────┴─────┴──────┴──────────┼────────┴────────┤
//     16 │ tag                            │ message         │   message: the receiver's number of
//     its receive
//        ├────────────────────────────────┼─────────────────┤
//     32 │ total                          │ position        │   position: offset of a piece, or
//     sequence number
//        ├────────────────────────────────┼────────┬────────┤
//     48 │ acknowledged                   │ freed  │ sum    │   sum: CRC-32C of the payload, if
//     flags say so
//        └────────────────────────────────┴────────┴────────┘
//     64   `length` bytes of payload
//
// All fields are little-endian. Two families travel:
//  - sequenced frames (note, eager, ready, done, reject, offer, withdraw, goodbye) form one ordered
//  stream per
//    direction; each is kept until `acknowledged` of a frame the other way covers it;
//  - pieces of long messages, and acknowledgements, pings and pongs, have no number and may be
//  lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"

namespace paceline::wire {

/// Spoken by this build; peers that speak another refuse each other.
inline constexpr uint32_t kWireVersion = 2;
inline constexpr std::size_t kFrameHeader = 64;
inline constexpr uint32_t kMaxPiece = 1U << 20;
inline constexpr uint32_t kMaxEager = 64U << 10;

enum class FrameType : uint8_t {
  kNote = 1,       ///< payload: the note
  kEager = 2,      ///< a whole short message: tag, digest, total = length, payload
  kReady = 3,      ///< a receive is posted: tag, digest, message, total = capacity, length 0
  kDone = 4,       ///< all of `message` has arrived
  kReject = 5,     ///< `message` (or, 0, the one of `tag`) can't be carried; payload: the sentence
  kOffer = 6,      ///< a message of `total` bytes waits for its receive: tag, digest
  kWithdraw = 7,   ///< the receive behind a kReady has ended otherwise
  kGoodbye = 8,    ///< the peer leaves in good order
  kPiece = 16,     ///< `length` bytes of `message` at `position`
  kPieceAck = 17,  ///< the piece of `message` at `position` is there (lossy links)
  kAck = 18,       ///< carries `acknowledged` and `freed` only
  kPing = 19,      ///< wants a kPong
  kPong = 20,
};
constexpr bool is_sequenced(FrameType t) { return static_cast<uint8_t>(t) < 16; }
std::string_view frame_type_name(FrameType t);

struct Frame {
  FrameType type = FrameType::kAck;
  bool has_sum = false;
  uint32_t length = 0;
  uint32_t digest = 0;
  uint64_t tag = 0;
  uint64_t message = 0;
  uint64_t total = 0;
  uint64_t position = 0;
  uint64_t acknowledged = 0;  ///< sequenced frames 1 … acknowledged have been taken in order
  uint32_t freed = 0;         ///< eager bytes matched so far, modulo 2^32
  uint32_t sum = 0;
};

/// Writes the header with its CRC.
void encode_frame(const Frame& frame, std::span<std::byte, kFrameHeader> out);

/// Checks everything that can be checked without state: the CRC, the type, reserved fields, the
/// payload's length against the type's limit, a piece's range against the message's total.
Result<Frame> decode_frame(std::span<const std::byte, kFrameHeader> bytes);

}  // namespace paceline::wire
