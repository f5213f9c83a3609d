// The bytes of bootstrap's messages: a member's greeting, tables of members. All of it comes from
// other processes, so every length and rank is checked.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "bootstrap/topology.h"

namespace paceline::bootstrap {

inline constexpr std::size_t kMaxHost = 255;
inline constexpr std::size_t kMaxNodeId = 255;
inline constexpr std::size_t kMaxAddress = 1024;
/// What one member takes in a table, at most.
inline constexpr std::size_t kMaxMemberBytes = 12 + 12 + kMaxHost + kMaxNodeId + kMaxAddress;

/// Settings that must agree, by name, as text.
using SettingTexts = std::map<std::string, std::string>;

/// What a rank publishes for its children before any connection exists.
struct Record {
  std::string build;  ///< this library's version
  uint32_t wire = 0;  ///< the protocol's version
  Rank size = 0;      ///< of the job, as this rank was told
  std::string host;
  std::string address;  ///< wire's
};
std::string encode_record(const Record& record);
Result<Record> decode_record(const std::string& text);

/// A table of members in ascending order of rank.
std::vector<std::byte> encode_members(std::span<const Member> members);
/// kCorrupted: truncated, over-long, ranks outside [0, size) or not ascending.
Result<std::vector<Member>> decode_members(std::span<const std::byte> bytes, Rank size);

/// Notes of bootstrap, told from the engine's by their first bytes.
enum class NoteKind : uint8_t {
  kHello = 1,      ///< child to parent: who I am, where, my settings
  kGather = 2,     ///< child to parent: my subtree's table follows as a message of so many bytes
  kTable = 3,      ///< parent to child: the whole table follows as a message of so many bytes
  kFailed = 4,     ///< to all neighbours: the job can't start, and why
  kImpatient = 5,  ///< to all neighbours: my patience has ended; whom do you wait for?
};
struct JoinNote {
  NoteKind kind = NoteKind::kHello;
  std::string host;     ///< kHello
  std::string address;  ///< kHello; kFailed: of the rank whose record says otherwise, if one's does
  std::string build;    ///< kHello
  SettingTexts settings;    ///< kHello
  uint64_t bytes = 0;       ///< kGather, kTable
  Code code = Code::kOk;    ///< kFailed
  std::string text;         ///< kFailed
  bool is_hearsay = false;  ///< kFailed: read in the space, where an earlier start may have left it
};
std::vector<std::byte> encode_note(const JoinNote& note);
/// True when `bytes` begin as bootstrap's notes do.
bool is_join_note(std::span<const std::byte> bytes);
Result<JoinNote> decode_note(std::span<const std::byte> bytes);

/// "algorithm is 'ring' on rank 0 (host a) and 'tree' on rank 3 (host b)" for every setting that
/// differs; empty when they agree.
std::string difference(const SettingTexts& mine, const std::string& me, const SettingTexts& theirs,
                       const std::string& them);

}  // namespace paceline::bootstrap
