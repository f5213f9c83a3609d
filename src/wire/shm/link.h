// An established connection with one rank of this node: the shared rings, the bells, and whatever
// lets one process read the other's memory.
#pragma once

#include <sys/types.h>

#include <memory>
#include <span>
#include <string>

#include "base/fd.h"
#include "base/shared_memory.h"
#include "wire/shm/allocator.h"
#include "wire/shm/ring.h"

namespace paceline::wire::shm {

/// What a handshake yields.
struct LinkParts {
  Fd socket;  ///< end of file: the peer is gone
  Fd bell;    ///< the peer's eventfd
  Fd pidfd;   ///< the peer's process; may be empty (before Linux 5.3)
  SharedMemory memory;
  uint64_t ring_bytes = 0;
  int side = 0;            ///< 0: this process connected, 1: it accepted
  pid_t pid = 0;           ///< of the peer, in this pid namespace
  std::string no_vm_read;  ///< why its memory can't be read; empty: it can
};

class Link {
 public:
  explicit Link(LinkParts parts);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link();

  /// Publishes a record and rings if the peer sleeps. False: no room now.
  bool write(const RecordHeader& header, std::span<const std::byte> payload);
  /// Room for one more record of that size, for sure.
  bool may_write(uint64_t payload) { return writer_.may_fit(payload); }
  [[nodiscard]] uint64_t payload_limit() const { return writer_.payload_limit(); }

  [[nodiscard]] bool has_more() const { return reader_.has_more(); }
  RingReader::State peek(RingReader::Record& record) { return reader_.peek(record); }
  /// Ends the record that peek() showed; wakes a peer that waits for room.
  void pop();

  /// Credit for eager messages, in bytes of records.
  void return_credit(uint64_t bytes);
  [[nodiscard]] uint64_t credit_returned() const;

  /// This side is about to block (see ring.h); `starved`: also until there is room. Look at
  /// has_more() after it.
  void fall_asleep(bool starved);
  void stay_awake();

  /// No buffer of this side may be read any more.
  void revoke();
  /// False once the peer has revoked its buffers. To be asked after reading from them, before using
  /// the bytes.
  [[nodiscard]] bool still_lent() const;
  /// False when the peer's process has ended, or the socket has.
  [[nodiscard]] bool alive() const;

  /// Lets the peer map this process's arena, once. False: it can't be told now.
  bool announce(const ShmAllocator& arena);
  /// Takes what the peer has announced. False: the socket is at its end, or carries nonsense.
  bool read_socket();
  /// Bytes of the peer's arena, to be read between begin_access() and end_access() only; empty where it is not mapped or
  /// the range lies outside.
  [[nodiscard]] std::span<const std::byte> arena(uint64_t offset, uint64_t bytes) const;
  /// The same, to be written; nullptr where there is none.
  [[nodiscard]] std::byte* arena_to_write(uint64_t offset, uint64_t bytes) const;
  /// False: the peer has taken its buffers back, nothing of its arena may be touched.
  [[nodiscard]] bool begin_access();
  void end_access();
  /// After revoke(): waits until the peer has ended what it reads from this process's arena or writes there, for that
  /// takes microseconds (what several threads read together: tenths of a millisecond). False: it has not in a second (it may be stopped), and is alive.
  [[nodiscard]] bool await_access() const;
  [[nodiscard]] bool has_arena() const { return arena_.size() != 0; }
  [[nodiscard]] bool arena_failed() const { return arena_failed_; }

  /// Reads the peer's private memory; an errno.
  int read_memory(uint64_t address, void* into, std::size_t bytes) const;
  [[nodiscard]] bool can_read_memory() const { return parts_.no_vm_read.empty(); }
  void forbid_read_memory(std::string why) { parts_.no_vm_read = std::move(why); }
  [[nodiscard]] const std::string& no_vm_read() const { return parts_.no_vm_read; }

  [[nodiscard]] int socket() const { return parts_.socket.get(); }
  [[nodiscard]] int pidfd() const { return parts_.pidfd.get(); }

 private:
  void wake_peer();
  void adopt_arena(Fd fd, uint64_t bytes);
  [[nodiscard]] Side& mine() const { return page_->side[parts_.side]; }
  [[nodiscard]] Side& theirs() const { return page_->side[1 - parts_.side]; }

  LinkParts parts_;
  Page* page_;
  RingWriter writer_;
  RingReader reader_;
  SharedMemory arena_;
  bool arena_failed_ = false;
  bool announced_ = false;
};

}  // namespace paceline::wire::shm
