// Two-level (2D) all-reduce: reduce-scatter inside each inner group, all-reduce of each shard along
// its rail (the ranks with the same place in every group), all-gather inside the groups. Each
// node's link carries 2 (N-1)/N of the buffer for N nodes, whatever the number of ranks in a node,
// and is shared evenly by the rails.
//
// Shards are cut into chunks that go through the three levels on their own, so that a node's memory
// and its link work at the same time.
#include <algorithm>

#include "plan/algorithms.h"

namespace paceline::plan {

void two_level_all_reduce(Builder& b) {
  const PlanRequest& request = b.request();
  Levels l = levels(request, b.me());
  bool dense = request.codec.codec == Codec::kFp16 || request.codec.codec == Codec::kBf16;
  Coding inner = dense && request.codec.inside_node ? Coding::kAlways : Coding::kNever;
  Coding outer = dense ? Coding::kAlways : Coding::kNever;
  From from = l.inner.size() == 1 ? From::kInput : From::kOutput;

  auto shards = split({0, request.count}, static_cast<uint64_t>(l.rails), request.dtype);
  auto groups = static_cast<uint64_t>(l.groups);
  bool in_ring = suits_encoded_ring(shards[0].size() * dtype_size(request.dtype), l.groups);
  uint64_t chunks = piece_count(request, (shards[0].size() + groups - 1) / groups, request.count);
  std::vector<std::vector<Span>> cut;
  cut.reserve(shards.size());
  for (Span shard : shards) cut.push_back(split(shard, chunks, request.dtype));

  for (std::size_t c = 0; c < chunks; ++c) {
    std::vector<Span> chunk(static_cast<std::size_t>(l.inner.size()));
    for (std::size_t r = 0; r < cut.size(); ++r) chunk[r] = cut[r][c];
    direct_reduce_scatter(b, l.inner, chunk, From::kInput, inner);
    if (l.rail.mine >= 0) {
      Span mine = chunk[static_cast<std::size_t>(l.inner.mine)];
      if (l.groups == 1) {
        b.finish_sum(b.out(mine));
      } else if (l.groups == 2 || (dense && !in_ring)) {
        direct_phase(b, l.rail, mine, from, outer);
      } else {
        ring_phase(b, l.rail, mine, from, dense);
      }
    }
    direct_all_gather(b, l.inner, chunk, inner);
  }
}

}  // namespace paceline::plan
