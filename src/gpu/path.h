// Collectives on device memory over nodes, ordered by streams: what include/paceline/cuda.h is a C face of.
//
// Per operation, on its streams (see path_plan.h for the steps):
//
//   out    after the caller's stream: the node's other ranks get their shards by copies; when the node has met for that
//          (given and brought flags) this rank's are added up, by top-k's encoder as it reads them (small shards, large
//          models' dense codecs, or where copies can't be: NCCL's reduce-scatter); per piece: encode into a slot of a small ring
//   copy   per piece: encoding → pinned memory, then the out flag
//   watch  waits for every flag that the host sets, one after the other; the streams that go on then wait for events.
//          Only where the way in is enqueued ahead: with few hardware queues, or several GPUs a node among which NCCL
//          spreads what has come. Else the host waits in its place, and enqueues it when it can run (launcher.h). The
//          copy stream is the out stream then.
//   lane   per piece: after the in flag; pinned memory → device; combine (two hops: encode the sum, copy it out,
//          the sums flag). The own encoding, where it is a cast, is made again before that flag instead of copied. An operation of one piece does without: the gather stream is its lane, and the out stream
//          copies too where nothing else is on its way out.
//   back   two hops, per piece: after the back flag; pinned memory → device; decode
//   gather after all lanes: the shard into a slot that the node's other ranks can read, the done flag; after the node
//          has met (the met flag): the others' shards out of their slots (node_copies.h), the operation's event.
//          Where GPUs can't read each other: NCCL's all-gather after the met flag, for its kernels hold thread blocks
//          while they wait for each other
//
// Reduce-scatter, all-gather and broadcast (collectives.cc) are walks over the same streams that leave steps out. An
// all-reduce by rows (path_rows.cc) has encodings that tell the host how long they are.
//
// Rules, each of which a hang taught. Nothing is queued behind a wait that the wait needs: an operation's way out is
// enqueued before its way in, and its streams' waits depend on earlier ones of the same operation or on earlier
// operations only; so even one hardware queue for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1) runs dry. All memory,
// modules, communicators and streams are there before the first wait. What flags order is ordered by events too, as CUDA's
// manual asks.
//
// The driver holds up all that a device is given after a kernel's first use (its code is loaded, local memory grows) or
// after memory that is given back, until all before has ended, and at other places of the script on every rank. So what a
// rank makes others of its node wait for on their GPUs, and waits itself for them, stands in the script's order on all of
// them: NCCL's kernels, which are enqueued by the call that needs them; and waits of streams for what has yet to come, which
// joins put there, and operations that need memory which is still in use. Else one would stand before such a barrier here and
// behind it, and behind the next reduce-scatter, there: for ever.
//
// One thread at a time submits; the waits for arrival, abort and statistics may come from others.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "device/cuda/codec.h"
#include "device/cuda/images.h"
#include "gpu/device.h"
#include "gpu/flags.h"
#include "gpu/host_rest.h"
#include "gpu/host_ring.h"
#include "gpu/launcher.h"
#include "gpu/node.h"
#include "gpu/node_copies.h"
#include "gpu/node_page.h"
#include "gpu/pass_trial.h"
#include "gpu/path_plan.h"
#include "gpu/pump.h"
#include "gpu/residuals.h"
#include "gpu/table_row.h"
#include "gpu/wire.h"
#include "paceline/cuda.h"

