#include "wire/shm/vm_read.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif

namespace paceline::wire::shm {

int vm_read(pid_t pid, uint64_t address, void* into, std::size_t bytes) {
  auto* to = static_cast<std::byte*>(into);
  while (bytes > 0) {
    iovec local{to, bytes};
    iovec remote{reinterpret_cast<void*>(static_cast<uintptr_t>(address)), bytes};
    ssize_t n = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    if (n == 0) return EFAULT;
    to += n;
    address += static_cast<uint64_t>(n);
    bytes -= static_cast<std::size_t>(n);
  }
  return 0;
}

std::string probe_vm_read(pid_t pid, uint64_t address, const ProbeToken& expected) {
  if (pid <= 0) return "the peer is in another pid namespace";
  ProbeToken seen{};
  int error = vm_read(pid, address, seen.data(), seen.size());
  if (error == 0) {
    return seen == expected ? "" : "the peer's process number names another process here";
  }
  std::string why = std::strerror(error);
  if (error == EPERM) {
    int scope = 0;
    if (std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope && scope > 0) {
      why += fmt::format(" (kernel.yama.ptrace_scope is {})", scope);
    }
  }
  return why;
}

void allow_vm_read_by_all() { (void)::prctl(PR_SET_PTRACER, -1L, 0, 0, 0); }

}  // namespace paceline::wire::shm
