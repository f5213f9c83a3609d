// Plans are built once per kind of operation and kept: a training step asks for the same few, again
// and again.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/packets.h"
#include "engine/engine.h"
#include "plan/plan.h"

namespace paceline::engine {

/// A plan with what the executor needs to walk it without looking twice.
struct PreparedPlan {
  plan::Plan plan;
  std::vector<uint32_t> waits;            ///< [steps] dependencies of each
  std::vector<uint32_t> successor_start;  ///< [steps + 1] into `successors`
  std::vector<uint32_t> successors;
  uint64_t slots = 0;  ///< tags used: 1 + the largest slot
  /// Top-k: byte offsets into the output, one inside each run that is decoded on its own anywhere
  /// in the group (a run that met an Inf or NaN is NaN from end to end).
  std::vector<uint64_t> finite_samples;
  /// Top-k: elements [begin, end) of the buffer that this rank encodes, ascending, none next to another.
  std::vector<std::pair<uint64_t, uint64_t>> encoded;
  std::vector<Rank>
      neighbours;  ///< ranks of this one's node that it receives from, group numbering, ascending
  std::optional<uint64_t> link_bytes;  ///< plan::predict, once asked for
  Packets predicted_with;              ///< what `link_bytes` holds for
  uint64_t runs = 0;     ///< operations carried out since `link_bytes` was last added up
  bool is_kept = false;  ///< a cache holds it: it may come again

  [[nodiscard]] uint64_t predicted_link_bytes(const Packets& packets);
};

/// Checks what the executor relies on, so that a defect in a builder is an error and no stray
/// write.
Result<std::shared_ptr<PreparedPlan>> prepare(plan::Plan plan, uint64_t input_bytes,
                                              uint64_t output_bytes);

/// Bounded, least recently used goes first. One per group: the group's shape is not part of the
/// comparison.
class PlanCache {
 public:
  explicit PlanCache(std::size_t capacity = 256) : capacity_(capacity) {}

  /// nullptr when there is none. Allocates nothing.
  std::shared_ptr<PreparedPlan> find(uint64_t hash, const plan::PlanRequest& probe);
  /// Returns the entry that had to go, if any.
  std::shared_ptr<PreparedPlan> insert(uint64_t hash, std::shared_ptr<PreparedPlan> plan);
  template <class F>
  void for_each(F&& f) {
    for (auto& e : entries_) f(*e.plan);
  }
  [[nodiscard]] std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    uint64_t hash;
    std::shared_ptr<PreparedPlan> plan;
  };
  std::size_t capacity_;
  std::list<Entry> entries_;  ///< most recently used first
  std::unordered_multimap<uint64_t, std::list<Entry>::iterator> index_;
};

/// Everything that tells requests of one group apart.
uint64_t hash_request(const plan::PlanRequest& request);

}  // namespace paceline::engine