namespace paceline::gpu {

/// Where the functions of the outside come from; tests hand in simulated ones.
struct Drivers {
  const cu::Api* cuda = nullptr;  ///< an empty table where the driver is missing
  Status missing;                 ///< why
  Result<const nc::Api*> (*nccl)(const std::string& library) = nullptr;
  std::span<const device::cuda::Image> images = device::cuda::images();  ///< the device code
  std::function<Result<paceline_comm*>(paceline_comm*)> companion = make_companion;
};

struct PathOptions {
  int device = 0;
  int lanes = 0;             ///< 0: the settings'
  uint64_t piece_bytes = 0;  ///< 0: kPieceBytes
  int wire_threads = 0;      ///< 0: the settings'; the same on all ranks
  std::string nccl_library;
  /// Pinned memory, at least: small models fit a step, and an operation is not cut without need.
  uint64_t least_host_bytes = 32U << 20;
  uint64_t least_slice = kLeastSlice;  ///< of what is cut over several wires; the same on all ranks
  uint64_t usual_in_node = 0;  ///< bytes of an operation in a node of several; 0: kUsualInNode
  uint64_t least_given = 0;    ///< bytes of a shard that copies bring; 0: kLeastGiven
  uint64_t small_model =
      0;  ///< bytes of reserve() up to which copies bring what dense codecs send; 0: kSmallModel
  bool only_prompt = false;  ///< no copies bring anything: there is no memory for them
  /// Whether all of an operation is enqueued when it is submitted, which asks for nothing of the hardware; unset: where
  /// CUDA_DEVICE_MAX_CONNECTIONS gives streams too few queues of their own. It always is where NCCL gathers in the node.
  std::optional<bool> ahead;
  /// How what has come spreads in a node of several GPUs: "auto", "copies" or "nccl"; "": the settings'.
  std::string node_gather;
  std::string
      node_reduce;  ///< how gradients come to who adds them up in it: "auto", "copies" or "nccl"
  bool node_page =
      true;  ///< false: the node meets over the wire alone; all its ranks do where one says so
};

/// Large enough that ten calls of the driver per piece cost nothing beside its time on the wire (0.3 ms at 50 Gb/s as
/// fp16), small enough that the first piece leaves soon.
inline constexpr uint64_t kPieceBytes = 4U << 20;

/// In a node of several GPUs a much larger all-reduce is cut into operations of about so much: NCCL adds up and spreads
/// whole ones, and meanwhile the link should carry others. Each takes the host a fifth of a millisecond, so a bucket that
/// is a little larger stays whole.
inline constexpr uint64_t kUsualInNode = 64U << 20;

/// Shorter shards are NCCL's to add up: its kernels are over before the node's hosts have met.
inline constexpr uint64_t kLeastGiven = 256U << 10;

/// A model of so many bytes of gradients (of reserve()) or less is through on the link, in whatever codec, about when it
/// has computed: what its kernels and its host lose to the path is what a step takes longer.
inline constexpr uint64_t kSmallModel = 256U << 20;

struct AllReduce {
  uint64_t data = 0;
  uint64_t count = 0;
  DType dtype = DType::kFloat32;
  bool average = false;
  int codec = -1;
  double ratio = 0;
  double momentum = 0;
  double factor = 1;  ///< multiplied into every rank's values
  /// Not 0: the buffer has rows of so many elements, of which few are not zero. Only those travel, while that takes fewer
  /// bytes: what the last operation of this name and shape had decides.
  uint64_t row_elements = 0;
  bool prompt = false;  ///< the caller waits for the result: see prompt_piece_bytes()
  std::vector<ResidualRange> segments;
  cu::Stream stream = nullptr;
  std::string name;
};

/// Reduce-scatter: `input` has a block of `count` elements for every rank, `output` is one. All-gather: the other way
/// round; `input` may lie in its place. Broadcast: `output` is the buffer. Blocks are in the order of ranks.
struct Collective {
  PathKind kind = PathKind::kAllGather;
  uint64_t input = 0, output = 0;
  uint64_t count = 0;
  DType dtype = DType::kFloat32;
  bool average = false;  ///< reduce-scatter
  double factor = 1;     ///< reduce-scatter: multiplied into every rank's values
  int codec = 0;         ///< reduce-scatter between the nodes: 0 none, 1 fp16, 2 bf16
  int root = 0;          ///< broadcast
  uint64_t scratch = 0,
           scratch_bytes =
               0;  ///< device memory, the operation's until it ends; see Path::scratch_bytes
  cu::Stream stream = nullptr;
  std::string name;
};

class Path {
 public:
  /// Collective over the communicator's ranks. An error on one is an error on all, naming it.
  static Result<std::unique_ptr<Path>> create(const Drivers& drivers, paceline_comm* comm,
                                              const PathOptions& options);
  ~Path();
  Path(const Path&) = delete;
  Path& operator=(const Path&) = delete;

