// The engine carries out collectives: queue → plan → execution → completion.
//
// It is sans-IO: submit() queues, progress() moves everything that can move, and time is handed in,
// so the same code runs under a thread (runner.h) on real channels and under a virtual clock in the
// simulation.
//
// Order. All ranks of a group submit the same collectives on that group in the same order; that is
// the agreement the DDP path needs (its buckets arrive in order). Other front ends put their
// agreement (coordinator, bit vector, offline order) in front of submit().
//
// Failure. An operation that misses its deadline, a lost peer or a mismatch ends the whole engine:
// every operation, present and later, completes with the same Status, and all other ranks are told
// (the notice floods along the control tree). After that no user buffer is touched.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/interlude.h"
#include "base/status.h"
#include "base/types.h"
#include "base/workers.h"
#include "bootstrap/topology.h"
#include "plan/plan.h"
#include "wire/channel.h"

namespace paceline::engine {

using OpId = uint64_t;
using GroupId = uint32_t;
inline constexpr GroupId kWorld = 0;

/// A contiguous run of one parameter inside a bucket: residuals are keyed by these, never by
/// bucket.
struct Segment {
  uint64_t key = 0;     ///< the parameter
  uint64_t offset = 0;  ///< first element within the parameter
  uint64_t elements = 0;
};

struct Operation {
  plan::Collective collective = plan::Collective::kAllReduce;
  GroupId group = kWorld;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;  ///< in group numbering
  const void* input = nullptr;
  void* output = nullptr;  ///< may equal input
  uint64_t count = 0;
  std::vector<uint64_t> counts;  ///< see plan::PlanRequest
  /// All-to-all: this rank's row and its column, which the caller has to know: nothing exchanges them, each pair's are
  /// compared.
  std::vector<uint64_t> send_counts;
  std::vector<uint64_t> receive_counts;
  plan::CodecSpec codec;
  plan::Algorithm algorithm = plan::Algorithm::kAuto;
  std::vector<Segment> segments;  ///< top-k: covers `count`; empty: keyed by name
  std::string name;               ///< for messages: "bucket 3", "layer1.weight"
  std::string shape;              ///< for messages: "[64, 128]"; empty: count is printed
  Time timeout = 0;               ///< nanoseconds; 0: the engine's default
  /// Not 0: begins once those with a window that have begun and not ended hold fewer bytes of input. Submitted first
  /// then arrives first; otherwise all share the link.
  uint64_t window_bytes = 0;
};

/// Point to point, matched by (peer, message tag) in the order of submission.
struct Transfer {
  GroupId group = kWorld;
  Rank peer = 0;  ///< in group numbering
  uint32_t tag = 0;
  void* data = nullptr;  ///< read by sends, written by receives
  uint64_t bytes = 0;
  /// The sender says how long the message is; a receive takes at most `bytes`. Both sides set it.
  bool any_length = false;
  std::string name;
  std::string shape;  ///< "float32 [2, 3]", the same on both sides; empty: only the length counts
  Time timeout = 0;
};

struct Outcome {
  Status status;
  bool finite =
      true;  ///< top-k: false when any rank saw an Inf or NaN (the output is then NaN everywhere)
};

struct EngineOptions {
  Time default_timeout = 300 * kSecond;
  int lanes = 1;
  uint64_t piece_bytes = 512 * 1024;
  int inner_size = 0;  ///< ranks in the inner group of two-level plans; 0: the node's own
  plan::Algorithm algorithm = plan::Algorithm::kAuto;
  uint64_t hierarchical_threshold = UINT64_MAX;  ///< two-level only up to this many bytes
};

/// The plan of an all-reduce whose caller leaves it to `options`. `request` without its shape and algorithm, which is
/// `shape`. kAuto: what plan::choose() takes.
plan::Algorithm settled_algorithm(const EngineOptions& options, const plan::PlanRequest& request,
                                  const plan::GroupShape& shape);

struct Statistics {
  uint64_t operations = 0;
  uint64_t payload_bytes = 0;  ///< input bytes of completed operations
  uint64_t predicted_link_bytes =
      0;  ///< plan::predict of every completed operation, in this rank's packets (Channel::packets)
  uint64_t plans_built = 0;
  uint64_t plans_reused = 0;
  uint64_t scratch_bytes = 0;  ///< high-water mark
  uint64_t residual_bytes = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;

