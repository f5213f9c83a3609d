// The one seam between what is sent and how it travels.
//
// A Channel carries messages between this rank and every other rank of the job. It knows ranks,
// tags and bytes; it knows no tensor, no collective and no plan. Behind it stand shared memory
// (shm/), kernel TCP with several flows (tcp/), the simulated network (fake/), and a router that
// picks one of them per peer.
//
// Matching. A message is identified by (sender, receiver, tag). Exactly one send and one receive
// carry each identity; they may be posted in either order. Messages of different tags may overtake
// each other.
//
// Flow control. A message longer than the channel's eager limit moves only after the receiver has
// posted its receive, so nothing unexpected is ever buffered beyond the eager budget, and no
// message blocks another.
//
// Ownership. Buffers stay the caller's and must stay valid and (for sends) unchanged until the
// completion with their cookie has been returned, also when it carries an error. A send completes
// when the receiver has all of it (or, for eager messages, when the channel holds a copy), so that
// a broken flow can be resumed.
//
// Threads. A Channel is driven by one thread at a time: the caller serialises all calls. Only
// wake() may be called from any thread. progress() never blocks. All code behind the seam takes the
// time from `now`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/interlude.h"
#include "base/packets.h"
#include "base/status.h"
#include "base/types.h"

namespace paceline {
class Workers;
}

namespace paceline::wire {

using Tag = uint64_t;

/// Takes a message's bytes while they are warm in the cache, instead of a plain copy into memory.
class Sink {
 public:
  virtual ~Sink() = default;
  /// Bytes [offset, offset + data.size()) of the message. Every byte comes exactly once; pieces
  /// come in any order; `offset` is a multiple of kPieceAlign and so is the size, but for the
  /// message's last piece. `data` is valid during the call only. Runs inside progress(); where the channel has workers,
  /// for several pieces at once.
  virtual void consume(uint64_t offset, std::span<const std::byte> data) = 0;
  /// The same, and what these bytes become is written to `place`, as many bytes that the sender sees (it may be where
  /// `data` lies). False: it was not.
  virtual bool consume_and_answer(uint64_t offset, std::span<const std::byte> data,
                                  std::byte* /*place*/) {
    consume(offset, data);
    return false;
  }
};
/// Pieces begin and end at multiples of this, so that no element is cut.
inline constexpr uint64_t kPieceAlign = 64;

/// Where a message goes: a buffer, or a sink for at most `capacity` bytes. The message may be
/// shorter.
struct Inbox {
  std::byte* into = nullptr;
  Sink* sink = nullptr;
  uint64_t capacity = 0;
  /// The sink's owner would rather read the message where it lies, later and in a pass of its own: where the sender's
  /// memory can be seen the sink gets nothing, and Completion::held is not 0.
  bool hold = false;
};

struct Completion {
  uint64_t cookie = 0;
  uint64_t bytes = 0;  ///< of the message; may be below the inbox's capacity
  Status status;
  uint64_t answered = 0;  ///< of a receive: for Answer::given; 0: the sink has not answered
  uint64_t held =
      0;  ///< of a receive with Inbox::hold: for open_held(), until close_held(); 0: the sink has it all
};

/// Two messages of equal length that belong together: one whose bytes the receiver's sink turns into something, and a
/// later one that brings that back. Where the receiver can write the sender's memory, or what the first came in, it does so
/// at once, while all is in its cache, and the later message carries nothing.
struct Answer {
  std::byte* place = nullptr;  ///< of the first: where its sender will receive the later one
  uint64_t given = 0;          ///< of the later one: Completion::answered of the first
};

/// An unsolicited short message (at most kNoteLimit bytes) for the control plane: delivered in
/// order per peer.
struct Note {
  Rank peer = -1;
  std::vector<std::byte> bytes;
};
inline constexpr std::size_t kNoteLimit = 16 * 1024;

/// A peer that is gone for good. Every request with that peer completes with the same status.
struct Loss {
  Rank peer = -1;
  Status status;
};

/// What one call of progress() brought.
struct Events {
  std::vector<Completion> completions;
  std::vector<Note> notes;
  std::vector<Loss> losses;
  void clear() {
    completions.clear();
    notes.clear();
    losses.clear();
  }
  [[nodiscard]] bool empty() const {
    return completions.empty() && notes.empty() && losses.empty();
  }
};

/// Bytes since the start. `wire` counts everything handed to the layer below (headers,
/// acknowledgements and repeats included, lower protocols' headers excluded); `payload` counts
/// message bytes once.
struct Counters {
  uint64_t payload_sent = 0;
  uint64_t payload_received = 0;
  uint64_t wire_sent = 0;
  uint64_t wire_received = 0;
  uint64_t network = 0;  ///< of both `wire`: what went through a network, not through memory
  uint64_t lent = 0;     ///< of wire_sent: left from the caller's pages, without a copy
  uint64_t repeats = 0;  ///< pieces sent again
  uint64_t held = 0;     ///< of payload_received: read by the receiver where its sender had it
};

class Channel {
 public:
  virtual ~Channel() = default;