  Status reserve(uint64_t bytes, uint64_t largest);
  Result<uint64_t> all_reduce(const AllReduce& request);
  Result<uint64_t> collective(const Collective& request);
  /// What `request` needs as scratch, aligned to 256 bytes.
  [[nodiscard]] uint64_t scratch_bytes(const Collective& request) const;
  Status join(uint64_t operation, cu::Stream stream);
  /// The thread that trains has enqueued its optimizer's step behind the last join: it sleeps while its stream will wait for
  /// the network for long (host_rest.h). Ends early where all has arrived; gives the failure where there is one.
  Status rest();
  Status wait_arrival(double timeout_s, bool& finite);
  Status wait_operation(uint64_t operation, double timeout_s, bool& finite);
  uint64_t take_not_finite(std::span<uint64_t> operations) {
    return pump_->take_not_finite(operations);
  }
  [[nodiscard]] bool arrived(uint64_t operation) const;
  Result<drivers::cuda::DevicePtr> gate();
  void abort(const std::string& reason);
  /// The orderly end, or what is left to do after a fault.
  Status destroy();

  Status commit_residuals();
  Status rollback_residuals();
  Status commit_residuals(std::span<const uint64_t> keys);
  Status rollback_residuals(std::span<const uint64_t> keys);
  Status scale_residuals(double factor);
  Status scale_residuals(double factor, std::span<const uint64_t> keys);
  Status read_residual(uint64_t key, std::span<float> data);
  Status write_residual(uint64_t key, std::span<const float> data);
  /// Momentum correction's: 0 where there is none.
  Status read_velocity(uint64_t key, std::span<float> data);
  Status write_velocity(uint64_t key, std::span<const float> data);

  [[nodiscard]] const std::string& describe() const { return description_; }
  [[nodiscard]] paceline_cuda_stats statistics() const;

 private:
  /// Streams, memory and events of a lane.
  struct Lane {
    cu::Stream in = nullptr, back = nullptr;
    // Each is recorded on one stream only: an event may count as passed once a later record of it is, on whatever stream.
    cu::Event in_done = nullptr, back_done = nullptr;
    std::array<cu::Event, 16>
        sums_out{};  ///< ring by the sums flag's value: a sum is in pinned memory
    cu::DevicePtr in_slots = 0, back_slots = 0, sum_slot = 0, state = 0;
    /// Sums up to this flag's value may wait for their parts on `in` itself. (The launcher's; read by who submits.)
    uint32_t ahead_through = 0;
    uint32_t in_numbered = 0,
             back_numbered = 0;  ///< flag values of the last piece that was submitted
  };
  struct OutSlot {
    cu::DevicePtr memory = 0;
    cu::Event encoded = nullptr;
    cu::Event copied = nullptr;  ///< of `copied_`: the last use
    uint32_t flag = 0;           ///< the out flag's value then
  };
  /// What all-reduces by rows of a name and shape have met; the same on all ranks.
  struct RowsMet {
    std::vector<std::shared_ptr<const Operation>> last;  ///< that the last one was cut into
    int dense = 0;                                       ///< turns that still go dense
  };
  /// What one call needs beside its plan.
  struct Job {
    uint64_t data = 0;  ///< all-reduce: the buffer
    /// What is encoded for node n begins at source + n × source_stride, what comes out at target.
    uint64_t source = 0, source_stride = 0, target = 0;
    const Collective* collective = nullptr;  ///< null: an all-reduce
    bool first = true, last = true;          ///< of the operations that a collective is cut into
    uint64_t sequence = 0;
    std::shared_ptr<Operation> operation;
    bool defers = false;  ///< a thread may put it on the streams
    float scale_in = 1, scale_out = 1, momentum = 0;
    bool residuals = false, sum_residuals = false;
    const std::vector<ResidualRange>* segments = nullptr;
    uint64_t segments_first = 0;  ///< element of the segments' concatenation at which `data` begins
    std::vector<cu::Event> copied;  ///< [pieces] ahead
    /// [pieces] The out flag's value when a piece has been copied; and when all has.
    std::vector<uint32_t> out_flags;
    uint32_t out_after = 0;
    cu::Event all_out = nullptr;  ///< not ahead: the way out has no flag; the gather stream waits
    std::vector<uint32_t> in_flags,
        back_flags;  ///< [pieces] the lane's flags' values when it has come
    /// last_in_turn_ when it was submitted: a thread may launch it later.
    uint64_t in_turn_before = 0;
    cu::DevicePtr report = 0;
    /// What the node's ranks have of this rank's shard, by local rank, where the encoder adds it up; else empty.
    std::vector<cu::DevicePtr> parts;
  };