  /// Told when a computation on buffers (encoding a bucket: a millisecond) or the channel's copying to and from sockets
  /// begins and ends. In between, from other threads and one at a time, submit(), send(), receive(), outcome(),
  /// forget() and met_neighbours() may be called, nothing else: whoever submits waits for neither. Must outlive the engine; nullptr: none.
  virtual void set_interlude(Interlude* interlude) = 0;
  /// Threads that share the coding of a bucket under top-k, and what the channel reads of other ranks' memory; must
  /// outlive the engine, and the channel while it is driven. nullptr: none, all is done by the thread that calls progress().
  virtual void set_workers(Workers* workers) = 0;
  virtual Result<OpId> submit(const Operation& operation, Time now) = 0;
  virtual Result<OpId> send(const Transfer& transfer, Time now) = 0;
  virtual Result<OpId> receive(const Transfer& transfer, Time now) = 0;
  /// Moves what can be moved; true when anything did. Appends the operations that ended.
  virtual bool progress(Time now, std::vector<OpId>& ended) = 0;
  [[nodiscard]] virtual Time next_timer() const = 0;
  /// Result of an operation; nullptr while it runs. forget() releases it.
  [[nodiscard]] virtual const Outcome* outcome(OpId id) const = 0;
  virtual void forget(OpId id) = 0;
  /// For messages, while it runs: "barrier 'b' waits for rank 1 (host a), which may wait for others". Who has
  /// not come at all is asked for at the operation's own deadline.
  [[nodiscard]] virtual std::string waiting_for(OpId id) const = 0;
  /// Every rank of this node that the operation receives from has submitted it too, or it has ended. For transfers and
  /// what waits for memory: once it has ended.
  [[nodiscard]] virtual bool met_neighbours(OpId id) const = 0;

  /// A group over `ranks` (world numbering, ascending or not; the order is the group's numbering).
  /// All members create their common groups in the same order. No communication. kWorld always
  /// exists.
  virtual Result<GroupId> create_group(std::span<const Rank> ranks) = 0;
  virtual Status destroy_group(GroupId id) = 0;

  /// Operations of other sizes follow: memory that is kept for the former ones is freed as far as it is idle.
  virtual void trim() = 0;

  /// Residuals of top-k (see codec/residual_store.h). A step is what lies between two calls: commit
  /// makes the step's residuals the current ones, rollback returns every residual to its value
  /// before the step.
  virtual void commit_residuals() = 0;
  virtual void rollback_residuals() = 0;
  /// Of these parameters alone, whatever is under way with others.
  virtual void commit_residuals(std::span<const uint64_t> keys) = 0;
  virtual void rollback_residuals(std::span<const uint64_t> keys) = 0;
  /// Multiplies all residuals (a change of loss scale from a to b: b / a). kInvalidArgument: not finite, or
  /// not above 0.
  virtual Status scale_residuals(double factor) = 0;
  /// Copies one parameter's residual to or from `data` (float32); elements never seen read as 0.
  virtual Status read_residual(uint64_t key, std::span<float> data) const = 0;
  virtual Status write_residual(uint64_t key, std::span<const float> data) = 0;

  /// Ends everything with `why` and tells the other ranks.
  virtual void abort(const Status& why) = 0;
  /// The same with a failure that was met elsewhere (another engine of the same ranks), word for word: whoever is to
  /// blame stands in it, and this rank only passes it on.
  virtual void adopt(const Status& failure) = 0;
  [[nodiscard]] virtual Status health() const = 0;
  /// Why this rank may not submit for a while, as it would go on with its name; must outlive the engine. nullptr: no longer.
  /// Who asks at a deadline for what was not submitted is told so. From any thread.
  virtual void hold(const char* why) = 0;
  /// Orderly end: true once all ranks have said goodbye or the deadline passed; after it a closing
  /// connection is no failure. Operations that run two seconds after the deadline are aborted: nothing is left that
  /// reads or writes a buffer when it says true.
  virtual bool finish(Time now, Time deadline) = 0;
  [[nodiscard]] virtual Statistics statistics() const = 0;
  /// The plan an operation would take, for printing and for the start-up line.
  virtual Result<plan::PlanRequest> request_for(const Operation& operation) const = 0;
};

std::unique_ptr<Engine> make_engine(const EngineOptions& options,
                                    const bootstrap::Topology& topology, wire::Channel& channel);

}  // namespace paceline::engine