  /// `digest` names the operation that the message belongs to; when both sides have posted and the
  /// digests differ, both complete with Code::kMismatch (0 matches anything).
  virtual void send(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
                    uint64_t cookie) = 0;
  virtual void receive(Rank peer, Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) = 0;
  /// send() of one of two messages that belong together. `place` may be written from now on until the later message has
  /// come. A channel that can't carries both as they are.
  virtual void send_with_answer(Rank peer, Tag tag, uint32_t digest,
                                std::span<const std::byte> data, uint64_t cookie,
                                const Answer& /*answer*/) {
    send(peer, tag, digest, data, cookie);
  }
  /// A held message's bytes, in the sender's memory, to be read until close_held(): outside of progress(), and soon, for a
  /// sender that gives up waits for it. Its send ends with close_held(). Empty: the sender has taken it back, or is gone.
  virtual std::span<const std::byte> open_held(Rank /*peer*/, uint64_t /*held*/) { return {}; }
  /// Every held message has to be closed, opened or not. False: what was read since open_held() may be anything, for the
  /// sender took it back meanwhile.
  virtual bool close_held(Rank /*peer*/, uint64_t /*held*/) { return false; }
  /// Delivered at least until the peer is lost; no completion. Connects if need be.
  virtual void post_note(Rank peer, std::span<const std::byte> bytes) = 0;
  /// True while a note for a peer that is not lost waits in this process: it would end with it.
  [[nodiscard]] virtual bool notes_waiting() const { return false; }

  /// Told, within progress(), when a long copy to or from a socket, or what workers do, begins and ends. In between send() and receive() may
  /// be called, from other threads and one at a time, nothing else. nullptr: nobody.
  virtual void set_interlude(Interlude* /*interlude*/) {}
  /// Threads that may lend a hand, within progress(), with long messages that lie in memory. Must outlive the channel, or
  /// what drives it. nullptr: none.
  virtual void set_workers(Workers* /*workers*/) {}

  /// Moves what can be moved now and appends what happened. Returns true when anything did.
  virtual bool progress(Time now, Events& events) = 0;
  /// The latest time by which progress() must be called again even if poll_fd() stays silent.
  [[nodiscard]] virtual Time next_timer() const = 0;
  /// A descriptor that is readable whenever progress() has something to do, for poll(2); -1: none,
  /// the caller has to poll by time.
  [[nodiscard]] virtual int poll_fd() const = 0;
  /// To be called before blocking on poll_fd(); false: something arrived meanwhile, call progress()
  /// instead.
  virtual bool prepare_wait() = 0;
  /// Makes poll_fd() readable. Any thread.
  virtual void wake() = 0;

  /// Tells the channel that a peer is dead (learnt elsewhere): completes its requests with `why`.
  virtual void drop_peer(Rank peer, const Status& why) = 0;
  /// Completes every request with `why` at the next progress(); later requests fail the same way.
  /// When the next progress() has returned, no caller's buffer is touched any more.
  virtual void abort(const Status& why) = 0;

  /// While more waits than leaves, sends to other ranks over a network at most so many bytes a second, evenly, headers
  /// included (to several ranks half as much again: now one has more to get, now another); 0: as it can. Any thread. For
  /// channels that share a link: TCP gives connections behind a full queue what their windows happen to be worth, one
  /// rank of a node is through early, and the others alone do not fill the link. What is short goes as fast as ever.
  virtual void limit_rate(uint64_t /*bytes_per_second*/) {}

  [[nodiscard]] virtual Counters counters() const = 0;
  /// How what goes to other nodes is cut, for predictions: this rank's own view, which no other need share. Where peers
  /// differ (MTUs), the smallest of those that it is connected to; what goes through memory is cut nowhere.
  [[nodiscard]] virtual Packets packets() const { return {}; }
  /// "tcp, 4 flows", "shared memory (process_vm_readv)" for the start-up line and for errors.
  [[nodiscard]] virtual std::string describe() const = 0;
};

}  // namespace paceline::wire
