// From a lonely process to a job: who am I, who are the others, and a channel to all of them.
//
//   identity (launcher's variables) → key-value space → secret → listener → tree → table of members
//
// Every rank publishes one small record, reads its parent's in a 4-ary tree, and connects to it;
// members are gathered up that tree and the table comes down: O(log n) rounds, O(n) memory a rank.
// Other connections open when they are first used.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/settings.h"
#include "bootstrap/kv.h"
#include "bootstrap/topology.h"
#include "wire/channel.h"

namespace paceline::wire::shm {
class ShmAllocator;
}

namespace paceline::bootstrap {

/// Tags from here on belong to bootstrap; the engine uses smaller ones.
inline constexpr wire::Tag kBootstrapTags = 0xff00'0000'0000'0000;

struct JoinOptions {
  std::optional<Rank> rank;  ///< unset: from the launcher's environment
  std::optional<Rank> size;
  std::string prefix;                  ///< distinguishes communicators of one job
  std::shared_ptr<KeyValue> store;     ///< nullptr: the launcher's, or our own server
  const Settings* settings = nullptr;  ///< required; outlives the call
  double timeout_s = 0;                ///< 0: the setting start_timeout
};

/// A rank's neighbours in the control tree (the connections that exist from the start).
struct TreeNeighbours {
  Rank parent = -1;  ///< -1: the root, rank 0
  std::vector<Rank> children;
};
TreeNeighbours tree_neighbours(Rank rank, Rank size);

struct Job {
  Topology topology;
  TreeNeighbours tree;
  std::unique_ptr<wire::Channel> channel;  ///< knows every member's address
  /// Of memory that the node's other ranks read in place; nullptr where shared memory is not used.
  std::shared_ptr<wire::shm::ShmAllocator> allocator;
  std::string launcher;  ///< "torchrun", "Open MPI" … for the start-up line
  std::string id;        ///< the same on all ranks, another after each restart
};

/// Blocks until every rank is there, at most the time-out. All ranks call it equally often for one
/// prefix, so that a communicator can be destroyed and made again. kTimeout names the ranks that
/// never came; kMismatch the setting, version or size that differs and who has it; kInvalidArgument a
/// contradictory environment; kUnauthenticated a wrong secret.
Result<std::unique_ptr<Job>> join(const JoinOptions& options);
/// The same, where the caller counts the joins of a prefix: several ranks in one process.
Result<std::unique_ptr<Job>> join_as(const JoinOptions& options, int incarnation);

}  // namespace paceline::bootstrap
