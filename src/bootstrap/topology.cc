#include "bootstrap/topology.h"

#include <map>

namespace paceline::bootstrap {

void number_nodes(Topology& topology) {
  std::map<std::string, std::pair<int32_t, int32_t>> seen;  // node id → (index, ranks so far)
  for (auto& member : topology.members) {
    auto [entry, is_new] = seen.try_emplace(member.node_id, static_cast<int32_t>(seen.size()), 0);
    member.node = entry->second.first;
    member.local_rank = entry->second.second++;
  }
  topology.node_count = static_cast<int32_t>(seen.size());
}

}  // namespace paceline::bootstrap
