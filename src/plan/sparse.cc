// Sparse two-level all-reduce: a reduce-scatter at full precision inside each inner group; each
// owner keeps the largest entries of its shard's sum and residual (top-k with error feedback: A. F.
// Aji and K. Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017); the
// encodings go to the other groups' owners of the shard and from these to their groups' ranks.
// Every rank then adds the same encodings in the same order to zeros, so all end with the same
// bits, and nothing dense is sent after the first level.
#include <bit>

#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

class SparseRail {
 public:
  SparseRail(Builder& b, const Levels& l, int rail, Span shard)
      : b_(b),
        l_(l),
        rail_(rail),
        shard_(shard),
        codes_(static_cast<std::size_t>(l.groups)),
        known_(codes_.size(), kNoStep) {
    for (Range& code : codes_) code = b.encoding(shard);
  }

  /// What this rank does to have every group's encoding of the shard. `group` is this rank's.
  void collect(int group) {
    if (rail_ == l_.inner.mine) {
      collect_as_owner(group);
    } else {
      collect_from_owner(group);
    }
  }

  // A sum of few entries is divided where they are. Divided by a power of two, each summand keeps its
  // bits (denormals apart), so the average is that of the sum; by another number the sum itself has to be.
  void add_up() {
    Range sum = b_.out(shard_);
    if (!is_cleared_) b_.zero(sum);
    bool divides_entries = b_.request().op == ReduceOp::kAverage &&
                           std::has_single_bit(static_cast<unsigned>(b_.size()));
    double divisor = divides_entries ? static_cast<double>(b_.size()) : 1.0;
    for (std::size_t g = 0; g < codes_.size(); ++g) {
      b_.decode_reduce(sum, codes_[g], known_[g], divisor);
    }
    if (!divides_entries) b_.finish_sum(sum);
  }

 private:
  void collect_as_owner(int group) {
    auto own = static_cast<std::size_t>(group);
    bool alone = l_.inner.size() == 1;
    Range source = alone ? b_.in(shard_) : b_.out(shard_);
    is_cleared_ = source == b_.out(shard_);
    known_[own] = b_.encode(codes_[own], source, is_cleared_);
    for (int offset = 1; offset < l_.groups; ++offset) {
      b_.send(l_.rail.at(group + offset), codes_[own], lane(), known_[own]);
    }
    forward(own);
    for (int offset = 1; offset < l_.groups; ++offset) {
      auto other = other_group(group, offset);
      known_[other] = b_.receive(l_.rail.at(group - offset), codes_[other], lane(), true);
      forward(other);
    }
  }

  void collect_from_owner(int group) {
    Rank owner = l_.inner.at(rail_);
    for (int offset = 0; offset < l_.groups; ++offset) {
      auto other = other_group(group, offset);
      known_[other] = b_.receive(owner, codes_[other], lane(), true);
    }
  }

  void forward(std::size_t group) {
    for (Rank mate : l_.inner.ranks) {
      if (mate != b_.me()) b_.send(mate, codes_[group], lane(), known_[group]);
    }
  }

  [[nodiscard]] std::size_t other_group(int group, int offset) const {
    return static_cast<std::size_t>((group - offset + l_.groups) % l_.groups);
  }
  [[nodiscard]] uint64_t lane() const { return static_cast<uint64_t>(rail_); }

  Builder& b_;
  const Levels& l_;
  int rail_;
  Span shard_;
  std::vector<Range> codes_;     ///< by group
  std::vector<uint32_t> known_;  ///< the step that tells the encoding's length
  bool is_cleared_ = false;      ///< the encoding has left zeros where the sum goes
};

int my_group(const PlanRequest& request, Rank me) {
  int index = 0;
  for (const auto& group : inner_groups(request)) {
    for (Rank r : group) {
      if (r == me) return index;
    }
    ++index;
  }
  return index;
}

}  // namespace

void sparse_all_reduce(Builder& b) {
  Levels l = levels(b.request(), b.me());
  int group = my_group(b.request(), b.me());
  auto shards = split({0, b.request().count}, static_cast<uint64_t>(l.rails), b.request().dtype);
  std::vector<Span> owned(static_cast<std::size_t>(l.inner.size()));
  std::copy(shards.begin(), shards.end(), owned.begin());
  direct_reduce_scatter(b, l.inner, owned, From::kInput, Coding::kNever);

  std::vector<SparseRail> rails;
  for (std::size_t r = 0; r < shards.size(); ++r) {
    if (!shards[r].empty()) rails.emplace_back(b, l, static_cast<int>(r), shards[r]);
  }
  for (auto& rail : rails) rail.collect(group);
  for (auto& rail : rails) rail.add_up();
}

}  // namespace paceline::plan
