// Who is in the job and which ranks share a node.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"

namespace paceline::bootstrap {

/// One rank as all others know it.
struct Member {
  Rank rank = 0;
  std::string host;  ///< host name, for messages
  std::string
      node_id;  ///< equal for ranks that share a node: boot id + network namespace, or the override
  int64_t pid = 0;
  std::string address;     ///< what wire/ needs to connect: opaque here
  int32_t node = 0;        ///< index of the node, by first appearance (filled by topology())
  int32_t local_rank = 0;  ///< position among the ranks of the node (filled by topology())
};

/// The whole job, the same on every rank.
struct Topology {
  Rank rank = 0;  ///< this process
  std::vector<Member> members;
  int32_t node_count = 1;

  [[nodiscard]] Rank size() const { return static_cast<Rank>(members.size()); }
  [[nodiscard]] const Member& self() const { return members[static_cast<std::size_t>(rank)]; }
  /// "rank 3 (host b)".
  [[nodiscard]] std::string name(Rank r) const {
    return "rank " + std::to_string(r) + " (host " + members[static_cast<std::size_t>(r)].host +
           ")";
  }
};

/// Fills node, local_rank and node_count from node_id.
void number_nodes(Topology& topology);

}  // namespace paceline::bootstrap
