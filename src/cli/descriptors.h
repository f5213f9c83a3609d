// Descriptors of a process that must not keep its parent's: pipes and sockets would look open for as long as it lives.
#pragma once

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace paceline::cli {

/// Closes every descriptor from `first` on. By the kernel's call where there is one (5.9; glibc wraps it since 2.34),
/// else one by one. Safe between fork() and exec().
inline void close_descriptors_from(unsigned first) {
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
  if (syscall(SYS_close_range, first, ~0U, 0) == 0) return;
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  for (unsigned fd = first; fd < limit.rlim_cur; ++fd) close(static_cast<int>(fd));
}

}  // namespace paceline::cli
