// Scratch memory for plans: pooled, so that a steady state allocates nothing, and bounded by what
// the largest of the last operations calls for, so that a rank's memory stays a small multiple of its
// largest bucket. (DDP's first pass may have the whole model in one, of which later passes know nothing.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace paceline::engine {

/// A piece of scratch on loan from a ScratchPool. Plain data: give it back with
/// ScratchPool::release().
struct Scratch {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
};

class ScratchPool {
 public:
  static constexpr uint64_t kAlign = 4096;
  /// What the largest of so many operations, at least, and of twice as many at most, calls for is kept.
  static constexpr uint64_t kRemembered = 128;
  /// The bound is at least this, for many small operations at once. (More would not help them: each only takes longer.
  /// On 1 Gb/s 16 of 512 KiB took 11 % longer with 4 MiB than with 1.)
  static constexpr uint64_t kFloor = 3ULL << 18;
  /// And this where there are several groups: ranks may come to these in different orders, and what waits for scratch here
  /// is what another rank waits for.
  static constexpr uint64_t kFloorOfSeveral = 4ULL << 20;
  /// What else a step takes beside small buckets: copies of short messages, pieces that are coming in, what malloc keeps.
  static constexpr uint64_t kOthers = 5ULL << 18;

  ScratchPool() = default;
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;
  ~ScratchPool();

  /// An operation over `bytes` of user data exists: for a while the bound is at least one and a half times that for two
  /// pieces (so that of operations that take three quarters of theirs one is under way while another begins), and once
  /// that for more, or what twice that leaves beside kOthers: with all else that a step takes it stays below twice the
  /// largest bucket, if that has 1 MiB or more and one group has them all.
  void note_bucket(uint64_t bytes);
  /// Operations of several groups may wait for each other (at first: of one).
  void serve(bool several_groups);
  /// Those to come are others: what is idle is freed, even where the bound would let it stay.
  void forget_buckets();
  /// `bytes` of 4096-aligned memory (contents arbitrary), or nothing while the bound forbids it.
  /// Only `force` goes beyond the bound. nullptr data with bytes > 0: the machine has no memory
  /// left.
  std::optional<Scratch> acquire(uint64_t bytes, bool force);
  void release(Scratch scratch);

  [[nodiscard]] uint64_t high_water() const { return high_water_; }
  [[nodiscard]] uint64_t held() const { return held_; }

 private:
  /// Of so many pieces.
  [[nodiscard]] uint64_t bound(size_t pieces) const;
  /// Until no more than that is allocated, `bytes` more included.
  void drop_idle(uint64_t bytes = 0);
  Scratch lend(Scratch scratch);

  std::vector<Scratch> idle_;
  std::vector<Scratch> lent_;  ///< an engine may end with operations under way
  uint64_t floor_ = kFloor;
  uint64_t noted_ = 0;                         ///< operations, of this stretch of kRemembered
  uint64_t largest_ = 0, largest_before_ = 0;  ///< of this stretch, and of the one before
  uint64_t held_ = 0;                          ///< allocated: on loan and idle
  uint64_t loaned_ = 0;                        ///< on loan
  uint64_t high_water_ = 0;
};

}  // namespace paceline::engine
