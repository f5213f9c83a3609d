// Between the GPU's flags and the wires: threads that carry pieces from one to the other, and the books of what has gone,
// come, arrived.
//
// The pump thread watches the flags that streams write. A piece whose encoding has reached pinned memory is sent at once;
// receives are posted ahead, as soon as the operation's memory is free. It looks hard for some tens of microseconds
// after something moved, then sleeps between looks; with nothing under way it sleeps until something is submitted.
// What has come is noted on the thread of its communicator, which writes the flags that streams wait for, in order.
//
// Several communicators (wires) carry pieces side by side, each with an engine thread that copies to and from its sockets.
// The first one carries reports and meetings too. Where a piece goes: deal.h.
//
// The first failure (of the wire, the GPU, NCCL, or asked for) ends everything: flags are released, so that no stream
// waits for ever, and every later call gives the same Status.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "gpu/deal.h"
#include "gpu/flags.h"
#include "gpu/link_share.h"
#include "gpu/node_meeting.h"
#include "gpu/node_page.h"
#include "gpu/path_plan.h"
#include "gpu/wire.h"

namespace paceline::gpu {

/// One collective on its way. Made by the submitting thread; what is below the line is the pump's.
struct Operation {
  static constexpr int32_t kNonFinite = 1 << 30;
  uint64_t sequence = 0;  ///< from 1
  std::shared_ptr<const PathPlan> plan;
  std::string name;
  std::byte* host = nullptr;  ///< plan->host_bytes of pinned memory
  uint64_t tenant = 0;        ///< the last operation that used this memory; 0: none
  uint32_t out_before = 0;    ///< the out flag's value when all earlier operations are out
  /// What arrives spreads in the node: not before all its ranks have it. (NCCL's kernels would wait for the network.)
  bool meets = false;
  bool copies = false;  ///< by copies: not before it is in place on all of them
  bool brings =
      false;  ///< the node's ranks give each other their parts first: the way out waits for all of them
  bool launches = false;  ///< its way in is enqueued when it has come
  //----
  size_t posted = 0;  ///< pieces whose receives are posted
  size_t sent = 0;    ///< pieces sent; one more: the report too
  struct PieceState {
    int in_left = 0, back_left = 0;  ///< slices of messages
    bool in = false, back = false;
  };
  std::vector<PieceState> pieces;
  /// Of this rank, then the largest of all ranks' words: its bit kNonFinite is 1 where some rank saw an Inf or NaN, the
  /// others are the rows that were sent to each other node.
  int32_t report = 0;
  uint64_t rows = 0;      ///< by rows: sent so far
  int until_meeting = 0;  ///< pieces to arrive; one more while not all of this rank's are out
  int arrivals_left = 0;  ///< pieces (twice with two hops), the report, a meeting, the launch
  int sends_left = 0;
  ByMeeting<bool> met{};  ///< all ranks of the node have come to it
};

class Pump {
 public:
  struct Options {
    Flags flags;
    int lanes = 1;
    int node = 0;
    std::vector<int> peers;  ///< [nodes] the ranks of this local rank; peers[node] is this rank
    /// Of the first wire: the ranks of this node, where there are several. For each kind of meeting one, as they come in
    /// no common order.
    ByMeeting<uint32_t> node_groups{};
    NodePage* page = nullptr;  ///< that they share, if they do
    int local_rank = 0;
    int local_size = 1;
    bool shares_link = false;  ///< PACELINE_LINK_RATE is given: by what waits, link_share.h
    uint64_t least_slice = kLeastSlice;  ///< of a message that is cut; the same on all ranks
    std::function<Status()> check;       ///< of GPU and NCCL; now and then, on a thread of its own
    /// Once, on the thread that found it, before any caller hears of it: who does may end the process, and the other
    /// ranks must know by then what for.
    std::function<void(const Status&)> tell;
    std::function<void(const Status&)> failed;  ///< then
    std::function<void()> enter;                ///< first, on check()'s thread
  };

  /// wires: the first and its companions, in the same order on all ranks.
  Pump(const std::vector<Wire>& wires, Options options);
  Pump(const Pump&) = delete;
  Pump& operator=(const Pump&) = delete;
  ~Pump() { stop(); }

