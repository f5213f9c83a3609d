// What kAuto becomes. The model is Hockney's: a message of b bytes takes latency + b / bandwidth;
// the constants are those of TCP between machines and need only be right within a factor of two,
// for the curves cross at a flat angle.
#include <fmt/format.h>

#include <bit>
#include <numeric>

#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

constexpr double kLatency = 25e-6;          // seconds a hop
constexpr double kSecondsPerByte = 0.8e-9;  // 10 Gb/s
constexpr double kReducing = 0.25e-9;       // seconds a byte

uint64_t largest(const std::vector<uint64_t>& counts) {
  uint64_t sum = 0;
  for (uint64_t c : counts) sum += c;
  return sum;
}

struct Facts {
  int ranks = 1;
  int nodes = 1;
  int groups = 1;
  uint64_t bytes = 0;  ///< the whole buffer
  std::string text;
};

/// Elements that a rank has for all others and itself in an all-to-all; of all ranks' counts their mean.
uint64_t given_away(const PlanRequest& q) {
  const auto ranks = static_cast<uint64_t>(q.shape.size);
  if (q.send_counts.empty()) return q.count * ranks;
  const auto all = std::accumulate(q.send_counts.begin(), q.send_counts.end(), uint64_t{0});
  return q.send_counts.size() > ranks ? all / ranks : all;
}

Facts facts(const PlanRequest& q) {
  Facts f;
  f.ranks = q.shape.size;
  f.nodes = q.shape.node_count();
  f.groups = static_cast<int>(inner_groups(q).size());
  f.bytes = (q.collective == Collective::kAllToAll ? given_away(q)
             : q.counts.empty()                    ? q.count
                                                   : largest(q.counts)) *
            dtype_size(q.dtype);
  f.text = fmt::format("{} ranks on {} node{}, {}", f.ranks, f.nodes, f.nodes == 1 ? "" : "s",
                       size_text(f.bytes));
  return f;
}

double rounds(int n) { return static_cast<double>(std::bit_width(static_cast<unsigned>(n - 1))); }

double doubling_seconds(const Facts& f) {
  return rounds(f.ranks) *
         (kLatency + static_cast<double>(f.bytes) * (kSecondsPerByte + kReducing));
}

double ring_seconds(const Facts& f) {
  double share = 2.0 * (f.ranks - 1) / f.ranks;
  return 2 * (f.ranks - 1) * kLatency +
         share * static_cast<double>(f.bytes) * (kSecondsPerByte + kReducing / 2);
}

Choice choose_all_reduce(const PlanRequest& q, const Facts& f) {
  constexpr uint64_t kShort = 32 * 1024;
  if (q.codec.codec == Codec::kTopK) {
    if (f.groups > 1) return {Algorithm::kSparse, fmt::format("top-k between {} groups", f.groups)};
    return {f.bytes <= kShort ? Algorithm::kDoubling : Algorithm::kDirect,
            f.text + ": one group, so nothing to compress"};
  }
  if (f.bytes <= kShort) return {Algorithm::kDoubling, f.text + ": latency counts"};
  if (f.nodes == 1 && q.inner_size == 0)
    return {Algorithm::kDirect, f.text + ": two hops through memory"};
  if (f.groups < f.ranks && f.groups > 1) {
    return {Algorithm::kTwoLevel, fmt::format("{}: {} groups", f.text, f.groups)};
  }
  if (q.codec.codec != Codec::kNone && suits_encoded_ring(f.bytes, f.ranks) && f.nodes == f.ranks)
    return {Algorithm::kRing, f.text + ": bandwidth counts"};
  if (q.codec.codec != Codec::kNone)
    return {Algorithm::kDirect, f.text + ": rounded once each way"};
  if (f.nodes == 1) return {Algorithm::kDirect, f.text + ": two hops through memory"};
  if (doubling_seconds(f) < ring_seconds(f))
    return {Algorithm::kDoubling, f.text + ": fewer hops than a ring"};
  return {Algorithm::kRing, f.text + ": bandwidth counts"};
}

Choice choose_blocks(const Facts& f) {
  constexpr int kFewRanks = 16;
  if (f.nodes == 1) return {Algorithm::kDirect, f.text + ": one hop through memory"};
  if (f.nodes < f.ranks) return {Algorithm::kTwoLevel, f.text + ": every link is used once"};
  uint64_t block = f.bytes / static_cast<uint64_t>(f.ranks);
  if (f.ranks <= kFewRanks && block <= 16 * 1024)
    return {Algorithm::kDirect, f.text + ": latency counts"};
  return {Algorithm::kRing, f.text + ": bandwidth counts"};
}

// A chain has nodes - 1 hops before the last rank sees the first piece; a tree's root sends the
// buffer many times.
Choice choose_rooted(const PlanRequest& q, const Facts& f) {
  double bytes = static_cast<double>(f.bytes) * kSecondsPerByte;
  double piece = static_cast<double>(std::min<uint64_t>(f.bytes, q.piece_bytes)) * kSecondsPerByte;
  double chain = (f.nodes - 1) * (kLatency + piece) + bytes;
  double tree = rounds(f.nodes) * (kLatency + bytes);
  bool in_chain = f.nodes > 1 ? chain < tree : f.bytes > 256 * 1024;
  return {in_chain ? Algorithm::kRing : Algorithm::kTree,
          f.text + (in_chain ? ": a chain in pieces" : ": a tree, for latency counts")};
}

}  // namespace

Choice choose(const PlanRequest& request) {
  if (request.algorithm != Algorithm::kAuto) return {request.algorithm, "asked for"};
  Facts f = facts(request);
  if (f.ranks == 1) return {Algorithm::kDirect, "one rank"};
  switch (request.collective) {
    case Collective::kAllReduce:
      return choose_all_reduce(request, f);
    case Collective::kAllGather:
    case Collective::kReduceScatter: {
      if (request.codec.codec != Codec::kNone && f.nodes == f.ranks) {
        return {Algorithm::kDirect, f.text + ": rounded once"};
      }
      return choose_blocks(f);
    }
    case Collective::kBroadcast:
    case Collective::kReduce:
      return choose_rooted(request, f);
    case Collective::kBarrier:
      return {Algorithm::kDoubling, f.text};
    case Collective::kAllToAll:
    case Collective::kGather:
    case Collective::kScatter:
      return {Algorithm::kDirect, f.text};
  }
  return {Algorithm::kRing, f.text};
}

}  // namespace paceline::plan
