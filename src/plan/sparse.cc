// Sparse two-level all-reduce: a reduce-scatter at full precision inside each inner group; each
// owner keeps the largest entries of its shard's sum and residual (top-k with error feedback: A. F.
// Aji and K. Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017); the
// encodings go to the other groups' owners of the shard and from these to their groups' ranks.
// Every rank then adds up the same encodings in the same order, so all end with the same bits, and
// nothing dense is sent after the first level.
#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

class SparseRail {
 public:
  SparseRail(Builder& b, const Levels& l, int rail, Span shard)
      : b_(b), l_(l), rail_(rail), shard_(shard), codes_(static_cast<std::size_t>(l.groups)) {
    for (Coded& code : codes_) code.range = b.encoding(shard);
  }

  /// What this rank does to have every group's encoding of the shard. `group` is this rank's; `addends` are what its own
  /// shard's sum may lack.
  void collect(int group, const std::vector<uint32_t>& addends) {
    if (rail_ == l_.inner.mine) {
      collect_as_owner(group, addends);
    } else {
      collect_from_owner(group);
    }
  }

  void add_up() { b_.decode_sum(b_.out(shard_), codes_); }

 private:
  void collect_as_owner(int group, const std::vector<uint32_t>& addends) {
    auto own = static_cast<std::size_t>(group);
    bool alone = l_.inner.size() == 1;
    Range source = alone ? b_.in(shard_) : b_.out(shard_);
    codes_[own].bytes_from = b_.encode(codes_[own].range, source, addends);
    for (int offset = 1; offset < l_.groups; ++offset) {
      b_.send(l_.rail.at(group + offset), codes_[own].range, lane(), codes_[own].bytes_from);
    }
    forward(own);
    for (int offset = 1; offset < l_.groups; ++offset) {
      auto other = other_group(group, offset);
      take(other, l_.rail.at(group - offset));
      forward(other);
    }
  }

  void collect_from_owner(int group) {
    Rank owner = l_.inner.at(rail_);
    for (int offset = 0; offset < l_.groups; ++offset) {
      take(other_group(group, offset), owner);
    }
  }

  void take(std::size_t group, Rank from) {
    Coded& code = codes_[group];
    code.bytes_from = b_.receive(from, code.range, lane(), true);
  }

  void forward(std::size_t group) {
    const Coded& code = codes_[group];
    for (Rank mate : l_.inner.ranks) {
      if (mate != b_.me()) b_.send(mate, code.range, lane(), code.bytes_from);
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
  std::vector<Coded> codes_;  ///< by group
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
  std::vector<uint32_t> addends;
  direct_reduce_scatter(b, l.inner, owned, From::kInput, Coding::kNever, 0, {nullptr, &addends});

  std::vector<SparseRail> rails;
  for (std::size_t r = 0; r < shards.size(); ++r) {
    if (!shards[r].empty()) rails.emplace_back(b, l, static_cast<int>(r), shards[r]);
  }
  for (auto& rail : rails) rail.collect(group, addends);
  for (auto& rail : rails) rail.add_up();
}

}  // namespace paceline::plan
