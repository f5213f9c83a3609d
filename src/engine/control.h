// The notes that engines send each other beside the data: failures, questions about an operation
// that does not move, and goodbyes. They travel as wire::Note.
//
//   byte 0      kind (NoteKind)
//   the rest    the fields of the kind, as written below; strings carry a 32-bit length
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/describe.h"

namespace paceline::engine {

enum class NoteKind : uint8_t {
  kHello = 1,    ///< opens the control connection; no fields
  kFailure = 2,  ///< ends the job: code u32, sentence
  kInquiry = 3,  ///< "what of this operation?"
  kAnswer = 4,
  kGoodbye = 5,       ///< to the parent: my subtree has finished
  kFarewell = 6,      ///< to the children: everybody has finished
  kFarewellSeen = 7,  ///< to the parent: the farewell has arrived
};

/// Names an operation on every rank: the stream it belongs to (a group, or a pair with a tag) and
/// its number there.
struct OpKey {
  uint64_t stream = 0;
  uint64_t sequence = 0;
  bool operator==(const OpKey&) const = default;
};

enum class Reason : uint8_t { kStall = 0, kMismatch = 1, kDeadline = 2 };
enum class Answer : uint8_t { kWaiting = 0, kEnded = 1, kNotSubmitted = 2, kLeaving = 3 };

struct ControlNote {
  NoteKind kind = NoteKind::kHello;
  Status failure;                    // kFailure
  OpKey key;                         // kInquiry, kAnswer
  Reason reason = Reason::kStall;    // kInquiry
  Description description;           // kInquiry
  Answer answer = Answer::kWaiting;  // kAnswer
  std::string
      detail;  // kAnswer: the last operation of the stream; kWaiting: for what it has not submitted it
};

std::vector<std::byte> encode_note(const ControlNote& note);
/// nullopt: not a note of ours.
std::optional<ControlNote> decode_note(std::span<const std::byte> bytes);

/// The ranks that `rank` shares a control connection with: its parent and children in the tree with four children a
/// rank, the one that bootstrap connects along.
std::vector<Rank> control_neighbours(Rank rank, Rank size);
constexpr Rank control_parent(Rank rank) { return rank == 0 ? -1 : (rank - 1) / 4; }

}  // namespace paceline::engine
