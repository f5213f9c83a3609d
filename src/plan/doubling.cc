// Recursive doubling: log2 n rounds, in each of which pairs of ranks exchange and reduce the whole
// buffer. For short buffers, where latency is all (R. Thakur, R. Rabenseifner and W. Gropp,
// "Optimization of collective communication operations in MPICH", 2005).
//
// Both ranks of a pair compute op(lower block, upper block) in that order, so that all end with the
// same bits where op does not quite commute (which NaN survives, the sign of a zero minimum).
#include <bit>

#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

// What has been reduced so far lies where it was last written: each round writes a new place, so
// that nothing waits until the last round's send has been taken.
class Exchange {
 public:
  Exchange(Builder& b, const Members& m, Span piece, uint64_t number)
      : b_(b), m_(m), piece_(piece), number_(number), value_(b.in(piece)) {}

  void run() {
    int n = m_.size();
    int p = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
    int rest = n - p;
    int place = m_.mine < 2 * rest ? m_.mine / 2 : m_.mine - rest;
    // 2 * rest ranks first pair up, so that a power of two goes on.
    bool folded = m_.mine < 2 * rest;
    if (folded && m_.mine % 2 == 0) {
      b_.send(m_.at(m_.mine + 1), value_, number_);
      b_.receive(m_.at(m_.mine + 1), b_.out(piece_), number_);
      return;
    }
    if (folded) reduce_from(m_.at(m_.mine - 1), /*mine_is_lower=*/false, /*last=*/p == 1);
    for (int distance = 1; distance < p; distance *= 2) {
      int other = place ^ distance;
      Rank peer = m_.at(other < rest ? 2 * other + 1 : other + rest);
      b_.send(peer, value_, number_);
      reduce_from(peer, place < other, 2 * distance == p);
    }
    b_.copy(b_.out(piece_), value_);
    b_.finish_sum(b_.out(piece_));
    if (folded) b_.send(m_.at(m_.mine - 1), b_.out(piece_), number_);
  }

 private:
  void reduce_from(Rank peer, bool mine_is_lower, bool last) {
    // Never over a value that the peer still has to take: each would wait for the other.
    bool into_output = last && b_.out(piece_) != value_;
    Range next = into_output ? b_.out(piece_) : b_.scratch(value_.bytes);
    if (mine_is_lower) {
      b_.receive_reduce(peer, next, value_, number_);
    } else {
      b_.receive(peer, next, number_);
      b_.reduce(next, value_);
    }
    value_ = next;
  }

  Builder& b_;
  const Members& m_;
  Span piece_;
  uint64_t number_;
  Range value_;
};

}  // namespace

void doubling_all_reduce(Builder& b) {
  auto m = node_order(b.request().shape, b.me());
  auto cut = pieces(b.request(), {0, b.request().count}, b.request().count);
  for (std::size_t p = 0; p < cut.size(); ++p) Exchange(b, m, cut[p], p).run();
}

}  // namespace paceline::plan
