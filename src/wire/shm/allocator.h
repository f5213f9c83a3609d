// Memory that the other ranks of the node can read in place.
//
// One sparse piece of shared memory holds all allocations of a process, so a peer maps it once and
// an address in it is an offset. Pages come with an allocation (huge pages where they fit, touched
// by the allocating thread, so they lie on its NUMA node) and go back to the system when it is
// freed.
//
// Buffers that somebody else has allocated can take part too (share()): their pages are exchanged for pages of that piece.
//
// Thread-safe. Where no shared memory is to be had, allocations are private memory: slower, never
// wrong; it is said once.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <utility>

#include "base/shared_memory.h"

namespace paceline::wire::shm {

struct AllocatorOptions {
  /// Address space for all allocations together; 0: the machine's memory. Pages are taken only as
  /// needed.
  uint64_t capacity = 0;
  bool huge_pages = true;
  MemorySources sources;
};

class ShmAllocator {
 public:
  explicit ShmAllocator(AllocatorOptions options) : options_(std::move(options)) {}
  ShmAllocator() : ShmAllocator(AllocatorOptions{}) {}
  ~ShmAllocator();
  ShmAllocator(const ShmAllocator&) = delete;
  ShmAllocator& operator=(const ShmAllocator&) = delete;

  /// At least `bytes` bytes, aligned to 64 (from 2 MiB on: to 2 MiB). nullptr: no memory at all.
  [[nodiscard]] void* allocate(uint64_t bytes);
  /// Memory of allocate(), or nullptr. False: it is neither (nothing was done).
  bool free(void* memory);
  /// Memory of allocate() or share(), or a part of it, that a peer may still read or write: free() takes it, but its pages
  /// stay and are never handed out again.
  void keep(const void* memory);
  /// keep() for a part of such memory, of whole pages at least a page long, that this process goes on to use: it gets
  /// private pages there, with what the shared ones hold (the rest of a page at either end, too), and sees nothing of what a
  /// peer writes later. Other threads may use it meanwhile. kResourceExhausted: some of it stays shared.
  Status detach(const void* memory, uint64_t bytes);
  /// Only from shared memory, for the channel's own buffers; nullptr where there is none.
  [[nodiscard]] void* allocate_shared(uint64_t bytes);

  /// Makes memory of the caller's such memory, where it is: its whole pages are exchanged for shared ones, with what they
  /// hold (the rest of a page at either end stays private). Private, writable memory that nobody touches meanwhile, and that
  /// stays mapped until unshare(). kInvalidArgument: no whole page, or shared already; kResourceExhausted: no shared memory.
  [[nodiscard]] Status share(void* data, uint64_t bytes);
  /// Gives share()'s memory private pages again, with what the shared ones hold. kInvalidArgument: it is not shared;
  /// kResourceExhausted: it stays so.
  [[nodiscard]] Status unshare(void* data);

  /// Where [data, data + bytes) lies in the shared memory; nullopt: outside, or detached.
  [[nodiscard]] std::optional<uint64_t> offset_of(const void* data, uint64_t bytes) const;
  /// What a peer needs to map it. -1, 0 before the first allocation.
  [[nodiscard]] int fd() const;
  [[nodiscard]] uint64_t capacity() const;

  [[nodiscard]] uint64_t bytes_in_use() const;
  /// "memfd", "/dev/shm", "private memory (why)".
  [[nodiscard]] std::string describe() const;

 private:
  /// Pages of the caller's that are shared ones, by their first address.
  struct Alias {
    uint64_t bytes = 0;
    uint64_t offset = 0;
  };

  bool open();
  void* take(uint64_t bytes);
  void release(uint64_t offset);
  void keep_block(std::optional<uint64_t> offset);
  /// offset_of(), of detached memory too.
  [[nodiscard]] std::optional<uint64_t> place_of(const void* data, uint64_t bytes) const;
  [[nodiscard]] bool is_detached(uintptr_t at, uint64_t bytes) const;
  [[nodiscard]] std::optional<uint64_t> own_offset_of(const void* data, uint64_t bytes) const;
  [[nodiscard]] std::optional<uint64_t> alias_of(uintptr_t at, uint64_t bytes) const;
  void give(uint64_t offset, uint64_t bytes);
  void insert_free(uint64_t offset, uint64_t bytes);
  void erase_free(uint64_t offset, uint64_t bytes);

  AllocatorOptions options_;
  mutable std::mutex mutex_;
  bool opened_ = false;
  std::string why_private_;
  SharedMemory memory_;
  std::atomic<std::byte*> base_{
      nullptr};  ///< null until the memory is there; read without the lock
  std::atomic<uint64_t> size_{0};
  std::map<uint64_t, uint64_t> free_;                     ///< offset → bytes, never adjacent
  std::set<std::pair<uint64_t, uint64_t>> free_by_size_;  ///< (bytes, offset)
  std::map<uint64_t, uint64_t> used_;                     ///< offset → bytes
  std::set<uint64_t> kept_;                               ///< offsets of used_
  std::map<void*, uint64_t> private_;
  std::map<uintptr_t, Alias> aliases_;       ///< changed under both mutexes
  mutable std::shared_mutex alias_mutex_;    ///< taken last
  std::atomic<bool> has_aliases_{false};     ///< whether there ever was one
  std::map<uintptr_t, uintptr_t> detached_;  ///< pages, from … to, disjoint; as aliases_
  std::atomic<bool> has_detached_{false};
  uint64_t in_use_ = 0;
};

}  // namespace paceline::wire::shm