  Path(const Drivers& drivers, paceline_comm* comm, const PathOptions& options);

  // create.cc
  Status prepare();
  Status open_device();
  [[nodiscard]] bool ahead() const;
  [[nodiscard]] bool shares_queues() const;
  Status make_streams();
  Status make_slots();
  Status read_table(const std::vector<TableRow>& rows);
  Status make_companions();
  [[nodiscard]] std::vector<Wire> wires() const;
  [[nodiscard]] Status wires_health() const;
  Status join_node();
  std::string make_page();
  void open_page(std::string_view ticket);
  Status prepare_copies();
  Status open_copies(const std::vector<std::string>& rows);
  Status warm_up();
  Status warm_up_codecs();
  Status warm_up_memory_operations();
  Status warm_up_wire();
  Status agree(const char* stage, const Status& mine);
  Status drain(cu::Stream stream, const char* what, double seconds) const;
  void start();

  // enqueue.cc
  Status enqueue(Job& job, cu::Stream caller);
  Status enqueue_behind(Job& job, cu::Event caller);
  Status enqueue_way_in(Job& job);
  [[nodiscard]] bool has_come(const Job& job, size_t index) const;
  Status await(cu::Stream stream, const uint32_t* flag, uint32_t value, cu::Event after = nullptr);
  Status await_on_device(cu::Stream stream, const uint32_t* flag, uint32_t value,
                         cu::Event after = nullptr);
  Status await_piece(const Job& job, size_t index, Lane& lane);
  Status await_own(const Job& job, size_t index, Lane& lane);
  Status await_theirs(const Job& job, size_t index, Lane& lane);
  Status await_part(const Job& job, size_t index, Lane& lane, const uint32_t* flag, uint32_t value);
  void wait_for_parts();
  [[nodiscard]] bool memory_is_free() const;
  bool goes_ahead(Lane& lane, uint32_t sum);
  Status enqueue_out(Job& job);
  Status add_in_node(Job& job);
  Status enqueue_piece_out(Job& job, size_t index);
  Status enqueue_report(Job& job);
  Status clear_reports(uint64_t sequence);
  Status copy_report(const Job& job, cu::Stream stream);
  [[nodiscard]] bool out_is_idle() const;
  Status enqueue_in(Job& job, size_t index);
  Status enqueue_sum(Job& job, size_t index);
  Status enqueue_back(Job& job, size_t index);
  Status enqueue_end(Job& job);
  Status hand_over(Job& job);
  Status hand_over(Job& job, Residuals& from, std::span<const Span> away);
  Status add_to_gradient(Job& job, uint64_t first, cu::DevicePtr residual, uint64_t elements);
  static device::cuda::EncodeArguments cast_of(const Job& job, Span span, int node,
                                               cu::DevicePtr to);
  Status encode_part(Job& job, Span span, int node, cu::DevicePtr to);
  static std::vector<ResidualRange> ranges_of(const Job& job, Span span);

  // collectives.cc
  Result<uint64_t> collective_checked(const Collective& request);
  Status check_collective(const Collective& request) const;
  PathRequest request_of(const Collective& request) const;
  Result<uint64_t> submit_part(const Collective& request, PathRequest part, uint64_t first);
  Status enqueue_begin(Job& job);
  Status enqueue_moved_out(Job& job, size_t index);
  Status enqueue_moved_in(Job& job, size_t index);
  Status enqueue_spread(Job& job);

  // path_rows.cc
  Result<bool> goes_by_rows(RowsMet& met, PathRequest q);
  RowsMet& rows_met(const AllReduce& request, const PathRequest& q);
  Status encode_rows(const Job& job, const PathPiece& piece, cu::DevicePtr to);
  Status enqueue_rows_in(const Job& job, size_t index, const Lane& lane);
  Status warm_up_rows();

