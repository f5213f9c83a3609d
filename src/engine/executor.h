// Walks one plan: posts its messages on the channel as soon as what they depend on is done, and
// runs its local steps in slices, so that the wire keeps moving in between.
//
// An executor is made once per plan and used again for every later operation with that plan.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "engine/plan_cache.h"
#include "wire/channel.h"

namespace paceline::engine {

/// Hands out the residual memory of elements [first, first + elements) of the operation's buffer.
class ResidualSource {
 public:
  virtual ~ResidualSource() = default;
  virtual Result<std::span<const codec::ResidualRun>> runs(uint64_t first, uint64_t elements) = 0;
};

/// What an operation gives its plan to work on.
struct Binding {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::byte* scratch = nullptr;
  std::span<const Rank> ranks;  ///< group numbering → world numbering
  wire::Tag tag = 0;            ///< of slot 0
  uint32_t digest = 0;
  /// All-to-all: what this rank sends to and expects from each peer, so that every pair checks its
  /// own count.
  std::span<const uint64_t> send_counts;
  std::span<const uint64_t> receive_counts;
  uint64_t cookie = 0;  ///< of step 0; the step's index is added
  ResidualSource* residuals = nullptr;
  Workers* workers = nullptr;  ///< that share the coding of a sparse operation; null: none
};

class Executor {
 public:
  explicit Executor(std::shared_ptr<PreparedPlan> plan);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Begins; posts all messages that depend on nothing.
  void start(const Binding& binding, wire::Channel& channel);
  /// One of this executor's messages has been carried.
  void complete(uint32_t step, const wire::Completion& completion, wire::Channel& channel);
  /// Runs local steps until about `budget` bytes have been handled. Returns how many were. `interlude` is open while
  /// a step that takes long computes.
  uint64_t work(uint64_t budget, wire::Channel& channel, Interlude& interlude);

  [[nodiscard]] bool done() const { return remaining_ == 0; }
  /// Something has come from every rank of the node that the plan receives from: all of them are at this operation.
  [[nodiscard]] bool met_neighbours() const { return unheard_.empty(); }
  /// After a failure there is none.
  [[nodiscard]] bool has_work() const {
    return failure_.is_ok() && (current_ != plan::kNoStep || !ready_.empty());
  }
  /// All that can be done now is to add up what has come: nobody waits for it but this rank.
  [[nodiscard]] bool only_adds_up() const {
    if (!has_work()) return false;
    const uint32_t next = current_ != plan::kNoStep ? current_ : ready_.front();
    return plan_->plan.steps[next].kind == plan::StepKind::kDecodeSum;
  }
  /// The first thing that went wrong. A mismatch carries the peer in failed_peer().
  [[nodiscard]] const Status& failure() const { return failure_; }
  [[nodiscard]] Rank failed_peer() const { return failed_peer_; }  ///< world numbering, -1: none
  /// Who sent the encoding that can't be decoded, likewise.
  [[nodiscard]] Rank damaged_by() const { return damaged_by_; }
  [[nodiscard]] PreparedPlan& plan() { return *plan_; }
  [[nodiscard]] const std::shared_ptr<PreparedPlan>& shared_plan() const { return plan_; }
  /// World ranks that posted messages still wait for, ascending, each once.
  [[nodiscard]] std::vector<Rank> blockers() const;

 private:
  // Feeds a message into a reduction or a decoder while its bytes are warm.
  class StepSink final : public wire::Sink {
   public:
    void bind(Executor* executor, uint32_t step) {
      executor_ = executor;
      step_ = step;
    }
    void consume(uint64_t offset, std::span<const std::byte> data) override {
      executor_->absorb(step_, offset, data);
    }
    bool consume_and_answer(uint64_t offset, std::span<const std::byte> data,
                            std::byte* place) override {
      return executor_->absorb_and_answer(step_, offset, data, place);
    }

   private:
    Executor* executor_ = nullptr;
    uint32_t step_ = 0;
  };

  void release(uint32_t step, wire::Channel& channel);
  void make_ready(uint32_t step, wire::Channel& channel);
  void post(uint32_t step, wire::Channel& channel);
  void absorb(uint32_t step, uint64_t offset, std::span<const std::byte> data);
  bool absorb_and_answer(uint32_t step, uint64_t offset, std::span<const std::byte> data,
                         std::byte* place);
  uint64_t run_slice(uint32_t step, uint64_t budget, bool& finished, wire::Channel& channel,
                     Interlude& interlude);
  // Steps of a sparse operation, whole: they can't be cut.
  uint64_t encode(const plan::Step& s, uint32_t step, wire::Channel& channel, Interlude& interlude);
  /// What neighbours hold for an encoding, for as long as this lives.
  class Reading {
   public:
    Reading(Executor& executor, const plan::Step& s, wire::Channel& channel)
        : executor_(executor), step_(s), channel_(channel) {
      executor_.open_addends(step_, channel_);
    }
    ~Reading() { executor_.close_addends(step_, channel_); }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    Executor& executor_;
    const plan::Step& step_;
    wire::Channel& channel_;
  };
  void open_addends(const plan::Step& s, wire::Channel& channel);
  void close_addends(const plan::Step& s, wire::Channel& channel);
  uint64_t decode_sum(const plan::Step& s, Interlude& interlude);
  Rank sender_of_damage(const plan::Step& s);
  void run_dense(const plan::Step& s, uint64_t from, uint64_t n);
  std::byte* at(const plan::Range& r);
  void fail(Status why, Rank peer = -1);
  [[nodiscard]] uint32_t digest_for(const plan::Step& s) const;

  std::shared_ptr<PreparedPlan> plan_;
  Binding binding_;
  std::vector<uint32_t> waits_;
  std::vector<uint8_t> posted_;    ///< [steps] 1 while a message is on the channel
  std::vector<uint64_t> lengths_;  ///< [steps] of variable messages
  std::vector<std::span<const std::byte>> encodings_;  ///< of a sum, reused
  std::vector<uint64_t> answered_;                     ///< [steps] Completion::answered
  std::vector<uint64_t> held_;                         ///< [steps] Completion::held
  std::vector<codec::Addend> addends_;                 ///< of an encoding, reused
  std::vector<uint32_t> ready_;  ///< local steps that can run: a heap, the plan's earliest first
  uint32_t current_ = plan::kNoStep;  ///< the local step that is being run
  uint64_t slice_done_ = 0;           ///< bytes of it already handled
  std::vector<StepSink> sinks_;
  std::vector<uint32_t> sink_of_;  ///< [steps]
  std::vector<uint32_t> cascade_;  ///< steps to release, reused
  std::vector<Rank> unheard_;      ///< of the plan's neighbours
  std::size_t remaining_ = 0;
  Status failure_;
  Rank failed_peer_ = -1;
  Rank damaged_by_ = -1;
};

}  // namespace paceline::engine
