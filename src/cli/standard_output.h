// Pages on standard output: written at once, so that a disk that is full or a reader that has gone is told by whoever
// prints, with the system's reason. Streams keep none: by the time they are asked `errno` is another call's.
#pragma once

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include "base/status.h"

namespace paceline::cli {

/// What is said where standard output or standard error (by its descriptor) can't be written.
inline std::string unwritable_stream(int descriptor, int error) {
  const bool is_full = error == ENOSPC || error == EDQUOT;
  return fmt::format("standard {} can't be written ({}): {}",
                     descriptor == STDERR_FILENO ? "error" : "output", std::strerror(error),
                     is_full ? "free some space where it goes, or send it to another place"
                             : "send it to a file that you may write to");
}

/// kResourceExhausted where not all of it could be written; kPeerLost where nobody reads it any more.
inline Status show(std::string_view page) {
  while (!page.empty()) {
    const auto n = ::write(STDOUT_FILENO, page.data(), page.size());
    if (n >= 0) {
      page.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {  // a pipe that somebody else reads and writes without waiting
      pollfd ready{STDOUT_FILENO, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      const int error = errno;
      return {error == EPIPE ? Code::kPeerLost : Code::kResourceExhausted,
              unwritable_stream(STDOUT_FILENO, error)};
    }
  }
  return Status::ok();
}

/// `code`, or 1 in place of 0 where the page could not be shown, which `who` then says.
inline int show_or_fail(std::string_view page, int code, std::string_view who) {
  const auto shown = show(page);
  if (shown.is_ok()) return code;
  fmt::print(stderr, "{}: {}\n", who, shown.message());
  return code == 0 ? 1 : code;
}

}  // namespace paceline::cli
