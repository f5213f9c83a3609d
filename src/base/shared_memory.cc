#include "base/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace paceline {
namespace {

std::string text_of(int error) { return std::strerror(error); }

/// A file that outgrows RLIMIT_FSIZE raises SIGXFSZ, which would end the process: ask first.
bool within_file_limit(uint64_t bytes) {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
         bytes <= limit.rlim_cur;
}

Fd open_memfd() {
  return Fd(static_cast<int>(memfd_create("paceline", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
}

/// An unlinked file in `directory`.
Fd open_file(const std::string& directory) {
  Fd fd(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600));
  if (fd) return fd;
  std::string name = directory + "/paceline-XXXXXX";
  fd = Fd(::mkostemp(name.data(), O_CLOEXEC));
  if (fd) ::unlink(name.c_str());
  return fd;
}

/// posix_fallocate would write zeros where the file system can't allocate; -1 leaves that to the
/// caller.
int allocate_pages(int fd, uint64_t offset, uint64_t bytes) {
  for (;;) {
    if (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0) return 0;
    if (errno == EOPNOTSUPP) {
      return posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    }
    if (errno != EINTR) return errno;
  }
}

/// Sizes a fresh file, with its pages if asked for. Empty: it worked; else the reason.
std::string shape(int fd, uint64_t bytes, SharedMemory::Pages pages) {
  if (!within_file_limit(bytes)) return "larger than the file size limit (ulimit -f)";
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return text_of(errno);
  if (pages == SharedMemory::Pages::kReserve) {
    if (int error = allocate_pages(fd, 0, bytes); error != 0) return text_of(error);
  }
  // A peer must never see the file shrink under its mapping. Plain files don't know seals: no harm.
  (void)::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return {};
}

}  // namespace

uint64_t page_size() {
  static const auto size = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

Result<SharedMemory> SharedMemory::create(uint64_t bytes, Pages pages,
                                          const MemorySources& sources) {
  bytes = round_up(bytes, page_size());
  std::string tried;
  bool descriptors_run_out = false;
  const bool is_limited = !within_file_limit(bytes);
  auto attempt = [&](Fd fd, const std::string& name) -> Result<SharedMemory> {
    if (!fd) descriptors_run_out |= errno == EMFILE || errno == ENFILE;
    std::string why = fd ? shape(fd.get(), bytes, pages) : text_of(errno);
    if (why.empty()) {
      auto mapped = map(std::move(fd), bytes, true, name);
      if (mapped.is_ok()) return mapped;
      why = mapped.status().message();
    }
    tried += fmt::format("{}{}: {}", tried.empty() ? "" : "; ", name, why);
    return Status(Code::kResourceExhausted, "");
  };
  if (sources.memfd) {
    auto made = attempt(open_memfd(), "memfd");
    if (made.is_ok()) return made;
  }
  for (const auto& directory : sources.directories) {
    auto made = attempt(open_file(directory), directory);
    if (made.is_ok()) return made;
  }
  if (tried.empty()) tried = "no source is allowed";
  return Status(
      Code::kResourceExhausted,
      fmt::format(
          "no {} KiB of shared memory to be had ({}); {}", bytes >> 10, tried,
          descriptors_run_out ? "raise the limit of open files (ulimit -n)"
          : is_limited
              ? "raise the limit of file sizes (ulimit -f)"
              : "give the container a larger /dev/shm (docker: --shm-size, Kubernetes: an emptyDir "
                "with medium Memory), or allow memfd_create"));
}

Result<SharedMemory> SharedMemory::adopt(Fd fd, uint64_t bytes, bool writable) {
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < 0 ||
      static_cast<uint64_t>(info.st_size) < bytes || bytes == 0) {
    return Status(
        Code::kCorrupted,
        fmt::format("a peer's shared memory is not the {} bytes that it announced", bytes));
  }
  return map(std::move(fd), bytes, writable, "peer");
}

Result<SharedMemory> SharedMemory::map(Fd fd, uint64_t bytes, bool writable, std::string source) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  // Long mappings begin at a huge page's boundary: reserve the addresses, then map over a part of
  // them.
  const uint64_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* room =
      ::mmap(nullptr, bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    return Status(Code::kResourceExhausted,
                  fmt::format("no address space for {} KiB: {}", bytes / 1024, text_of(errno)));
  }
  auto begin = reinterpret_cast<uintptr_t>(room);
  auto at = slack != 0 ? round_up(begin, kHugePage) : begin;
  void* data = ::mmap(reinterpret_cast<void*>(at), bytes, protection,
                      MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd.get(), 0);
  if (data == MAP_FAILED) {
    int error = errno;
    ::munmap(room, bytes + slack);
    return Status(Code::kResourceExhausted,
                  fmt::format("mapping {} KiB of shared memory: {}", bytes / 1024, text_of(error)));
  }
  auto end = begin + bytes + slack;
  auto used = at + round_up(bytes, page_size());
  if (at > begin) ::munmap(room, at - begin);
  if (end > used) ::munmap(reinterpret_cast<void*>(used), end - used);
  return SharedMemory(std::move(fd), static_cast<std::byte*>(data), bytes, std::move(source));
}

Status SharedMemory::reserve(uint64_t offset, uint64_t bytes) const {
  // Through the mapping, so that its advice on huge pages counts; fallocate takes small pages only.
  for (;;) {
    if (::madvise(data_ + offset, bytes, MADV_POPULATE_WRITE) == 0) return Status::ok();
    if (errno != EINTR && errno != EAGAIN) break;
  }
  int error = errno;
  if (error == EINVAL) error = allocate_pages(fd_.get(), offset, bytes);  // before Linux 5.14
  if (error == 0) return Status::ok();
  return {Code::kResourceExhausted,
          fmt::format("{} has no {} KiB of shared memory left: {}", source_, bytes / 1024,
                      text_of(error == EFAULT ? ENOSPC : error))};
}

void SharedMemory::release(uint64_t offset, uint64_t bytes) const {
  (void)::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this == &other) return *this;
  unmap();
  fd_ = std::move(other.fd_);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  source_ = std::move(other.source_);
  return *this;
}

SharedMemory::~SharedMemory() { unmap(); }

void SharedMemory::unmap() {
  if (data_ != nullptr) ::munmap(data_, round_up(size_, page_size()));
  data_ = nullptr;
}

}  // namespace paceline
