// The engine's inside. One concern a file: engine.cc (submission, progress), groups.cc, faults.cc
// (losses, mismatches, deadlines, abort), finish.cc (the orderly end).
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "codec/codec.h"
#include "engine/control.h"
#include "engine/describe.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/plan_cache.h"
#include "engine/residuals.h"
#include "engine/scratch.h"
#include "engine/validate.h"

namespace paceline::engine {

struct Group {
  GroupId id = 0;
  bool alive = false;
  std::vector<Rank> ranks;  ///< world numbering
  Rank me = 0;              ///< this rank in the group's numbering
  plan::GroupShape shape;
  uint64_t stream = 0;  ///< names the group on all its members
  uint64_t next_sequence = 0;
  PlanCache plans;
  /// Executors that wait for their plan to come again; at most a few per plan.
  std::unordered_map<const PreparedPlan*, std::vector<std::unique_ptr<Executor>>> idle;
};

/// An operation from submit() until forget().
struct Record {
  enum class State : uint8_t { kFree, kWaitingForScratch, kRunning, kEnded };
  State state = State::kFree;
  OpId id = 0;
  bool transfer = false;
  bool any_length = false;
  bool sending = false;
  GroupId group = 0;
  OpKey key;
  uint32_t digest = 0;
  Description description;
  Time timeout = 0;
  Time deadline = kNever;
  Time last_move = 0;
  uint64_t input_bytes = 0;
  uint64_t window_bytes = 0;
  bool in_window = false;  ///< counted in windowed_
  std::unique_ptr<Executor> executor;
  Scratch scratch;
  Binding binding;
  ResidualView residuals;
  std::byte* output = nullptr;
  uint64_t output_bytes = 0;
  std::vector<uint64_t> send_counts, receive_counts;
  Rank peer = -1;  ///< transfers, world numbering
  // When it does not move:
  int stall_asked = 0;
  Rank ended_once = -1;             ///< a rank that answered that it has ended this operation
  Time inquiry_silent_at = kNever;  ///< by then every asked rank must have answered
  Time inquiry_over_at = kNever;    ///< by then the operation fails, whoever is to blame
  std::vector<Rank> asked;          ///< who has not answered yet
  std::vector<std::pair<Rank, std::string>> held;  ///< who has not submitted it, and why not
  Outcome outcome;
};

/// What this rank remembers of operations that have ended, for ranks that still ask.
struct Remembered {
  OpKey key;
  uint32_t digest = 0;
  Description description;
};

constexpr int kSlotBits = 24;  ///< of a tag: messages between two ranks in one operation

/// Of slot 0. Tags whose highest byte is set belong to bootstrap.
inline wire::Tag tag_of(const OpKey& key) {
  return (key.stream + (key.sequence << kSlotBits)) & 0x007f'ffff'ffff'ffff;
}

class EngineImpl final : public Engine {
 public:
  EngineImpl(const EngineOptions& options, const bootstrap::Topology& topology,
             wire::Channel& channel);
  EngineImpl(const EngineImpl&) = delete;
  EngineImpl& operator=(const EngineImpl&) = delete;
  ~EngineImpl() override { codec::forget_topk_sizes(); }

  void set_workers(Workers* workers) override {
    workers_ = workers;
    channel_.set_workers(workers);
  }
  void set_interlude(Interlude* interlude) override {
    interlude_.outer = interlude;
    channel_.set_interlude(interlude == nullptr ? nullptr : &interlude_);
  }
  Result<OpId> submit(const Operation& operation, Time now) override;
  Result<OpId> send(const Transfer& transfer, Time now) override;
  Result<OpId> receive(const Transfer& transfer, Time now) override;
  bool progress(Time now, std::vector<OpId>& ended) override;
  [[nodiscard]] Time next_timer() const override;
  [[nodiscard]] const Outcome* outcome(OpId id) const override;
  void forget(OpId id) override;
  [[nodiscard]] std::string waiting_for(OpId id) const override;
  [[nodiscard]] bool met_neighbours(OpId id) const override;
  Result<GroupId> create_group(std::span<const Rank> ranks) override;
  Status destroy_group(GroupId id) override;
  void trim() override {
    scratch_.forget_buckets();
    codec::forget_topk_sizes();
  }
  void commit_residuals() override { residuals_.commit(); }
  void rollback_residuals() override { residuals_.rollback(); }
  void commit_residuals(std::span<const uint64_t> keys) override { residuals_.commit(keys); }
  void rollback_residuals(std::span<const uint64_t> keys) override { residuals_.rollback(keys); }
  Status scale_residuals(double factor) override;
  Status read_residual(uint64_t key, std::span<float> data) const override;
  Status write_residual(uint64_t key, std::span<const float> data) override;
  void abort(const Status& why) override;
  void adopt(const Status& failure) override;
  [[nodiscard]] Status health() const override { return failure_; }
  void hold(const char* why) override { held_.store(why, std::memory_order_relaxed); }
  bool finish(Time now, Time deadline) override;
  [[nodiscard]] Statistics statistics() const override;
  Result<plan::PlanRequest> request_for(const Operation& operation) const override;

