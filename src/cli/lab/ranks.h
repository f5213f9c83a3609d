// Starts the command once per rank, each inside its node, carries its output, and waits.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/lab/network.h"

namespace paceline::lab {

/// Keeps a node's mounts and host name alive: /sys that shows the node's NIC, a /dev/shm and
/// /etc/hosts of its own.
class NodeHolder {
 public:
  /// Forks; call before there are threads.
  static Result<NodeHolder> start(const Node& node);
  NodeHolder(NodeHolder&& other) noexcept;
  NodeHolder& operator=(NodeHolder&& other) noexcept;
  ~NodeHolder();
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  explicit NodeHolder(pid_t pid) : pid_(pid) {}
  pid_t pid_ = -1;
};

struct RankSpec {
  int rank = 0;
  int node = 0;
  pid_t holder = -1;                               ///< whose namespaces to join; -1: none
  std::map<std::string, std::string> environment;  ///< over the lab's own
  std::optional<rlimit> descriptors;  ///< how many it may have; none: as many as the lab
};

struct RankResult {
  int exit_code = -1;  ///< 128 + signal where one killed it
  double seconds = 0;
  double cpu_seconds = 0;
  long max_rss_kb = 0;
};

struct RunResult {
  int exit_code = 0;      ///< the first failing rank's; kOutputLost, 128 + SIGPIPE: see run_ranks()
  int first_failed = -1;  ///< rank
  int interrupted_by = 0;  ///< signal
  double seconds = 0;      ///< from the first start to the last end
  std::vector<RankResult> ranks;
};

struct RunOptions {
  std::chrono::milliseconds grace{0};  ///< from the first failure to SIGTERM for the others
  int signals = -1;  ///< a signalfd for those of SIGINT, SIGTERM and SIGHUP that are blocked
  int janitor = -1;  ///< hears of each rank's process group (Janitor::listener()); -1: nobody does
};

/// All ranks ended well, but what they printed could not be written (disk full).
inline constexpr int kOutputLost = 3;

/// Returns when all ranks have ended, each with its whole process group, and their output has been taken by its reader
/// (a signal that comes while the reader stalls gives the rest up). Where the reader has gone, the ranks are ended and
/// the exit code is 128 + SIGPIPE, as of any command in a pipeline.
Result<RunResult> run_ranks(const std::vector<RankSpec>& specs,
                            const std::vector<std::string>& command, const RunOptions& options);

}  // namespace paceline::lab
