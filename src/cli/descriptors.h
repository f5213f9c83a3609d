// Descriptors: those that a process must not keep of its parent's, for pipes and sockets would look open for as long as it
// lives; and how many a process may have.
#pragma once

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/status.h"

namespace paceline::cli {

/// Raises this process's soft limit to `wanted`, as far as the hard one lets it. Returns the limits as they were, which are
/// the caller's own: what this process starts for the caller should have them again.
inline rlimit make_room_for_descriptors(rlim_t wanted) {
  rlimit before{};
  if (getrlimit(RLIMIT_NOFILE, &before) != 0) return before;
  auto more = before;
  more.rlim_cur = std::min(more.rlim_max, std::max(more.rlim_cur, wanted));
  setrlimit(RLIMIT_NOFILE, &more);
  return before;
}

/// Whether a call failed for want of one.
inline bool lacks_descriptors(int error) { return error == EMFILE || error == ENFILE; }

inline Status out_of_descriptors() {
  return {Code::kResourceExhausted, "out of descriptors; raise ulimit -n"};
}

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
