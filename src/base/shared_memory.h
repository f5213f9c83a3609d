// Memory that several processes map, known by a file descriptor.
//
// It comes from the first source that has enough: memfd (anonymous: no name, no mount, so a
// container's 64 MB /dev/shm does not bound it), then an unlinked file in each of the directories.
// Shortage is found by asking for the pages when the memory is made, never by a SIGBUS on first
// touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/status.h"

namespace paceline {

/// Where shared memory may come from, in order of preference.
struct MemorySources {
  bool memfd = true;
  std::vector<std::string> directories = {"/dev/shm", "/tmp"};
};

/// A mapping of shared memory; unmapped and closed with the object.
class SharedMemory {
 public:
  /// kReserve: all pages are there when create() returns. kSparse: pages come on first touch; the
  /// caller asks for them with reserve() before it touches them.
  enum class Pages { kReserve, kSparse };

  /// kResourceExhausted names every source that was tried, and the fix.
  static Result<SharedMemory> create(uint64_t bytes, Pages pages, const MemorySources& sources);
  /// Maps memory that another process made. kCorrupted when the descriptor holds less than `bytes`.
  static Result<SharedMemory> adopt(Fd fd, uint64_t bytes, bool writable);

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] uint64_t size() const { return size_; }
  [[nodiscard]] int fd() const { return fd_.get(); }
  /// "memfd", "/dev/shm": for messages.
  [[nodiscard]] const std::string& source() const { return source_; }

  /// Makes pages [offset, offset + bytes) present; kResourceExhausted instead of a later SIGBUS.
  /// Both must be multiples of the page size. After a failure some of the pages may be there.
  [[nodiscard]] Status reserve(uint64_t offset, uint64_t bytes) const;
  /// Gives the pages back; they read as zero afterwards.
  void release(uint64_t offset, uint64_t bytes) const;
  /// The descriptor is no longer needed once every process has mapped it.
  void close_fd() { fd_.reset(); }

 private:
  SharedMemory(Fd fd, std::byte* data, uint64_t size, std::string source)
      : fd_(std::move(fd)), data_(data), size_(size), source_(std::move(source)) {}
  static Result<SharedMemory> map(Fd fd, uint64_t bytes, bool writable, std::string source);
  void unmap();

  Fd fd_;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  std::string source_;
};

/// Huge pages come in this size; mappings at least as long begin at a multiple of it.
inline constexpr uint64_t kHugePage = 2 * 1024 * 1024;
uint64_t page_size();
constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace paceline
