// Writes a plan's steps down and finds what each must wait for.
//
// An algorithm emits its steps as a sequential program; the builder derives the dependencies from
// the ranges that steps read and write: a reader waits for the last writers, a writer for the
// readers since. So no dependency is forgotten, none is invented, and steps on disjoint ranges run
// at once (all receives of a reduce-scatter are posted in the beginning, pieces overtake each other
// through the levels of a two-level plan).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "plan/cut.h"
#include "plan/plan.h"

namespace paceline::plan {

/// Which steps last wrote and have since read each byte of one buffer.
class AccessMap {
 public:
  void read(uint64_t begin, uint64_t end, uint32_t step, std::vector<uint32_t>& after);
  void write(uint64_t begin, uint64_t end, uint32_t step, std::vector<uint32_t>& after);

 private:
  struct Cell {
    uint64_t end = 0;
    uint32_t writer = kNoStep;
    std::vector<uint32_t> readers;
  };
  using Cells = std::map<uint64_t, Cell>;
  /// The first cell that begins at `at`, cut from its neighbour if need be.
  Cells::iterator cut(uint64_t at);
  Cells cells_{{0, Cell{UINT64_MAX, kNoStep, {}}}};
};

/// What predict() collects instead of steps.
class MessageSink {
 public:
  virtual ~MessageSink() = default;
  virtual void message(Rank from, Rank to, uint64_t bytes) = 0;
};

class Builder {
 public:
  /// With a `sink`, nothing is written down: every send is reported to it.
  Builder(const PlanRequest& request, Rank me, MessageSink* sink = nullptr);

  [[nodiscard]] const PlanRequest& request() const { return plan_.request; }
  [[nodiscard]] Rank me() const { return plan_.me; }
  [[nodiscard]] Rank size() const { return plan_.request.shape.size; }
  [[nodiscard]] bool same_node(Rank a, Rank b) const;

  // Ranges. In place, input and output are one and in() gives the output.
  [[nodiscard]] Range in(Span elements) const;
  [[nodiscard]] Range out(Span elements) const;
  [[nodiscard]] Range bytes_of(Buffer buffer, Span elements) const;
  Range scratch(uint64_t bytes);
  /// Scratch for the dense encoding of so many elements.
  Range encoding(Span elements);
  /// The same at the beginning of `room`, which has held something else before: who writes waits for who has read that.
  [[nodiscard]] Range encoding_in(Range room, Span elements) const;

  // Steps; all return the step's index. Empty ranges give no step (kNoStep).
  uint32_t copy(Range dst, Range src);  ///< nothing when they are the same
  uint32_t reduce(Range dst, Range src);
  uint32_t scale(Range dst, double divisor);
  /// addends: steps of receive_reduce_held().
  uint32_t encode(Range dst, Range src, std::vector<uint32_t> addends = {});
  uint32_t decode(Range dst, Range src);
  uint32_t decode_reduce(Range dst, Range src);
  /// dst = the encodings' sum, with finish_sum()'s division. `codes` are neighbours in scratch memory, in this order.
  uint32_t decode_sum(Range dst, std::vector<Coded> codes);
  uint32_t zero(Range dst);
  uint32_t send(Rank peer, Range src, uint64_t piece = 0, uint32_t bytes_from = kNoStep);
  /// The two sends of what goes there and comes back (Step::answer).
  uint32_t send_for_answer(Rank peer, Range src, Range answer, uint64_t piece);
  uint32_t send_answer(Rank peer, Range src, uint32_t answer_of, uint64_t piece);
  uint32_t receive(Rank peer, Range dst, uint64_t piece = 0, bool short_message = false);
  /// Of an all-reduce's result (Step::brings_sum).
  uint32_t receive_sum(Rank peer, Range dst, uint64_t piece);
  uint32_t receive_reduce(Rank peer, Range dst, Range left, uint64_t piece = 0);
  /// The same of the last contribution: with finish_sum()'s division, and told to the sender if it likes.
  uint32_t receive_reduce_answering(Rank peer, Range dst, Range left, uint64_t piece);
  /// Of the last contribution to what a sparse encode reads: it may add it itself (Step::may_be_held).
  uint32_t receive_reduce_held(Rank peer, Range dst, uint64_t piece);
  uint32_t receive_decode(Rank peer, Range dst, uint64_t piece = 0);
  uint32_t receive_decode_reduce(Rank peer, Range dst, Range left, uint64_t piece = 0);
  /// The next step waits for `step` too (where no range tells so).
  void wait_for(uint32_t step);

  /// Average: divides a completed sum by the group's size. Other operations: nothing.
  void finish_sum(Range sum);

  Plan take(Algorithm algorithm);

 private:
  [[nodiscard]] double divisor() const;  ///< of a completed sum
  Step sending(Rank peer, Range src, uint64_t piece);
  Step receiving(StepKind kind, Rank peer, Range dst, uint64_t piece);
  uint32_t push(Step step);
  void derive_dependencies(Step& step, uint32_t index);
  void drop_implied(std::vector<uint32_t>& after) const;
  AccessMap& map(Buffer buffer);

  Plan plan_;
  MessageSink* sink_;
  uint64_t element_;
  std::vector<uint32_t> next_send_;     ///< slot per peer
  std::vector<uint32_t> next_receive_;  ///< slot per peer
  std::vector<uint32_t> pending_;       ///< for wait_for
  AccessMap maps_[3];
};

}  // namespace paceline::plan
