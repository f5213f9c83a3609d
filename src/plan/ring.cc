// Ring all-reduce: n-1 hops that reduce, n-1 hops that gather; every rank sends 2 (n-1)/n of the
// buffer, which is the least that any all-reduce can do (P. Patarasuk and X. Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", JPDC 2009).
#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

// Segment j's sum is complete at place j - 1; each segment travels in pieces that don't wait for
// each other.
void reduce_hops(Builder& b, const Members& m, const std::vector<std::vector<Span>>& segments,
                 From from) {
  int n = m.size();
  auto segment = [&](int j) -> const std::vector<Span>& {
    return segments[static_cast<std::size_t>(((j % n) + n) % n)];
  };
  auto own = [&](Span s) { return from == From::kInput ? b.in(s) : b.out(s); };
  for (int hop = 0; hop < n - 1; ++hop) {
    const auto& leaving = segment(m.mine - hop);
    for (std::size_t p = 0; p < leaving.size(); ++p) {
      b.send(m.at(m.mine + 1), hop == 0 ? own(leaving[p]) : b.out(leaving[p]), p);
    }
    const auto& coming = segment(m.mine - hop - 1);
    for (std::size_t p = 0; p < coming.size(); ++p) {
      b.receive_reduce(m.at(m.mine - 1), b.out(coming[p]), own(coming[p]), p);
    }
  }
}

void gather_hops(Builder& b, const Members& m, const std::vector<std::vector<Span>>& segments) {
  int n = m.size();
  auto segment = [&](int j) -> const std::vector<Span>& {
    return segments[static_cast<std::size_t>(((j % n) + n) % n)];
  };
  for (int hop = 0; hop < n - 1; ++hop) {
    const auto& leaving = segment(m.mine + 1 - hop);
    for (std::size_t p = 0; p < leaving.size(); ++p) {
      b.send(m.at(m.mine + 1), b.out(leaving[p]), p);
    }
    const auto& coming = segment(m.mine - hop);
    for (std::size_t p = 0; p < coming.size(); ++p) {
      b.receive(m.at(m.mine - 1), b.out(coming[p]), p);
    }
  }
}

}  // namespace

void ring_phase(Builder& b, const Members& m, Span span, From from) {
  int n = m.size();
  std::vector<std::vector<Span>> segments;
  for (Span s : split(span, static_cast<uint64_t>(n), b.request().dtype)) {
    segments.push_back(pieces(b.request(), s, span.size()));
  }
  reduce_hops(b, m, segments, from);
  for (Span piece : segments[static_cast<std::size_t>((m.mine + 1) % n)]) {
    b.finish_sum(b.out(piece));
  }
  gather_hops(b, m, segments);
}

void ring_all_reduce(Builder& b) {
  ring_phase(b, node_order(b.request().shape, b.me()), {0, b.request().count}, From::kInput);
}

}  // namespace paceline::plan
