// The shared page and the two rings of one connection, and the rules that make them safe without a
// lock.
//
//   ┌───────────────┬──────────────────────┬──────────────────────┐
//   │ Page          │ ring 0               │ ring 1               │
//   │ side[0,1]     │ written by side 0    │ written by side 1    │
//   └───────────────┴──────────────────────┴──────────────────────┘
// Side 0 is the process that connected and made the memory, side 1 the one that accepted.
//
// Ring. One producer, one consumer. `head` and `tail` count bytes since the start; only the
// producer stores head, only the consumer stores tail. The producer writes a record, then stores
// head with release; the consumer loads head with acquire and so sees the whole record, or nothing
// of it: a producer that dies in the middle leaves no torn record. The consumer stores tail with
// release after its last read of the record; the producer loads it with acquire before it writes
// there again. Records are multiples of kLine and lie in one piece; where the rest before the
// ring's end is too short, a record of type kSkip fills it.
//
// Sleep. A process that is about to block must not miss a record, and a process that publishes one
// must not pay for a system call unless the other blocks. This is Dekker's pattern with
// sequentially consistent fences:
//   consumer: asleep = 1; fence; look at head (and at all else that it waits for); block only if
//   nothing came producer: head = …;   fence; look at asleep; if it is 1: swap it for 0 and ring
//   the bell
// In every order of the two fences at least one side sees the other's store: if the producer's
// comes first, the consumer sees head and does not block; if the consumer's comes first, the
// producer sees asleep and rings. The bell is an eventfd, which remembers a ring that comes before
// the block. Swapping means that of several records only the first one rings. The same holds for a
// producer that waits for room: it stores `starved` before asleep, and the consumer looks at it
// after storing tail.
//
// Abort. `aborted` is stored by a sender before it gives its buffers back. A receiver that has read
// bytes out of such a buffer, then fences, then finds aborted still 0, has read them while they
// were still lent: either its fence came first, and so did its reads, or it would see the store. If
// it is 1 the bytes are dropped.
//
// In the peer's arena. A receiver reads messages there, chunk by chunk, and writes the answers that their sender asked for;
// each chunk between at_work = 1 and at_work = 0. It fences after the 1 and looks at the peer's `aborted`; the peer that
// aborts fences after storing that and waits until `at_work` is 0. So either the receiver sees the abort and leaves the
// memory alone, or the peer sees it at work and waits for the chunk's end. Reads are no exception: memory that was given
// back has no pages, and the system kills who reads it where it has no page to put there (SIGBUS: a full /dev/shm).
//
// All that is read here was written by another process: sizes are checked against the ring before
// use, and a record's header is copied out once, so that what was checked is what is used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>

namespace paceline::wire::shm {

inline constexpr uint64_t kLine = 64;

/// What one side stores and the other reads; each word that is stored often has a cache line of its
/// own.
struct Side {
  alignas(kLine) std::atomic<uint64_t> head;  ///< of the ring that this side writes
  alignas(kLine) std::atomic<uint64_t> tail;  ///< of the ring that this side reads
  std::atomic<uint64_t> eager_taken;  ///< eager bytes that found their receive: the peer's credit
  alignas(kLine) std::atomic<uint32_t> asleep;
  std::atomic<uint32_t> starved;  ///< this side waits for room in the ring that it writes
  std::atomic<uint32_t> aborted;  ///< this side's buffers are no longer lent
  alignas(kLine) std::atomic<uint32_t> at_work;  ///< this side reads or writes the other's arena
};

struct Page {
  Side side[2];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
inline constexpr uint64_t kPageBytes = 4096;
static_assert(sizeof(Page) <= kPageBytes);

constexpr uint64_t segment_bytes(uint64_t ring_bytes) { return kPageBytes + 2 * ring_bytes; }

enum class RecordType : uint16_t {
  kSkip = 0,   ///< nothing up to the ring's end
  kEager = 1,  ///< a whole message: tag, digest, payload
  kOffer = 2,  ///< a message that waits to be pulled: tag, digest, length, where, id
  kPull = 3,   ///< receiver to sender: id can't be read in place, send it as pieces
  kPiece = 4,  ///< bytes [offset, …) of message id: in the payload, or `length` bytes at `where` in
               ///< the arena
  kFreed =
      5,  ///< receiver to sender: the arena slot at `where` has been read; with kAnswered: it holds the answer
  kTaken = 6,  ///< receiver to sender: message id is complete; `digest` holds the Code
  kNote = 7,   ///< payload for the control plane
  kWithdrawn =
      8,  ///< sender to receiver: message id is not lent any more, no piece of it will come
};

/// What an offer says of an answer (Answer in channel.h). The first two: of the place at `offset` of an arena.
enum class OfferFlag : uint32_t {
  kNone = 0,
  kAnswerHere = 1,      ///< of the sender's: what the message becomes may be written there
  kAnswered = 2,        ///< of the receiver's: the message's bytes lie there already
  kAnswerInPieces = 3,  ///< asked for as pieces, their slots bring back what they become
  kCameInPieces = 4,    ///< the message's bytes came back with the pieces of message `offset`
};

/// A record's first bytes; the payload follows.
struct RecordHeader {
  uint32_t payload = 0;  ///< bytes after the header
  RecordType type = RecordType::kSkip;
  uint16_t in_arena = 0;  ///< `where` is an offset in the sender's arena, not an address
  uint32_t digest = 0;
  OfferFlag flag = OfferFlag::kNone;
  uint64_t tag = 0;
  uint64_t length = 0;
  uint64_t where = 0;
  uint64_t id = 0;
  uint64_t offset = 0;
  uint64_t spare = 0;
};
static_assert(sizeof(RecordHeader) == kLine);
static_assert(std::is_trivially_copyable_v<RecordHeader>);

/// The whole record, padded. 8 bytes of payload make 128: header and payload, two adjacent lines.
constexpr uint64_t record_bytes(uint64_t payload) {
  return (sizeof(RecordHeader) + payload + kLine - 1) / kLine * kLine;
}

/// The end that writes.
class RingWriter {
 public:
  RingWriter() = default;
  RingWriter(std::byte* ring, uint64_t capacity, Side* mine, const Side* theirs)
      : ring_(ring), capacity_(capacity), mine_(mine), theirs_(theirs) {}

