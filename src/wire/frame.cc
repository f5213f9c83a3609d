#include "wire/frame.h"

#include <fmt/format.h>

#include <cstring>

#include "base/crc32c.h"
#include "wire/channel.h"

namespace paceline::wire {
namespace {

constexpr uint8_t kFlagSum = 1;

template <class T>
void put(std::span<std::byte, kFrameHeader> out, std::size_t at, T value) {
  std::memcpy(out.data() + at, &value, sizeof value);
}
template <class T>
T get(std::span<const std::byte, kFrameHeader> in, std::size_t at) {
  T value;
  std::memcpy(&value, in.data() + at, sizeof value);
  return value;
}

Status bad(std::string text) { return {Code::kCorrupted, std::move(text)}; }

/// The longest payload of a type; nullopt-like ~0 for an unknown one.
constexpr uint32_t kUnknownType = ~0U;
constexpr uint32_t payload_limit(uint8_t type) {
  switch (static_cast<FrameType>(type)) {
    case FrameType::kNote:
      return kNoteLimit;
    case FrameType::kEager:
      return kMaxEager;
    case FrameType::kReject:
      return 1024;
    case FrameType::kPiece:
      return kMaxPiece;
    case FrameType::kReady:
    case FrameType::kDone:
    case FrameType::kOffer:
    case FrameType::kWithdraw:
    case FrameType::kGoodbye:
    case FrameType::kPieceAck:
    case FrameType::kAck:
    case FrameType::kPing:
    case FrameType::kPong:
      return 0;
  }
  return kUnknownType;
}

Status check_ranges(const Frame& f) {
  if (f.type == FrameType::kEager && f.total != f.length) {
    return bad(
        fmt::format("eager message of {} bytes with {} bytes of payload", f.total, f.length));
  }
  if (f.type != FrameType::kPiece) return Status::ok();
  if (f.length == 0 || f.position > f.total || f.length > f.total - f.position) {
    return bad(fmt::format("piece of {} bytes at {} of a message of {} bytes", f.length, f.position,
                           f.total));
  }
  bool is_last = f.position + f.length == f.total;
  if (f.position % kPieceAlign != 0 || (!is_last && f.length % kPieceAlign != 0)) {
    return bad(fmt::format("piece of {} bytes at {} is not aligned", f.length, f.position));
  }
  return Status::ok();
}

}  // namespace

std::string_view frame_type_name(FrameType t) {
  switch (t) {
    case FrameType::kNote:
      return "note";
    case FrameType::kEager:
      return "eager";
    case FrameType::kReady:
      return "ready";
    case FrameType::kDone:
      return "done";
    case FrameType::kReject:
      return "reject";
    case FrameType::kOffer:
      return "offer";
    case FrameType::kWithdraw:
      return "withdraw";
    case FrameType::kGoodbye:
      return "goodbye";
    case FrameType::kPiece:
      return "piece";
    case FrameType::kPieceAck:
      return "piece acknowledgement";
    case FrameType::kAck:
      return "acknowledgement";
    case FrameType::kPing:
      return "ping";
    case FrameType::kPong:
      return "pong";
  }
  return "unknown";
}

void encode_frame(const Frame& f, std::span<std::byte, kFrameHeader> out) {
  put(out, 4, static_cast<uint8_t>(f.type));
  put(out, 5, static_cast<uint8_t>(f.has_sum ? kFlagSum : 0));
  put(out, 6, uint16_t{0});
  put(out, 8, f.length);
  put(out, 12, f.digest);
  put(out, 16, f.tag);
  put(out, 24, f.message);
  put(out, 32, f.total);
  put(out, 40, f.position);
  put(out, 48, f.acknowledged);
  put(out, 56, f.freed);
  put(out, 60, f.sum);
  put(out, 0, crc32c(out.subspan<4>()));
}

Result<Frame> decode_frame(std::span<const std::byte, kFrameHeader> bytes) {
  if (get<uint32_t>(bytes, 0) != crc32c(bytes.subspan<4>())) {
    return bad("a frame header failed its CRC");
  }
  auto type = get<uint8_t>(bytes, 4);
  auto flags = get<uint8_t>(bytes, 5);
  Frame f;
  f.length = get<uint32_t>(bytes, 8);
  uint32_t limit = payload_limit(type);
  if (limit == kUnknownType) return bad(fmt::format("a frame of unknown type {}", type));
  f.type = static_cast<FrameType>(type);
  if ((flags & ~kFlagSum) != 0 || get<uint16_t>(bytes, 6) != 0) {
    return bad("a frame with unknown flags");
  }
  if (f.length > limit) {
    return bad(fmt::format("a {} frame with {} bytes of payload (at most {})",
                           frame_type_name(f.type), f.length, limit));
  }
  f.has_sum = (flags & kFlagSum) != 0;
  f.digest = get<uint32_t>(bytes, 12);
  f.tag = get<uint64_t>(bytes, 16);
  f.message = get<uint64_t>(bytes, 24);
  f.total = get<uint64_t>(bytes, 32);
  f.position = get<uint64_t>(bytes, 40);
  f.acknowledged = get<uint64_t>(bytes, 48);
  f.freed = get<uint32_t>(bytes, 56);
  f.sum = get<uint32_t>(bytes, 60);
  PACELINE_RETURN_IF_ERROR(check_ranges(f));
  return f;
}

}  // namespace paceline::wire