 private:
  // engine.cc
  void fill_request(const Operation& o, const Group& group, plan::PlanRequest& request) const;
  Result<std::shared_ptr<PreparedPlan>> plan_for(const Operation& o, Group& group,
                                                 BufferBytes bytes);
  uint32_t take_record();
  [[nodiscard]] Record* find(OpId id);
  [[nodiscard]] const Record* find(OpId id) const;
  void begin(Record& r, Time now);
  bool try_start(Record& r, bool force);
  [[nodiscard]] Time forced_at() const;
  void admit_waiting(Time now);
  void settle(Record& r);
  void end(Record& r, Status status);
  void release_resources(Record& r);
  Result<OpId> transfer(const Transfer& t, bool sending, Time now);
  void carried(const wire::Completion& c, Time now);
  bool run_local_steps(bool sums);
  void check_finite(Record& r);
  void remember(const Record& r);

  // groups.cc
  void count_groups();
  Group* group(GroupId id);
  [[nodiscard]] const Group* group(GroupId id) const;
  [[nodiscard]] plan::GroupShape shape_of(const std::vector<Rank>& ranks) const;

  // faults.cc
  void fail(const Status& why, Rank told_by);
  void fail_with_peer(Rank peer, const Status& why);
  void suspect(Rank peer, const Status& why);
  [[nodiscard]] bool is_telling() const { return now_ < tell_until_ && channel_.notes_waiting(); }
  void on_note(const wire::Note& note, Time now);
  void on_loss(const wire::Loss& loss);
  void on_inquiry(Rank from, const ControlNote& note, Time now);
  void on_answer(Rank from, const ControlNote& note);
  void on_mismatch(Record& r, Rank peer, Time now);
  void check_timers(Time now);
  void start_inquiry(Record& r, Reason reason, Time now);
  bool add_pair_counts(const Record& r, Rank peer, Description& d) const;
  [[nodiscard]] std::vector<Rank> blockers(const Record& r) const;
  Record* find_active(const OpKey& key);
  [[nodiscard]] std::string last_of_stream(uint64_t stream) const;
  void post(Rank peer, const ControlNote& note);

  // finish.cc
  void on_goodbye(Rank from);
  void on_farewell();
  void try_goodbye();

  /// While it is open nothing starts: what was submitted waits for the end of progress().
  struct OpenInterlude final : Interlude {
    Interlude* outer = nullptr;
    bool is_open = false;
    void begin() override {
      if (outer == nullptr) return;
      is_open = true;
      outer->begin();
    }
    void end() override {
      if (outer == nullptr) return;
      outer->end();
      is_open = false;
    }
  };

  EngineOptions options_;
  OpenInterlude interlude_;
  Workers* workers_ = nullptr;
  bootstrap::Topology topology_;
  wire::Channel& channel_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::unordered_map<uint64_t, uint32_t>
      creations_;  ///< how often each list of ranks was made a group
  std::unordered_map<uint64_t, uint64_t> transfer_sequences_;  ///< by stream
  std::vector<std::unique_ptr<Record>> records_;
  std::vector<uint32_t> free_records_;
  std::vector<uint32_t> active_;  ///< submission order
  /// Ids, not slots: what has ended may be taken and its slot be used again before progress() tells of it.
  std::vector<OpId> just_ended_;
  std::size_t waiting_ = 0;  ///< records in kWaitingForScratch
  uint64_t windowed_ = 0;    ///< bytes of running operations that have a window
  uint64_t generation_ = 0;
  plan::PlanRequest probe_;  ///< reused
  wire::Events events_;
  ScratchPool scratch_;
  codec::ResidualStore residuals_;
  Statistics statistics_;
  std::vector<Remembered> remembered_;  ///< ring
  std::size_t remembered_next_ = 0;
  Time now_ = 0;
  Time last_admission_ = 0;  ///< of an operation that had to wait for it
  Time next_check_ = kNever;

  std::atomic<const char*> held_{nullptr};  ///< see hold()
  Status failure_;
  /// A peer whose end this rank has met, while it listens whether that was the end of another's first.
  struct Suspicion {
    Rank peer = -1;
    Status why;
    Time due = kNever;
  };
  Suspicion suspicion_;
  Time tell_until_ = 0;  ///< after a failure: operations end by then, whoever has not heard of it
  bool channel_aborted_ =
      false;                   ///< the channel was told; its next progress() lets go of all buffers
  bool buffers_free_ = false;  ///< after a failure: no buffer is touched any more
  std::vector<uint8_t> gone_;  ///< [size] 1: lost, or said goodbye and left

  bool finishing_ = false;
  bool said_goodbye_ = false;
  bool farewell_ = false;
  Time farewell_until_ = kNever;
  std::vector<Rank> goodbyes_;  ///< children whose subtree has finished
  std::vector<Rank> unseen_;    ///< children that have not confirmed the farewell
};

}  // namespace paceline::engine
