// One rank's process: started inside its node, in a process group of its own.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/status.h"
#include "cli/lab/ranks.h"

namespace paceline::lab {

struct RankProcess {
  pid_t pid = -1;   ///< leads the group
  int pid_fd = -1;  ///< readable once it has ended; -1: the kernel gives none
  int output = -1;  ///< read ends of its standard output and error, non-blocking
  int error = -1;
};

/// Starts `command` as `spec` says; `janitor` (-1: none) hears of the group before it can do anything. A command that
/// can't be executed ends with 127 and says so on its standard error.
Result<RankProcess> start_rank(const RankSpec& spec, const std::vector<std::string>& command,
                               int janitor);

}  // namespace paceline::lab
