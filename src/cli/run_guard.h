// A process group that never outlives its guardian.
//
// launcher ── pipe ──▶ guard process ── leads ──▶ the command's own process group
//
// The guard waits for the command and for the pipe. When the pipe closes (the launcher died, even
// by kill -9) it terminates the whole group: SIGTERM, then SIGKILL after a grace period. When the
// command ends, what is left of its group is killed and the guard ends in the same way (exit code,
// or the same signal's 128 + n).
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace paceline::cli {

struct Command {
  std::vector<std::string> arguments;                            ///< [0] is looked up in PATH
  std::vector<std::pair<std::string, std::string>> environment;  ///< on top of this process's own
  std::vector<std::string> unset;     ///< variables that must not be inherited
  int input = -1;                     ///< becomes standard input; -1: /dev/null
  std::optional<rlimit> descriptors;  ///< how many it may open; none: as this process
};

struct Guarded {
  pid_t pid = -1;  ///< of the guard: waitpid() gives the command's end
  int control =
      -1;  ///< write a signal number (one byte) to send it to the group; closing it ends the group
  int output = -1;  ///< read ends of the command's standard output and error
  int error = -1;
};

/// Starts `command`. Descriptors are close-on-exec; output and error are non-blocking. A command
/// that can't be executed ends with 127 (not found) or 126, and says so on its standard error.
Result<Guarded> start_guarded(const Command& command);

}  // namespace paceline::cli
