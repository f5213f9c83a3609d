#include <fmt/format.h>

#include <algorithm>

#include "engine/engine_impl.h"

namespace paceline::engine {

Group* EngineImpl::group(GroupId id) { return const_cast<Group*>(std::as_const(*this).group(id)); }
const Group* EngineImpl::group(GroupId id) const {
  if (id >= groups_.size() || !groups_[id] || !groups_[id]->alive) return nullptr;
  return groups_[id].get();
}

plan::GroupShape EngineImpl::shape_of(const std::vector<Rank>& ranks) const {
  plan::GroupShape shape;
  shape.size = static_cast<Rank>(ranks.size());
  for (Rank r : ranks) shape.node_of.push_back(topology_.members[static_cast<std::size_t>(r)].node);
  return shape;
}

Result<GroupId> EngineImpl::create_group(std::span<const Rank> ranks) {
  if (!failure_) return failure_;
  if (ranks.empty()) return Status(Code::kInvalidArgument, "a group needs at least one rank");
  std::vector<uint8_t> seen(static_cast<std::size_t>(topology_.size()));
  Rank me = -1;
  uint64_t stream = mix(0x67726f7570ULL, ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    Rank r = ranks[i];
    if (r < 0 || r >= topology_.size()) {
      return Status(Code::kInvalidArgument,
                    fmt::format("a group can't hold rank {}: the job has ranks 0 to {}", r,
                                topology_.size() - 1));
    }
    if (seen[static_cast<std::size_t>(r)]++ != 0)
      return Status(Code::kInvalidArgument, fmt::format("a group can't hold rank {} twice", r));
    if (r == topology_.rank) me = static_cast<Rank>(i);
    stream = mix(stream, static_cast<uint64_t>(r));
  }
  if (me < 0) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("rank {} is not in the group; only its members create it", topology_.rank));
  }
  // All members create their common groups in the same order: the how-maniest over the same ranks
  // this is tells it from the others, without a message.
  stream = mix(stream, creations_[stream]++);
  auto g = std::make_unique<Group>();
  g->id = static_cast<GroupId>(groups_.size());
  g->alive = true;
  g->ranks.assign(ranks.begin(), ranks.end());
  g->me = me;
  g->shape = shape_of(g->ranks);
  g->stream = stream;
  groups_.push_back(std::move(g));
  count_groups();
  return groups_.back()->id;
}

Status EngineImpl::destroy_group(GroupId id) {
  Group* g = group(id);
  if (g == nullptr) return {Code::kInvalidArgument, fmt::format("there is no group {}", id)};
  if (id == kWorld) return {Code::kInvalidArgument, "the group of all ranks can't be destroyed"};
  for (auto slot : active_) {
    const Record& r = *records_[slot];
    if (r.group == id) {
      return {Code::kInvalidArgument, fmt::format("group {} can't be destroyed: {} has not ended",
                                                  id, r.description.title())};
    }
  }
  g->plans.for_each([&](PreparedPlan& p) {
    if (p.runs > 0)
      statistics_.predicted_link_bytes += p.runs * p.predicted_link_bytes(channel_.packets());
  });
  groups_[id].reset();
  count_groups();
  return Status::ok();
}

void EngineImpl::count_groups() {
  const auto is_one = [](const std::unique_ptr<Group>& g) { return g != nullptr && g->alive; };
  scratch_.serve(std::count_if(groups_.begin(), groups_.end(), is_one) > 1);
}

}  // namespace paceline::engine
