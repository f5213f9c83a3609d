#include "wire/shm/exchange.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "base/shared_memory.h"

namespace paceline::wire::shm {
namespace {

/// Pages of a file at addresses that were somebody else's.
struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  int fd = -1;
  uint64_t offset = 0;
};

/// All that is shared in this process.
struct Registry {
  std::mutex mutex;
  std::vector<Range> ranges;

  void forget(uintptr_t begin, uintptr_t end) {
    for (std::size_t i = ranges.size(); i-- > 0;) {
      const Range range = ranges[i];
      if (range.end <= begin || range.begin >= end) continue;
      ranges[i] = ranges.back();
      ranges.pop_back();
      if (range.begin < begin) ranges.push_back({range.begin, begin, range.fd, range.offset});
      if (range.end > end)
        ranges.push_back({end, range.end, range.fd, range.offset + (end - range.begin)});
    }
  }
};

/// Never destroyed: threads may fork after the process's static objects have ended.
Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

/// A child has copies of its parent's memory. Shared pages would be the parent's own, so they become private ones of the
/// same file: copied where the child writes, and only there. (System calls alone: other threads may have held any lock.)
void part_from_parent(const Range& range) {
  auto* const begin = reinterpret_cast<void*>(range.begin);
  const std::size_t bytes = range.end - range.begin;
  if (::mmap(begin, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, range.fd,
             static_cast<off_t>(range.offset)) != MAP_FAILED)
    return;
  (void)::mprotect(begin, bytes, PROT_READ);
  constexpr char kText[] =
      "[paceline] warning: a forked process has no memory for pages of its own where its parent "
      "shares buffers with other ranks; it can only read them\n";
  (void)!::write(STDERR_FILENO, kText, sizeof(kText) - 1);
}

void before_fork() { registry().mutex.lock(); }
void in_parent() { registry().mutex.unlock(); }
void in_child() {
  auto& all = registry();
  for (const Range& range : all.ranges) part_from_parent(range);
  all.ranges.clear();  // a child of this one must not be shown the file again
  all.mutex.unlock();
}
[[maybe_unused]] const int registered = pthread_atfork(before_fork, in_parent, in_child);

/// The mapping `fresh` takes the place of what is mapped at `begin`: at once, so nobody finds a hole there, and no fork sees
/// pages that the registry does not know. fd < 0: private pages. failed(): before `fresh` goes.
template <class Failed>
Status put(void* fresh, std::byte* begin, uint64_t bytes, int fd, uint64_t offset, Failed failed) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  auto& all = registry();
  std::unique_lock lock(all.mutex);
  if (::mremap(fresh, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, begin) != MAP_FAILED) {
    all.forget(first, first + bytes);
    if (fd >= 0) all.ranges.push_back({first, first + bytes, fd, offset});
    return Status::ok();
  }
  const int error = errno;
  lock.unlock();
  failed();
  ::munmap(fresh, bytes);
  return {Code::kResourceExhausted,
          fmt::format("exchanging {} KiB of pages: {}", bytes / 1024, std::strerror(error))};
}

/// As much is there twice at a time.
constexpr uint64_t kStretch = 1ULL << 20;

/// What lies at `begin` moves to the mapping `fresh`, which takes its place. The pages that were there go as they are copied: of a
/// model's largest bucket there is not a second one meanwhile.
Status move_to(void* fresh, std::byte* begin, uint64_t bytes, int fd = -1, uint64_t offset = 0) {
  auto* const to = static_cast<std::byte*>(fresh);
  uint64_t gone = 0;
  for (uint64_t at = 0; at < bytes; at += kStretch) {
    const uint64_t length = std::min(kStretch, bytes - at);
    std::memcpy(to + at, begin + at, length);
    if (gone == at && ::madvise(begin + at, length, MADV_DONTNEED) == 0) gone += length;
  }
  const auto bring_back = [&] { std::memcpy(begin, to, gone); };
  return put(fresh, begin, bytes, fd, offset, bring_back);
}

Status no_mapping(uint64_t bytes) {
  return {Code::kResourceExhausted,
          fmt::format("mapping {} KiB: {}", bytes / 1024, std::strerror(errno))};
}

/// A write that changes nothing: a private mapping of a file has a page of its own from the first write to it on.
void take_page(std::byte* page) {
  const std::atomic_ref<unsigned char> byte(*reinterpret_cast<unsigned char*>(page));
  unsigned char is = byte.load(std::memory_order_relaxed);
  (void)byte.compare_exchange_strong(is, is);  // failed: another thread has written meanwhile
}

}  // namespace

Status exchange_for_shared(std::byte* begin, uint64_t bytes, int fd, uint64_t offset) {
  void* fresh =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (fresh == MAP_FAILED) return no_mapping(bytes);
  return move_to(fresh, begin, bytes, fd, offset);
}

Status exchange_for_private(std::byte* begin, uint64_t bytes) {
  void* fresh = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return no_mapping(bytes);
  return move_to(fresh, begin, bytes);
}

Status detach_from_shared(std::byte* begin, uint64_t bytes, int fd, uint64_t offset) {
  // The system copies each page as one, so there is no moment at which a thread's write could fall between two copies.
  void* fresh =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, static_cast<off_t>(offset));
  if (fresh == MAP_FAILED) return no_mapping(bytes);
  PACELINE_RETURN_IF_ERROR(put(fresh, begin, bytes, -1, 0, [] {}));
  for (uint64_t at = 0; at < bytes; at += page_size()) take_page(begin + at);
  return Status::ok();
}

void share_with_children(std::byte* begin, uint64_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.forget(first, first + bytes);
}

}  // namespace paceline::wire::shm
