// How buffers are cut: into shards that ranks own, and shards into the pieces that travel.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace paceline::plan {

/// Elements [begin, end) of the operation's buffer.
struct Span {
  uint64_t begin = 0;
  uint64_t end = 0;
  [[nodiscard]] uint64_t size() const { return end - begin; }
  [[nodiscard]] bool empty() const { return begin == end; }
  bool operator==(const Span&) const = default;
};

/// Cuts `whole` into `parts` that differ by at most one cache line and begin at multiples of one
/// (so that no two ranks write the same line and SIMD loads stay aligned); late parts may be empty.
std::vector<Span> split(Span whole, uint64_t parts, DType dtype);

/// Blocks of counts[r] elements, one after the other.
std::vector<Span> blocks(const std::vector<uint64_t>& counts);

/// How many pieces a shard of `shard` elements is cut into when the whole buffer has `buffer`
/// elements: none is longer than piece_bytes; long buffers have at least four a shard, so that a
/// link does not idle while a piece is reduced before its next hop; short ones are not cut, for
/// each message costs latency.
uint64_t piece_count(const PlanRequest& request, uint64_t shard, uint64_t buffer);

/// `span` in so many pieces, empty ones left out.
std::vector<Span> pieces(const PlanRequest& request, Span span, uint64_t buffer);

}  // namespace paceline::plan