  void submit(std::shared_ptr<Operation> operation);
  /// The way in of an operation that `launches` is on its streams. It counts as arrived only then.
  void launched(Operation& operation);
  /// Waits until all submitted operations have come over the network, at most `timeout_s` (≤ 0: without limit, as
  /// operations have deadlines of their own). finite: false when any rank reported an Inf or NaN since the last call.
  Status wait_arrival(double timeout_s, bool& finite);
  /// The same for operation `sequence` and all before it.
  Status wait_operation(uint64_t sequence, double timeout_s, bool& finite);
  /// From now on the arrival of operation `sequence` (and of all before it) is noted; returns when what was noted before had
  /// arrived, 0: it has not.
  Time note_arrival(uint64_t sequence);
  /// Until that, or a failure, or `until`.
  void rest(uint64_t sequence, Time until);
  /// The operations of which that was said, as many as there is room for; they are forgotten with that. Returns how many.
  uint64_t take_not_finite(std::span<uint64_t> operations);
  /// What such a wait said of `finite` reached nobody: the next one says it.
  void tell_again(bool finite);
  /// Whether wait_operation() would return at once.
  [[nodiscard]] bool has_arrived(uint64_t sequence) const;
  /// At once, where failure() waits until others are told.
  [[nodiscard]] bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  /// Waits until everything is over here: what this rank has to send has reached the others too, who may still wait for
  /// it when all has arrived here. Ends with the first failure; operations have deadlines.
  Status wait_retired();
  /// Of an operation by rows, when it has arrived (waits for that): the most rows that a rank sent to each other node. The
  /// same on all ranks.
  Result<uint64_t> most_rows(const Operation& operation) const;
  /// When all of an operation of this rank was out; of the last kOutTimes.
  [[nodiscard]] Time out_at(uint64_t sequence) const {
    return out_at_[sequence % kOutTimes].load(std::memory_order_relaxed);
  }
  static constexpr size_t kOutTimes = 256;
  /// Whether no stream waits for the network now.
  [[nodiscard]] bool all_arrived() const;
  /// The address of a float that is 0 and becomes 1, before any flag is released, where a failure comes before all that
  /// was submitted so far has arrived: what reads it behind a join and does nothing then is safe from a fault without
  /// a wait of the host. It stands for these operations until kGates more calls.
  Result<drivers::cuda::DevicePtr> gate();
  /// Ends everything.
  void fail(const Status& found);
  [[nodiscard]] Status failure() const;
  /// The last operation whose pinned memory is free again.
  [[nodiscard]] uint64_t retired() const { return retired_.load(std::memory_order_acquire); }
  [[nodiscard]] uint64_t wire_bytes() const { return wire_bytes_.load(); }
  /// By rows: sent to each other node, and what the plans' bounds were.
  [[nodiscard]] uint64_t rows_sent() const { return rows_sent_.load(); }
  [[nodiscard]] uint64_t rows_bound() const { return rows_bound_.load(); }
  [[nodiscard]] uint64_t operations() const { return finished_.load(); }
  /// Operations of which this rank encoded finite numbers that the wire's type can't hold. The first one is said.
  [[nodiscard]] uint64_t saturated() const { return saturated_.load(); }
  /// Ends the threads, after the wires have let go of all memory, and after whoever is about to tell others of a failure.
  void stop();

 private:
  using Shared = std::shared_ptr<Operation>;
  enum class Kind : uint8_t { kSend, kIn, kBack, kReport, kMeeting };
  /// What is under way on a wire.
  struct Ticket {
    Pump* pump = nullptr;
    const Wire* wire = nullptr;
    Shared operation;
    size_t piece = 0;  ///< of a meeting: what for
    Kind kind = Kind::kSend;
    uint64_t bytes = 0;  ///< of a send
  };
  struct Lane {
    std::deque<std::pair<Shared, size_t>> in,
        back;                                    ///< pieces in order whose arrival is not flagged
    std::deque<std::pair<Shared, size_t>> sums;  ///< pieces in order whose sum is not sent (pump's)
    uint32_t sums_seen = 0;                      ///< pump's
    uint32_t in_flag = 0, back_flag = 0;
  };

