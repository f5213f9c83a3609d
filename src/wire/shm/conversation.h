// All that passes between this rank and one other: requests are matched here and turned into
// records.
//
// Short messages are copied into the ring ("eager") as long as the peer has room for messages that
// find no receive yet. Longer ones are offered; the receiver pulls them when it has both the offer
// and the receive, by the first way that works (pieces before memory, where an answer is wanted):
//   arena    the bytes lie in memory that the receiver maps: it reads them in place
//   memory   it reads the sender's private memory, chunk by chunk while it is warm
//   pieces   it asks the sender to copy them out, piece by piece, through slots of the sender's
//   arena, or
//            through the ring where there is none
// and then says that it has taken them.
//
// A message out of the arena may ask for an answer (channel.h) in the arena: the receiver writes it as it reads. One out of
// private memory may ask for it in the slots that bring its pieces, and its sender copies it out of them. The later message is
// an offer that says so, and where; a receive for that very place is complete then.
//
// A receive may also hold a message out of the arena (channel.h): it is complete at once, and read and told as taken later.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "wire/channel.h"
#include "wire/shm/link.h"
#include "wire/shm/options.h"

namespace paceline::wire::shm {

/// What all conversations of a channel share.
struct Shared {
  ShmOptions options;
  std::vector<Completion> done;  ///< for the next progress()
  std::vector<Note> notes;
  Counters counters;
  Workers* workers = nullptr;      ///< of the channel's owner; null: none
  Interlude* interlude = nullptr;  ///< likewise
  uint64_t readers = 1;  ///< conversations that have something to read, for the next round
  std::vector<std::byte> scratch;  ///< one chunk
  Status aborted;
};

/// In Completion::answered: the answer went back in the slots of the message whose number + 1 the rest is; else the rest is an
/// offset in the peer's arena + 1.
inline constexpr uint64_t kInPieces = uint64_t{1} << 63;

class Conversation {
 public:
  Conversation(Rank peer, std::string name, Shared& shared);

  void send(Tag tag, uint32_t digest, std::span<const std::byte> data, uint64_t cookie,
            const Answer& answer);
  void receive(Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie);
  /// Something that was to be told, not a message, waits for the link or for room in the ring.
  [[nodiscard]] bool notes_waiting() const {
    return !ended() && std::any_of(queue_.begin(), queue_.end(), [](const Queued& queued) {
      return queued.header.type == RecordType::kNote;
    });
  }
  void post_note(std::span<const std::byte> bytes);
  std::span<const std::byte> open_held(uint64_t held);
  bool close_held(uint64_t held);

  void attach(std::unique_ptr<Link> link) { link_ = std::move(link); }
  [[nodiscard]] Link* link() { return link_.get(); }
  [[nodiscard]] const std::string& name() const { return name_; }

  /// Reads the peer's records and writes what waited for room; sets `moved` when it did anything.
  /// An error ends the conversation: the peer is gone or breaks the protocol.
  Status exchange(bool& moved);
  /// One chunk of one pull, or as many pulls as suit the workers, and one of a message that the peer wants as pieces.
  /// Returns the bytes moved.
  uint64_t transfer(Status& status);
  /// transfer() has something to do.
  [[nodiscard]] bool has_transfers() const { return !pulls_.empty() || !copies_.empty(); }
  [[nodiscard]] bool has_pulls() const { return !pulls_.empty(); }
  /// Waits for room in the ring.
  [[nodiscard]] bool starved() const { return !queue_.empty() || !copies_.empty(); }

  /// Writes what waits for room, if there is any now. True when something was written.
  bool write_waiting();

  /// Completes every request with `why`; later ones fail the same way.
  void end(const Status& why);
  /// The same, but the peer is there and notes still travel.
  void abort(const Status& why);
  [[nodiscard]] bool ended() const { return !ended_.is_ok(); }