  /// The longest payload that a record may have: two of them fit, wherever the ring's end lies.
  [[nodiscard]] uint64_t payload_limit() const { return capacity_ / 2 - sizeof(RecordHeader); }

  /// False where there is no room now. Publishes the record; the caller then looks at the peer's
  /// `asleep`.
  bool write(RecordHeader header, std::span<const std::byte> payload) {
    const uint64_t need = record_bytes(payload.size());
    const uint64_t at = head_ % capacity_;
    const uint64_t rest = capacity_ - at;
    const uint64_t skip = rest < need ? rest : 0;
    if (!has_room(skip + need)) return false;
    if (skip != 0) {
      RecordHeader filler;
      filler.payload = static_cast<uint32_t>(skip - sizeof(RecordHeader));
      std::memcpy(ring_ + at, &filler, sizeof(filler));
    }
    header.payload = static_cast<uint32_t>(payload.size());
    std::byte* to = ring_ + (head_ + skip) % capacity_;
    std::memcpy(to, &header, sizeof(header));
    if (!payload.empty()) std::memcpy(to + sizeof(header), payload.data(), payload.size());
    head_ += skip + need;
    mine_->head.store(head_, std::memory_order_release);
    return true;
  }

  /// Room for a record of `payload` bytes at the worst place.
  bool may_fit(uint64_t payload) { return has_room(2 * record_bytes(payload)); }

 private:
  bool has_room(uint64_t need) {
    if (capacity_ - (head_ - tail_) >= need) return true;
    uint64_t tail = theirs_->tail.load(std::memory_order_acquire);
    // A tail that runs backwards or past head is a defect of the peer: never trust it with memory.
    if (tail - tail_ > head_ - tail_) return false;
    tail_ = tail;
    return capacity_ - (head_ - tail_) >= need;
  }

  std::byte* ring_ = nullptr;
  uint64_t capacity_ = 0;
  Side* mine_ = nullptr;
  const Side* theirs_ = nullptr;
  uint64_t head_ = 0;
  uint64_t tail_ = 0;  ///< as last seen
};

/// The end that reads.
class RingReader {
 public:
  struct Record {
    RecordHeader header;
    std::span<const std::byte> payload;  ///< in the ring, valid until pop()
  };
  enum class State { kEmpty, kRecord, kBroken };

  RingReader() = default;
  RingReader(const std::byte* ring, uint64_t capacity, Side* mine, const Side* theirs)
      : ring_(ring), capacity_(capacity), mine_(mine), theirs_(theirs) {}

  [[nodiscard]] bool has_more() const {
    return theirs_->head.load(std::memory_order_acquire) != tail_;
  }

  /// The next record, if one is there. kBroken: the bytes can't have been written by RingWriter.
  State peek(Record& record) {
    for (;;) {
      const uint64_t head = theirs_->head.load(std::memory_order_acquire);
      const uint64_t available = head - tail_;
      if (available == 0) return State::kEmpty;
      const uint64_t at = tail_ % capacity_;
      if (available > capacity_ || available < sizeof(RecordHeader) || available % kLine != 0) {
        return State::kBroken;
      }
      std::memcpy(&record.header, ring_ + at, sizeof(RecordHeader));
      const uint64_t size = record_bytes(record.header.payload);
      if (size > available || size > capacity_ - at) return State::kBroken;
      size_ = size;
      if (record.header.type == RecordType::kSkip) {
        pop();
        continue;
      }
      record.payload = {ring_ + at + sizeof(RecordHeader), record.header.payload};
      return State::kRecord;
    }
  }

  /// Gives the record's room back.
  void pop() {
    tail_ += size_;
    mine_->tail.store(tail_, std::memory_order_release);
  }

 private:
  const std::byte* ring_ = nullptr;
  uint64_t capacity_ = 0;
  Side* mine_ = nullptr;
  const Side* theirs_ = nullptr;
  uint64_t tail_ = 0;
  uint64_t size_ = 0;
};

}  // namespace paceline::wire::shm
