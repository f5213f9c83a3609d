#include "wire/shm/exchange.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

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

}  // namespace paceline::wire::shm