  // path_residuals.cc
  using Multiply = std::function<Status(cu::DevicePtr, uint64_t)>;
  void settle_sums();
  Status ensure_residuals(bool velocity, bool sums);
  Status order_lanes_after_gather();
  Status settle(const char* what, const std::function<Status(Residuals&)>& end);
  Status allocate_residuals(bool velocity, bool of_sums);
  Status scale(double factor, const std::function<Status(Residuals&, const Multiply&)>& all);
  Status multiply(cu::DevicePtr values, uint64_t elements, double factor, cu::Stream stream) const;
  Status multiply_unaligned(cu::DevicePtr values, uint64_t elements, double factor,
                            cu::Stream stream) const;
  Status write_kept(uint64_t key, std::span<const float> data, Residuals::Kind kind);
  /// For so many residuals more than planes have room for, of which all may be of one run.
  Status make_room_for(uint64_t elements);
  Result<Residuals::Memory> make_planes(DeviceObjects& from, uint64_t elements, bool velocity);

  // path.cc
  Result<device::cuda::WireFormat> format_of(const AllReduce& request) const;
  Result<std::shared_ptr<const PathPlan>> plan_for(const PathRequest& request);
  /// `kind` and `name` of the operation, for the message.
  Status refuse_capture(cu::Stream stream, PathKind kind, const std::string& name) const;
  /// How many of `request.count` elements go in one operation, for the sake of the node's ranks; all, as a rule.
  [[nodiscard]] uint64_t count_in_node(const PathRequest& request) const;
  /// How many of `request.count` elements fit the pinned memory in one operation.
  Result<uint64_t> count_that_fits(PathRequest request);
  Job make_job(const std::shared_ptr<const PathPlan>& plan, const std::string& name);
  Result<uint64_t> launch(Job& job, cu::Stream caller);
  void number_pieces(Job& job);
  void launch_later(const Job& job);
  Status enqueue_later(const Job& job, cu::Stream caller);
  static Status named(const Operation& o, const Status& status);
  void settle_out();
  void settle_launches();
  bool end_of_pass_waits();
  [[nodiscard]] uint64_t last_ones(uint64_t operation) const;
  [[nodiscard]] bool wants_copies(device::cuda::WireCodec codec) const;
  Status wait_finished(uint64_t operation, Time began, double timeout_s, bool finite) const;
  [[nodiscard]] bool launches_later() const { return launcher_ != nullptr; }
  /// q: of the part that begins at element `first`.
  Result<std::shared_ptr<const Operation>> submit(const AllReduce& request, const PathRequest& q,
                                                  uint64_t first);
  Status usable(const char* what);
  /// What can't be the caller's mistake ends the path on all ranks: the others would wait for this one.
  Status ended_by(Status status);
  Status reserve_memory(uint64_t bytes, uint64_t largest);
  Result<uint64_t> all_reduce_checked(const AllReduce& request);
  Status check_gpu();
  void on_failure(const Status& why);
  Status give_up(const Status& why);
  void tell(const Status& why) const;
  Status end_companions(bool orderly);
  Status end_copies(bool orderly);

  Drivers drivers_;
  const cu::Api& api_;
  const nc::Api* nccl_ = nullptr;
  paceline_comm* comm_;
  Wire wire_;  ///< the first: `comm_`
  std::vector<Wire> companions_;
  int wire_threads_ = 1;
  PathOptions options_;
  paceline_identity me_{};
  PathShape shape_;
  std::vector<int> peers_;                   ///< [nodes] ranks of this local rank
  int node_root_ = 0;                        ///< this node's rank of local rank 0
  std::vector<std::pair<int, int>> places_;  ///< [ranks] node and local rank
  bool in_node_order_ = true;                ///< rank = node × local size + local rank
  std::string description_;
  std::string no_copies_;                                            ///< why not
  device::cuda::WireCodec codec_ = device::cuda::WireCodec::kExact;  ///< the settings'
  double ratio_ = 0.01, gradient_scale_ = 1, momentum_ = 0;
  bool fp16_values_ = false;
  uint64_t topk_threshold_ = 0;

