// Ring all-reduce: n-1 hops that reduce, n-1 hops that gather; every rank sends 2 (n-1)/n of the
// buffer, which is the least that any all-reduce can do (P. Patarasuk and X. Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", JPDC 2009). One rank sends to each
// and each sends to one, so flows never compete for a link: on plain Ethernet that is what makes it
// faster than a direct exchange of the same bytes.
//
// With a dense codec each hop rounds the partial sum that it sends, and the gathered sum is rounded
// once; what is gathered is handed on as it came, so all ranks decode the same bytes.
#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

using Segments = std::vector<std::vector<Span>>;

const std::vector<Span>& segment(const Segments& segments, int j) {
  int n = static_cast<int>(segments.size());
  return segments[static_cast<std::size_t>(((j % n) + n) % n)];
}

/// Scratch for each hop's encodings: of a segment's pieces, whichever segment leaves.
using Rooms = std::vector<std::vector<Range>>;

Rooms rooms_for_hops(Builder& b, const Segments& segments) {
  std::vector<Span> longest;  // of all segments' pieces of one number
  for (const auto& one : segments) {
    if (longest.size() < one.size()) longest.resize(one.size());
    for (std::size_t p = 0; p < one.size(); ++p)
      if (one[p].size() > longest[p].size()) longest[p] = one[p];
  }
  Rooms rooms(segments.size() - 1);
  for (auto& room : rooms)
    for (const Span piece : longest) room.push_back(b.encoding(piece));
  return rooms;
}

// Segment j's sum is complete at place j - 1; each segment travels in pieces that don't wait for
// each other. Without rooms it travels as it is.
void reduce_hops(Builder& b, const Members& m, const Segments& segments, From from,
                 const Rooms& rooms) {
  const bool is_encoded = !rooms.empty();
  auto own = [&](Span s) { return from == From::kInput ? b.in(s) : b.out(s); };
  for (int hop = 0; hop < m.size() - 1; ++hop) {
    const auto& leaving = segment(segments, m.mine - hop);
    for (std::size_t p = 0; p < leaving.size(); ++p) {
      Range leaves = hop == 0 ? own(leaving[p]) : b.out(leaving[p]);
      if (is_encoded) {
        const Range code = b.encoding_in(rooms[static_cast<std::size_t>(hop)][p], leaving[p]);
        b.encode(code, leaves);
        leaves = code;
      }
      b.send(m.at(m.mine + 1), leaves, p);
    }
    const auto& coming = segment(segments, m.mine - hop - 1);
    for (std::size_t p = 0; p < coming.size(); ++p) {
      if (is_encoded) {
        b.receive_decode_reduce(m.at(m.mine - 1), b.out(coming[p]), own(coming[p]), p);
      } else {
        b.receive_reduce(m.at(m.mine - 1), b.out(coming[p]), own(coming[p]), p);
      }
    }
  }
}

void gather_hops(Builder& b, const Members& m, const Segments& segments) {
  for (int hop = 0; hop < m.size() - 1; ++hop) {
    const auto& leaving = segment(segments, m.mine + 1 - hop);
    for (std::size_t p = 0; p < leaving.size(); ++p) {
      b.send(m.at(m.mine + 1), b.out(leaving[p]), p);
    }
    const auto& coming = segment(segments, m.mine - hop);
    for (std::size_t p = 0; p < coming.size(); ++p) {
      b.receive_sum(m.at(m.mine - 1), b.out(coming[p]), p);
    }
  }
}

// In the memory of the reducing hops' encodings, which takes half the scratch: each has left n - 3 hops before another
// comes there, so among four members or more no receive is posted late. (Among three 4 MiB took up to 2 % longer
// at 1 Gb/s for it.)
void gather_encoded_hops(Builder& b, const Members& m, const Segments& segments,
                         const Rooms& rooms) {
  std::vector<Range> codes;  // of the segment that leaves next
  const auto& own = segment(segments, m.mine + 1);
  for (std::size_t p = 0; p < own.size(); ++p) {
    codes.push_back(b.encoding_in(rooms[0][p], own[p]));
    b.encode(codes.back(), b.out(own[p]));
  }
  for (int hop = 0; hop < m.size() - 1; ++hop) {
    for (std::size_t p = 0; p < codes.size(); ++p) b.send(m.at(m.mine + 1), codes[p], p);
    if (hop == 0) {  // its own sum becomes what the others decode
      for (std::size_t p = 0; p < own.size(); ++p) b.decode(b.out(own[p]), codes[p]);
    }
    const auto& coming = segment(segments, m.mine - hop);
    bool is_last = hop == m.size() - 2;
    codes.clear();
    for (std::size_t p = 0; p < coming.size(); ++p) {
      if (is_last) {  // nobody needs the code any more
        b.receive_decode(m.at(m.mine - 1), b.out(coming[p]), p);
        continue;
      }
      codes.push_back(b.encoding_in(rooms[static_cast<std::size_t>(hop) + 1][p], coming[p]));
      b.receive(m.at(m.mine - 1), codes.back(), p);
      b.decode(b.out(coming[p]), codes.back());
    }
  }
}

}  // namespace

void ring_phase(Builder& b, const Members& m, Span span, From from, bool is_encoded) {
  Segments segments;
  for (Span s : split(span, static_cast<uint64_t>(m.size()), b.request().dtype)) {
    segments.push_back(pieces(b.request(), s, span.size()));
  }
  const Rooms rooms = is_encoded ? rooms_for_hops(b, segments) : Rooms{};
  reduce_hops(b, m, segments, from, rooms);
  for (Span piece : segment(segments, m.mine + 1)) b.finish_sum(b.out(piece));
  if (rooms.empty()) {
    gather_hops(b, m, segments);
  } else {
    gather_encoded_hops(b, m, segments, rooms);
  }
}

void ring_all_reduce(Builder& b) {
  ring_phase(b, node_order(b.request().shape, b.me()), {0, b.request().count}, From::kInput,
             flat_coding(b) != Coding::kNever);
}

bool suits_encoded_ring(uint64_t bytes, int members) {
  // Measured on four nodes at 1 Gb/s: below this the direct exchange's fewer hops win.
  constexpr uint64_t kShort = 256 * 1024;
  // A ring of n rounds a partial sum n - 1 times, a direct exchange once, whatever n is.
  constexpr int kMostMembers = 8;
  return members > 2 && members <= kMostMembers && bytes >= kShort;
}

}  // namespace paceline::plan
