// Runs the processes of a job to their common end: output, signals, the first failure, clean-up.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/run_guard.h"

namespace paceline::cli {

struct JobProcess {
  int rank = 0;
  std::string where;  ///< host, for messages
  Command command;
  std::string
      first_input;      ///< written to standard input before anything else (remote start-up script)
  bool remote = false;  ///< signals travel by name over standard input, which stays open
};

struct JobOptions {
  bool prefix_output = false;  ///< "[rank]<stdout> " in front of each line
  std::string
      output_directory;  ///< also write rank.N/stdout and rank.N/stderr below it; empty: don't
  bool quiet = false;
  /// Something to serve meanwhile: its descriptor and what to call when readable (at least every
  /// second).
  int service_fd = -1;
  std::function<void()> service;
};

/// The job's exit code: 0 when all processes ended with 0, else that of the first that failed (a
/// signal gives 128 + n), after the others have been terminated. kInvalidArgument /
/// kResourceExhausted: nothing runs.
Result<int> run_job(const std::vector<JobProcess>& processes, const JobOptions& options);

}  // namespace paceline::cli