  cu::Device device_ = 0;
  cu::Context context_ = nullptr;
  std::unique_ptr<device::cuda::Kernels> kernels_;
  DeviceObjects objects_;                    ///< from create() to the end
  std::unique_ptr<DeviceObjects> reserved_;  ///< the last reserve()'s
  std::unique_ptr<DeviceObjects> residual_memory_;
  mutable std::mutex memory_mutex_;          ///< of these three, whose sizes other threads ask for
  static constexpr double kEndSeconds = 10;  ///< for what is under way to end
  static constexpr uint64_t kHandOverElements = 1U << 20;  ///< at a time
  std::array<cu::DevicePtr, 3> hand_over_memory_{};
  std::array<cu::DevicePtr, 2> few_elements_{};  ///< of what is not aligned: for out_, for gather_
  std::shared_ptr<Node> node_;
  std::unique_ptr<NodeCopies> copies_;  ///< null: NCCL gathers
  std::unique_ptr<NodePage> page_;      ///< null: the node meets over the wire alone
  std::unique_ptr<Pump> pump_;
  std::unique_ptr<Launcher> launcher_;        ///< null: all is enqueued ahead
  std::unique_ptr<Launcher> writer_;          ///< of ways out; null as that one
  uint64_t deferred_ = 0;                     ///< the last operation that it was given
  std::unique_ptr<Residuals> residuals_;      ///< of what this rank encodes of its own
  std::unique_ptr<Residuals> sum_residuals_;  ///< two hops: of the sums

  cu::Stream out_ = nullptr, copy_ = nullptr, gather_ = nullptr, watch_ = nullptr;
  cu::Event passed_ = nullptr, caller_ = nullptr, all_out_ = nullptr, all_copied_ = nullptr,
            committed_ = nullptr;
  std::vector<cu::Event> copied_;  ///< ring: a piece is in pinned memory
  size_t next_copied_ = 0;
  std::vector<OutSlot> out_slots_;
  std::vector<Lane> lanes_;            ///< the last is the gather stream itself
  cu::Event beside_ = nullptr;         ///< of `copied_`: the last copy on the out stream
  uint32_t beside_flag_ = 0;           ///< the out flag's value then
  ByMeeting<uint32_t> node_groups_{};  ///< of the wire: this node's ranks
  std::vector<cu::Event> ends_;        ///< ring: operation s records ends_[s % size]
  std::vector<cu::Event>
      begins_;  ///< the same, on the caller's stream, where the way out is put on the streams later
  std::vector<cu::Event> outs_;  ///< the same for Job::all_out
  cu::DevicePtr out_state_ = 0;  ///< top-k's scratch on the out stream
  uint64_t out_state_bytes_ = 0;
  cu::DevicePtr reports_ = 0;  ///< ring of report words
  uint64_t slot_bytes_ = 0;    ///< of one encoding of a whole piece
  Flags flags_;
  std::byte* host_ = nullptr;
  HostRing ring_;
  uint64_t reserved_bytes_ = 0;
  uint64_t spare_residuals_ = 0;  ///< elements beyond a step's shards, for those that were loaded

  std::atomic<uint64_t> submitted_{0};
  uint32_t out_issued_ = 0;          ///< by whom ways out are put on the streams
  uint32_t out_numbered_ = 0;        ///< the same, when all that was submitted is
  std::vector<uint32_t> out_after_;  ///< ring like ends_: out_issued_ behind operation s
  uint32_t awaited_ = 0;             ///< the last operation whose memory the way out waits for
  uint64_t joined_ = 0;              ///< the last operation that a stream has joined
  PassTrial join_trial_;    ///< of end_of_pass_waits(); with memory_mutex_, for statistics()
  Time joined_at_ = 0;      ///< when that join ended
  uint64_t last_pass_ = 0;  ///< operations of the last join of many
  Time lead_ =
      3 *
      kMillisecond;  ///< what the host needs from there until the optimizer's step is on its stream
  HostRest host_rest_;
  uint64_t rested_for_ = 0;  ///< the operation that rest() was last called behind
  uint64_t last_in_turn_ =
      0;  ///< the last operation whose pieces go over lanes when it is its turn
  size_t next_slot_ = 0;
  std::vector<std::shared_ptr<const PathPlan>> plans_;
  std::map<std::string, RowsMet> rows_met_;
  std::mutex failing_;
  std::mutex sums_books_;  ///< of sum_residuals_: the launcher's too
  std::mutex ahead_;       ///< either a part goes ahead or the way out begins to wait for memory
  bool destroyed_ = false;
  pid_t pid_ = 0;
};

}  // namespace paceline::gpu