  void pump();
  void fail_soon(Status why);
  void fail_now();
  [[nodiscard]] Status cause_of(const Status& found) const;
  void hold(bool holds);
  bool take_submitted();
  bool post_receives();
  bool send_pieces();
  void all_are_out(Operation& o);
  bool send_sums();
  bool retire();
  bool has_streamed();
  bool look_at_page();
  void share_link();
  [[nodiscard]] uint64_t to_leave() const;
  void idle(bool moved);
  void watch_over();
  void watch();
  Status post_piece(const Shared& o, size_t index);
  Status send_piece(const Shared& o, size_t index);
  Status send_sum(const Shared& o, size_t index);
  Status send_report(const Shared& o);
  void count_saturated(const Operation& o);
  /// How long the encoding at `from` is, and counts its rows.
  Result<uint64_t> rows_to_send(Operation& o, const PathPiece& piece, const std::byte* from);
  Status receive_slices(const Shared& o, size_t index, int node, std::byte* to, uint64_t bytes,
                        Kind kind);
  Status send_slices(const Shared& o, size_t index, int node, const std::byte* from, uint64_t bytes,
                     int hop);
  [[nodiscard]] Deal deal(const Operation& o, size_t index, int node, uint64_t bytes) const;
  template <class Submit>
  Status track(const Wire& wire, const Shared& o, size_t piece, Kind kind, Submit submit,
               uint64_t bytes = 0);
  void ended(const Ticket& ticket, paceline_op op, paceline_code code);
  void finish(const Ticket& ticket);
  void advance(Lane& lane);
  void arrived(Operation& o);
  void meet();
  bool ask_next(NodePage::For what);
  [[nodiscard]] bool has_come(NodePage::For what, const Operation& o) const;
  void pass(NodePage::For what);
  Status wait_until(const std::function<bool()>& there, double timeout_s, bool& finite);

  Options options_;
  std::vector<Wire> wires_;

  mutable std::mutex mutex_;
  std::condition_variable submitted_turn_;        ///< for the pump
  std::condition_variable stopping_turn_;         ///< for the watch
  mutable std::condition_variable arrived_turn_;  ///< for wait_arrival and the like
  std::deque<Shared> inbox_;
  std::vector<Lane> lanes_;
  ByMeeting<NodeMeeting> meetings_;
  std::atomic<int> meeting_{0};  ///< calls of meet(): the first one in sees to all
  uint64_t submitted_ = 0, arrived_ = 0;
  uint64_t arrived_through_ = 0;                 ///< all operations up to this one have arrived
  std::set<uint64_t> arrived_early_;             ///< of those behind it
  uint64_t noted_ = 0;                           ///< note_arrival()'s
  Time noted_at_ = 0;                            ///< when it had arrived
  std::array<uint64_t, Flags::kGates> gated_{};  ///< by gate: the last operation that it stands for
  size_t next_gate_ = 0;
  bool finite_ = true;
  std::vector<uint64_t> not_finite_;  ///< operations, until someone asks for them
  bool stopping_ = false;
  bool told_ = false;  ///< of the failure
  int failing_ = 0;    ///< callers inside fail(), who tell others
  std::condition_variable none_failing_;
  Status failure_;
  std::atomic<bool> failed_{false};
  Status to_fail_with_;                     ///< met on a wire's thread
  std::atomic<bool> must_fail_{false};      ///< with that
  int under_way_ = 0;                       ///< tickets
  std::condition_variable none_under_way_;  ///< for stop()

  // The pump thread's own.
  std::deque<Shared> operations_;  ///< not retired, in order
  size_t posting_ = 0, sending_ = 0;
  bool holding_ = false;  ///< the wires know that something is under way here
  int64_t last_moved_ = 0, last_look_ = 0;
  uint32_t done_seen_ = 0, given_seen_ = 0;  ///< the done and the given flag
  std::optional<LinkShare> share_;
  std::array<std::atomic<uint64_t>, kMostWires>
      to_leave_{};                 ///< bytes that wires were given to send
  std::atomic<bool> come_{false};  ///< a piece has since the thread last looked

  std::array<std::atomic<Time>, kOutTimes> out_at_{};

  std::atomic<uint64_t> retired_{0}, wire_bytes_{0}, finished_{0}, rows_sent_{0}, rows_bound_{0},
      saturated_{0};
  std::thread pump_thread_;
  /// Asks the driver how the GPU is, which the pump must not: where a stream has no room left for what a thread enqueues, that
  /// thread waits inside the driver with its lock held, and what makes room may be for the pump to do.
  std::thread watch_thread_;
};

}  // namespace paceline::gpu
