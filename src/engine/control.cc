#include "engine/control.h"

namespace paceline::engine {
namespace {
constexpr std::size_t kSentenceLimit = 8192;
}

std::vector<std::byte> encode_note(const ControlNote& note) {
  ByteWriter out;
  out.put(static_cast<uint8_t>(note.kind));
  switch (note.kind) {
    case NoteKind::kFailure:
      out.put(static_cast<uint32_t>(note.failure.code()));
      out.put_string(shortened(note.failure.message(), kSentenceLimit));
      break;
    case NoteKind::kInquiry:
      out.put(note.key.stream);
      out.put(note.key.sequence);
      out.put(static_cast<uint8_t>(note.reason));
      write_description(out, note.description);
      break;
    case NoteKind::kAnswer:
      out.put(note.key.stream);
      out.put(note.key.sequence);
      out.put(static_cast<uint8_t>(note.answer));
      out.put_string(shortened(note.detail, kSentenceLimit));
      break;
    default:
      break;
  }
  return out.take();
}

std::optional<ControlNote> decode_note(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  ControlNote note;
  auto kind = in.get<uint8_t>();
  if (kind < 1 || kind > static_cast<uint8_t>(NoteKind::kFarewellSeen)) return std::nullopt;
  note.kind = static_cast<NoteKind>(kind);
  switch (note.kind) {
    case NoteKind::kFailure: {
      auto code = in.get<uint32_t>();
      auto text = in.get_string(kSentenceLimit);
      if (code == 0 || code > static_cast<uint32_t>(Code::kInternal)) return std::nullopt;
      note.failure = Status(static_cast<Code>(code), std::move(text));
      break;
    }
    case NoteKind::kInquiry: {
      note.key.stream = in.get<uint64_t>();
      note.key.sequence = in.get<uint64_t>();
      auto reason = in.get<uint8_t>();
      if (reason > static_cast<uint8_t>(Reason::kDeadline)) return std::nullopt;
      note.reason = static_cast<Reason>(reason);
      note.description = read_description(in);
      break;
    }
    case NoteKind::kAnswer: {
      note.key.stream = in.get<uint64_t>();
      note.key.sequence = in.get<uint64_t>();
      auto answer = in.get<uint8_t>();
      if (answer > static_cast<uint8_t>(Answer::kLeaving)) return std::nullopt;
      note.answer = static_cast<Answer>(answer);
      note.detail = in.get_string(kSentenceLimit);
      break;
    }
    default:
      break;
  }
  if (!in.ok() || in.remaining() != 0) return std::nullopt;
  return note;
}

std::vector<Rank> control_neighbours(Rank rank, Rank size) {
  std::vector<Rank> out;
  if (rank > 0) out.push_back(control_parent(rank));
  for (int64_t child = 4 * int64_t{rank} + 1; child <= 4 * int64_t{rank} + 4 && child < size;
       ++child)
    out.push_back(static_cast<Rank>(child));
  return out;
}

}  // namespace paceline::engine