 private:
  struct Posted {
    uint32_t digest = 0;
    Inbox inbox;
    uint64_t cookie = 0;
  };
  struct Arrived {
    RecordHeader header;
    std::vector<std::byte> payload;  ///< eager only
  };
  struct Held {
    RecordHeader offer;
    bool open = false;
  };
  enum class Copying : uint8_t { kNot, kToArena, kToRing };
  struct Lent {  ///< an offered message
    std::span<const std::byte> data;
    uint64_t cookie = 0;
    Tag tag = 0;
    std::byte* answer = nullptr;  ///< may be written by the peer, or from slots that it has written
    uint64_t answered = 0;        ///< bytes that have come back in slots
    Copying copying = Copying::kNot;
  };
  enum class Way { kArena, kMemory, kPieces };
  struct Pull {
    Way way = Way::kArena;
    RecordHeader offer;
    Posted posted;
    uint64_t done = 0;
    std::byte* answer = nullptr;  ///< of the peer's arena, where it is wanted
    uint64_t answered = 0;        ///< bytes written back into the slots that they came in
  };
  struct Part {  ///< of a pull, for one of several threads
    Pull* pull = nullptr;
    uint64_t from = 0;
    uint64_t bytes = 0;
    bool answered = false;
  };
  struct Copy {
    uint64_t id = 0;
    uint64_t offset = 0;
    bool in_arena = false;
  };
  struct Queued {
    RecordHeader header;
    std::vector<std::byte> copy;      ///< notes
    std::span<const std::byte> data;  ///< the caller's
    uint64_t cookie = 0;
    Answer answer;
  };
  struct Slot {
    std::byte* data = nullptr;
    bool busy = false;
    uint64_t id = 0, offset = 0, bytes = 0;  ///< what it carries: a piece of message id
  };
  struct Answered {
    const std::byte* place = nullptr;
    uint64_t bytes = 0;
  };

  // conversation.cc: matching
  bool take(const RingReader::Record& record);
  bool on_eager(const RingReader::Record& record);
  bool on_offer(const RecordHeader& offer);
  void match_eager(const RecordHeader& header, std::span<const std::byte> payload,
                   const Posted& posted);
  void match_offer(const RecordHeader& offer, const Posted& posted);
  bool on_taken(const RecordHeader& header);
  bool flush();
  void post(const RecordHeader& header);
  void fill_offer(Queued& queued);
  bool is_there(const RecordHeader& offer, const Posted& posted);
  void await_access();
  bool write_or_queue(Queued queued);
  [[nodiscard]] Status check(const RecordHeader& header, uint64_t length,
                             const Posted& posted) const;
  void complete(uint64_t cookie, uint64_t bytes, Status status, uint64_t answered = 0,
                uint64_t held = 0);
  void fail_requests(const Status& why);

  // transfer.cc: moving the bytes of offered messages
  void start_pull(const RecordHeader& offer, const Posted& posted);
  void hold(const RecordHeader& offer, const Posted& posted);
  void ask_for_pieces(Pull pull);
  void ask_for_pieces_of(const Pull& pull);
  bool ask_past_arena(const RecordHeader& piece);
  uint64_t step_pull(Status& status);
  uint64_t read_chunk(Pull& pull, uint64_t bytes, Status& status);
  static void deliver(const Pull& pull, uint64_t at, std::span<const std::byte> data);
  bool read_in_place(Pull& pull, uint64_t bytes);
  bool read_part(const Pull& pull, uint64_t from, uint64_t bytes) const;
  void finish_pull(const Pull& pull);
  bool on_pull(const RecordHeader& header);
  bool on_piece(const RingReader::Record& record);
  bool use_piece(const RecordHeader& header, std::span<const std::byte> data, bool& answered);
  void finish_pieces(uint64_t id);
  bool on_freed(const RecordHeader& header);
  bool take_answer(const Slot& slot);
  bool on_withdrawn(const RecordHeader& header);
  void withdraw(uint64_t id);
  uint64_t step_copy();
  bool make_slots();
  Slot* free_slot();
  void release_slots();

  // together.cc
  uint64_t read_together();

  Rank peer_;
  std::string name_;
  Shared& shared_;
  std::unique_ptr<Link> link_;
  Status ended_;

  std::unordered_map<Tag, Posted> posted_;
  std::unordered_map<Tag, Arrived> arrived_;
  std::unordered_map<uint64_t, Lent> lent_;
  std::deque<Queued> queue_;
  std::deque<Pull> pulls_;                        ///< read by this side, in order
  std::vector<Part> parts_;                       ///< of these, reused
  std::unordered_map<uint64_t, Pull> piecewise_;  ///< pushed by the peer
  std::deque<Copy> copies_;                       ///< pushed by this side
  std::unordered_map<uint64_t, Held> held_;       ///< by the offer's number
  std::size_t open_ = 0;                          ///< of these
  /// By the question's number: what came in slots.
  std::unordered_map<uint64_t, Answered> answers_;
  std::vector<Slot> slots_;
  bool slots_tried_ = false;
  bool access_ended_ =
      true;  ///< false: the peer stood still in the middle, and is not waited for again
  uint64_t next_id_ = 1;
  uint64_t eager_sent_ = 0;  ///< bytes of records, against the peer's credit
};

}  // namespace paceline::wire::shm
