#include "bootstrap/members.h"

#include <fmt/format.h>

#include "base/bytes.h"
#include "bootstrap/kv.h"

namespace paceline::bootstrap {
namespace {

constexpr uint32_t kRecordMagic = 0x4d504c31;  // "1LPM"
constexpr uint32_t kTableMagic = 0x54504c31;
constexpr uint32_t kNoteMagic = 0x4e504c31;
constexpr std::size_t kMaxSettings = 256;
constexpr std::size_t kMaxText = 4096;
/// A note of a failure must fit into a value of the key-value space: magic, kind, code and length stand before its text, an
/// address with its length and a byte behind it.
constexpr std::size_t kMaxReason = kValueLimit - 4 - 1 - 4 - 4 - 4 - 1;

Status corrupted(const char* what) {
  return {Code::kCorrupted, fmt::format("{}: the bytes are not what this version writes", what)};
}

}  // namespace

std::string encode_record(const Record& record) {
  ByteWriter out;
  out.put(kRecordMagic);
  out.put(record.wire);
  out.put(record.size);
  out.put_string(record.build);
  out.put_string(record.host);
  out.put_string(record.address);
  return {reinterpret_cast<const char*>(out.bytes().data()), out.bytes().size()};
}

Result<Record> decode_record(const std::string& text) {
  ByteReader in(std::as_bytes(std::span(text)));
  auto magic = in.get<uint32_t>();
  Record record;
  record.wire = in.get<uint32_t>();
  record.size = in.get<Rank>();
  record.build = in.get_string(64);
  record.host = in.get_string(kMaxHost);
  record.address = in.get_string(kMaxAddress);
  if (!in.ok() || magic != kRecordMagic || in.remaining() != 0) return corrupted("a rank's record");
  return record;
}

std::vector<std::byte> encode_members(std::span<const Member> members) {
  ByteWriter out;
  out.put(kTableMagic);
  out.put(static_cast<uint32_t>(members.size()));
  for (const auto& member : members) {
    out.put(member.rank);
    out.put(member.pid);
    out.put_string(member.host);
    out.put_string(member.node_id);
    out.put_string(member.address);
  }
  return out.take();
}

Result<std::vector<Member>> decode_members(std::span<const std::byte> bytes, Rank size) {
  ByteReader in(bytes);
  auto magic = in.get<uint32_t>();
  auto count = in.get<uint32_t>();
  if (!in.ok() || magic != kTableMagic || count > static_cast<uint32_t>(size)) {
    return corrupted("a table of members");
  }
  std::vector<Member> members;
  Rank before = -1;
  for (uint32_t i = 0; i < count; ++i) {
    Member member;
    member.rank = in.get<Rank>();
    member.pid = in.get<int64_t>();
    member.host = in.get_string(kMaxHost);
    member.node_id = in.get_string(kMaxNodeId);
    member.address = in.get_string(kMaxAddress);
    if (!in.ok() || member.rank <= before || member.rank >= size)
      return corrupted("a table of members");
    before = member.rank;
    members.push_back(std::move(member));
  }
  if (in.remaining() != 0) return corrupted("a table of members");
  return members;
}

std::vector<std::byte> encode_note(const JoinNote& note) {
  ByteWriter out;
  out.put(kNoteMagic);
  out.put(static_cast<uint8_t>(note.kind));
  switch (note.kind) {
    case NoteKind::kHello:
      out.put_string(note.host);
      out.put_string(note.address);
      out.put_string(note.build);
      out.put(static_cast<uint32_t>(note.settings.size()));
      for (const auto& [name, text] : note.settings) {
        out.put_string(name);
        out.put_string(text);
      }
      break;
    case NoteKind::kGather:
    case NoteKind::kTable:
      out.put(note.bytes);
      break;
    case NoteKind::kFailed:
      out.put(static_cast<int32_t>(note.code));
      out.put_string(shortened(note.text, kMaxReason - note.address.size()));
      out.put_string(note.address);
      out.put(static_cast<uint8_t>(note.is_hearsay ? 1 : 0));
      break;
    case NoteKind::kImpatient:
      break;
  }
  return out.take();
}

bool is_join_note(std::span<const std::byte> bytes) {
  return ByteReader(bytes).get<uint32_t>() == kNoteMagic;
}

Result<JoinNote> decode_note(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  auto magic = in.get<uint32_t>();
  JoinNote note;
  auto kind = in.get<uint8_t>();
  if (magic != kNoteMagic || kind < 1 || kind > 5) return corrupted("a bootstrap note");
  note.kind = static_cast<NoteKind>(kind);
  if (note.kind == NoteKind::kHello) {
    note.host = in.get_string(kMaxHost);
    note.address = in.get_string(kMaxAddress);
    note.build = in.get_string(64);
    auto count = in.get<uint32_t>();
    if (count > kMaxSettings) return corrupted("a bootstrap note");
    for (uint32_t i = 0; i < count && in.ok(); ++i) {
      auto name = in.get_string(64);
      note.settings[name] = in.get_string(kMaxText);
    }
  } else if (note.kind == NoteKind::kFailed) {
    auto code = in.get<int32_t>();
    if (code < 1 || code > static_cast<int32_t>(Code::kInternal))
      return corrupted("a bootstrap note");
    note.code = static_cast<Code>(code);
    note.text = in.get_string(kMaxText);
    note.address = in.get_string(kMaxAddress);
    note.is_hearsay = in.get<uint8_t>() != 0;
  } else if (note.kind != NoteKind::kImpatient) {
    note.bytes = in.get<uint64_t>();
  }
  if (!in.ok() || in.remaining() != 0) return corrupted("a bootstrap note");
  return note;
}

std::string difference(const SettingTexts& mine, const std::string& me, const SettingTexts& theirs,
                       const std::string& them) {
  std::string text;
  auto add = [&](const std::string& name, const std::string* a, const std::string* b) {
    auto quote = [](const std::string* value) { return value ? "'" + *value + "'" : "not known"; };
    text += fmt::format("{}{} is {} on {} and {} on {}", text.empty() ? "" : "; ", name, quote(a),
                        me, quote(b), them);
  };
  for (const auto& [name, value] : mine) {
    auto other = theirs.find(name);
    if (other == theirs.end() || other->second != value) {
      add(name, &value, other == theirs.end() ? nullptr : &other->second);
    }
  }
  for (const auto& [name, value] : theirs) {
    if (!mine.contains(name)) add(name, nullptr, &value);
  }
  return text;
}

}  // namespace paceline::bootstrap
