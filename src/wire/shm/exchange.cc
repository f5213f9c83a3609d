#include "wire/shm/exchange.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "wire/shm/memory.h"

namespace paceline::wire::shm {
namespace {

/// The mapping `fresh` takes the place of what is mapped at `begin`: at once, so nobody finds a hole there.
Status put(void* fresh, std::byte* begin, uint64_t bytes) {
  if (::mremap(fresh, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, begin) != MAP_FAILED)
    return Status::ok();
  const int error = errno;
  ::munmap(fresh, bytes);
  return {Code::kResourceExhausted,
          fmt::format("exchanging {} KiB of pages: {}", bytes / 1024, std::strerror(error))};
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
  void* fresh = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                       static_cast<off_t>(offset));
  if (fresh == MAP_FAILED) return no_mapping(bytes);
  std::memcpy(fresh, begin, bytes);
  return put(fresh, begin, bytes);
}

Status exchange_for_private(std::byte* begin, uint64_t bytes) {
  void* fresh = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return no_mapping(bytes);
  std::memcpy(fresh, begin, bytes);
  return put(fresh, begin, bytes);
}

Status detach_from_shared(std::byte* begin, uint64_t bytes, int fd, uint64_t offset) {
  // The system copies each page as one, so there is no moment at which a thread's write could fall between two copies.
  void* fresh =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, static_cast<off_t>(offset));
  if (fresh == MAP_FAILED) return no_mapping(bytes);
  PACELINE_RETURN_IF_ERROR(put(fresh, begin, bytes));
  for (uint64_t at = 0; at < bytes; at += page_size()) take_page(begin + at);
  return Status::ok();
}

}  // namespace paceline::wire::shm
