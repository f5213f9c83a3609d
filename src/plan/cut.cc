#include "plan/cut.h"

#include <algorithm>

namespace paceline::plan {
namespace {

constexpr uint64_t kLine = 64;
constexpr uint64_t kLongBuffer = 1 << 20;
constexpr uint64_t kPiecesOfALongShard = 4;
// Below this the cost of a message outweighs what overlap brings.
constexpr uint64_t kShortestPiece = 16 * 1024;

}  // namespace

std::vector<Span> split(Span whole, uint64_t parts, DType dtype) {
  uint64_t line = kLine / dtype_size(dtype);
  uint64_t lines = (whole.size() + line - 1) / line;
  std::vector<Span> out;
  out.reserve(parts);
  uint64_t at = whole.begin;
  for (uint64_t i = 0; i < parts; ++i) {
    uint64_t take = (lines / parts + (i < lines % parts ? 1 : 0)) * line;
    uint64_t end = std::min(whole.end, at + take);
    out.push_back({at, end});
    at = end;
  }
  return out;
}

std::vector<Span> blocks(const std::vector<uint64_t>& counts) {
  std::vector<Span> out;
  out.reserve(counts.size());
  uint64_t at = 0;
  for (uint64_t c : counts) {
    out.push_back({at, at + c});
    at += c;
  }
  return out;
}

uint64_t piece_count(const PlanRequest& request, uint64_t shard, uint64_t buffer) {
  uint64_t size = dtype_size(request.dtype);
  uint64_t bytes = shard * size;
  if (bytes == 0) return 0;
  uint64_t limit = std::max<uint64_t>(request.piece_bytes / kLine, 1) * kLine;
  uint64_t needed = (bytes + limit - 1) / limit;
  if (buffer * size < kLongBuffer) return needed;
  uint64_t wished = std::clamp<uint64_t>(bytes / kShortestPiece, 1, kPiecesOfALongShard);
  return std::max(needed, wished);
}

std::vector<Span> pieces(const PlanRequest& request, Span span, uint64_t buffer) {
  auto out =
      split(span, std::max<uint64_t>(piece_count(request, span.size(), buffer), 1), request.dtype);
  std::erase_if(out, [](const Span& s) { return s.empty(); });
  return out;
}

}  // namespace paceline::plan
