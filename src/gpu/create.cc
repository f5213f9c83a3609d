// The path's beginning: everything that allocates, loads or meets others happens here, before the first wait.
//
// Each stage ends with an exchange, so that a rank that can't go on ends the creation everywhere, by name, instead of
// leaving the others in a collective that it never joins.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <thread>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/cores.h"
#include "base/log.h"
#include "drivers/cuda/loader.h"
#include "gpu/path.h"

namespace paceline::gpu {
namespace {

using device::cuda::WireCodec;

constexpr size_t kRowBytes = 1024;  // of the exchange of a stage
constexpr size_t kOutSlots = 4;     // encodings between the encoder and the copy engine
constexpr size_t kEnds = 256;       // operations that can be joined each by its own event
constexpr size_t kPieceEvents = 128;
constexpr double kDrainSeconds = 60;
constexpr uint32_t kWarmTag = 1000;
constexpr int kFewQueues = 8;
constexpr size_t kReasonBytes = 256;
constexpr double kHaltSeconds = 1;
constexpr Time kHear = 200 * kMillisecond;

double number(const char* name, double otherwise) {
  const auto text = setting(name);
  return text.empty() ? otherwise : std::strtod(text.c_str(), nullptr);
}

WireCodec codec_of(const std::string& name) {
  return name == "fp16"   ? WireCodec::kFp16
         : name == "bf16" ? WireCodec::kBf16
         : name == "topk" ? WireCodec::kTopK
         : name == "int8" ? WireCodec::kInt8
                          : WireCodec::kExact;
}

std::string threads_text(int asked) { return asked == 0 ? "auto" : std::to_string(asked); }

/// The caller's device is the current one again afterwards, where it had one (and there is a driver to ask).
class SameContext {
 public:
  explicit SameContext(const cu::Api* api) : api_(api) {
    if (api_->ctx_get_current == nullptr || api_->ctx_get_current(&before_) != 0) before_ = nullptr;
  }
  ~SameContext() {
    if (before_ != nullptr) api_->ctx_set_current(before_);
  }
  SameContext(const SameContext&) = delete;
  SameContext& operator=(const SameContext&) = delete;

 private:
  const cu::Api* api_;
  cu::Context before_ = nullptr;
};

}  // namespace

Path::Path(const Drivers& drivers, paceline_comm* comm, const PathOptions& options)
    : drivers_(drivers),
      api_(*drivers.cuda),
      comm_(comm),
      wire_(comm),
      options_(options),
      objects_(api_),
      pid_(getpid()) {}

Result<std::unique_ptr<Path>> Path::create(const Drivers& drivers, paceline_comm* comm,
                                           const PathOptions& options) {
  const SameContext same(drivers.cuda);
  std::unique_ptr<Path> path(new Path(drivers, comm, options));
  PACELINE_ASSIGN(path->me_, path->wire_.identity());
  if (path->me_.node_count < 2) {
    return Status(
        Code::kUnsupported,
        "all ranks share one node: NCCL alone is the best path there, and Paceline leaves "
        "gradients to it");
  }
  PACELINE_RETURN_IF_ERROR(path->agree("preparing", path->prepare()));
  // From here on ranks wait for each other inside NCCL as well: who fails must end those who wait there.
  auto status = path->make_companions();
  if (status) status = path->join_node();
  if (status) status = path->make_streams();
  if (status) status = path->warm_up();
  if (!status) return path->give_up(status);
  PACELINE_RETURN_IF_ERROR(path->agree("warming up", status));
  path->start();
  return path;
}

/// Everybody's status; the first stage also brings who is where.
Status Path::agree(const char* stage, const Status& mine) {
  const TableRow row{static_cast<int>(mine.code()),
                     me_.node,
                     me_.local_rank,
                     me_.local_size,
                     options_.lanes,
                     options_.piece_bytes,
                     options_.wire_threads,
                     wire_threads_,
                     mine.message()};
  auto gathered = wire_.gather(row.text(kRowBytes), kRowBytes, "path for CUDA tensors");
  if (!mine) return mine;
  PACELINE_RETURN_IF_ERROR(gathered.status());
  std::vector<TableRow> rows;
  for (size_t r = 0; r < gathered->size(); ++r) {
    auto read = TableRow::parse((*gathered)[r]);
    if (!read)
      return {read.status().code(), fmt::format("rank {}: {}", r, read.status().message())};
    if (read->code != 0)
      return {static_cast<Code>(read->code),
              fmt::format("rank {} can't use the path for CUDA tensors ({}): {}", r, stage,
                          read->message)};
    rows.push_back(std::move(*read));
  }
  if (peers_.empty()) return read_table(rows);
  return Status::ok();
}

/// Ends the creation on all ranks, with one code: by that of a lost rank they know that none of them can go on in another
/// way, as the lost one would not come; by any other that they can, without the path. An error of NCCL's may be the first
/// that is heard of a lost rank: the wires name it a moment later.
Status Path::give_up(const Status& why) {
  const auto now = [] { return SteadyClock().now(); };
  Status met = wires_health();
  for (const Time until = now() + kHear; met && now() < until; met = wires_health())
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  if (met) wire_.abort(why);
  on_failure(met ? why : met);
  return met ? why : met;
}

Status Path::read_table(const std::vector<TableRow>& rows) {
  PACELINE_RETURN_IF_ERROR(check_places(rows, me_.node_count, me_.local_size));
  peers_.assign(static_cast<size_t>(me_.node_count), -1);
  for (size_t r = 0; r < rows.size(); ++r) {
    const TableRow& row = rows[r];
    if (row.lanes != options_.lanes || row.piece_bytes != options_.piece_bytes) {
      return {Code::kMismatch,
              fmt::format("rank {} has {} lanes and pieces of {} bytes, this rank {} and {}: they "
                          "must be the same (PACELINE_LANES)",
                          r, row.lanes, row.piece_bytes, options_.lanes, options_.piece_bytes)};
    }
    if (row.asked_threads != options_.wire_threads)
      return {Code::kMismatch,
              fmt::format("PACELINE_WIRE_THREADS is {} on rank {} and {} on this rank: give all "
                          "ranks the same",
                          threads_text(row.asked_threads), r, threads_text(options_.wire_threads))};
    wire_threads_ = std::min(wire_threads_, std::max(row.wire_threads, 1));
    places_.emplace_back(row.node, row.local_rank);
    in_node_order_ =
        in_node_order_ && static_cast<int>(r) == row.node * row.local_size + row.local_rank;
    if (row.local_rank == me_.local_rank)
      peers_[static_cast<size_t>(row.node)] = static_cast<int>(r);
    if (row.local_rank == 0 && row.node == me_.node) node_root_ = static_cast<int>(r);
  }
  return Status::ok();
}

Status Path::prepare() {
  PACELINE_RETURN_IF_ERROR(drivers_.missing);
  log::set_level(log::level_named(setting("log_level")));  // this library has a log of its own
  codec_ = codec_of(setting("codec"));
  ratio_ = number("topk_ratio", 0.01);
  fp16_values_ = setting("topk_fp16") == "1";
  momentum_ = number("topk_momentum", 0);
  gradient_scale_ = number("gradient_scale", 1);
  topk_threshold_ = static_cast<uint64_t>(number("topk_threshold", 0));
  if (options_.lanes == 0) options_.lanes = static_cast<int>(number("lanes", 1));
  if (options_.piece_bytes == 0) options_.piece_bytes = kPieceBytes;
  if (options_.usual_in_node == 0) options_.usual_in_node = kUsualInNode;
  if (options_.wire_threads == 0)
    options_.wire_threads = std::atoi(setting("wire_threads").c_str());  // auto: 0
  if (options_.wire_threads > kMostWires)
    return {Code::kInvalidArgument, fmt::format("{} threads on the wire; 1 to {} can be",
                                                options_.wire_threads, kMostWires)};
  wire_threads_ = options_.wire_threads > 0
                      ? options_.wire_threads
                      : fitting_wires(std::max(me_.local_size, me_.job_local_size), usable_cores());
  shape_ = {me_.node_count, me_.local_size, me_.node, me_.local_rank};
  PathRequest probe;
  probe.shape = shape_;
  probe.lanes = options_.lanes;
  probe.piece_bytes = options_.piece_bytes;
  PACELINE_RETURN_IF_ERROR(build_path(probe).status());
  PACELINE_RETURN_IF_ERROR(open_device());
  if (shape_.local_size > 1) {
    PACELINE_ASSIGN(nccl_, drivers_.nccl(options_.nccl_library));
    node_ = std::make_shared<Node>(*nccl_, shape_.local_size, shape_.local_rank,
                                   static_cast<int>(number("node_ctas", kNodeCtas)));
    PACELINE_RETURN_IF_ERROR(prepare_copies());
  }
  return make_slots();
}

/// Room for what count_in_node() leaves whole.
Status Path::prepare_copies() {
  if (options_.node_gather.empty()) options_.node_gather = setting("node_gather");
  if (options_.node_reduce.empty()) options_.node_reduce = setting("node_reduce");
  if (options_.least_given == 0) options_.least_given = kLeastGiven;
  if (options_.small_model == 0) options_.small_model = kSmallModel;
  if (options_.node_gather == "nccl") return Status::ok();
  auto copies = std::make_unique<NodeCopies>(api_, shape_.local_size, shape_.local_rank);
  const uint64_t most = options_.usual_in_node * 3 / 2;
  // Streams that share hardware queues would hold up the model behind a wait for the node (see ahead()).
  const bool lands = options_.node_reduce != "nccl" && !options_.only_prompt && !shares_queues();
  auto status = copies->prepare(
      most / static_cast<uint64_t>(shape_.local_size) + kPieceGranule * sizeof(float), lands);
  if (status) {
    copies_ = std::move(copies);
  } else if (options_.node_gather == "copies" || status.code() == Code::kResourceExhausted) {
    return status;
  } else {
    no_copies_ = status.message();
  }
  return Status::ok();
}

/// rows: of all ranks, what each has prepared. By copies only where all ranks can.
Status Path::open_copies(const std::vector<std::string>& rows) {
  if (options_.node_gather == "nccl") return Status::ok();
  std::vector<cu::IpcMemHandle> handles(static_cast<size_t>(shape_.local_size));
  Status status;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (places_[r].first != me_.node) continue;
    std::memcpy(&handles[static_cast<size_t>(places_[r].second)], rows[r].data(),
                sizeof(cu::IpcMemHandle));
  }
  if (copies_) status = copies_->open(handles);
  const std::string reason = copies_ ? std::string(status.message()) : no_copies_;
  const char lands = copies_ && copies_->lands() ? '+' : '-';
  PACELINE_ASSIGN(auto answers,
                  wire_.gather(lands + std::string(shortened(reason, kReasonBytes - 2)),
                               kReasonBytes, "whether GPUs of a node can read each other"));
  bool all_land = true;
  for (size_t r = 0; r < answers.size(); ++r) {
    all_land = all_land && answers[r][0] == '+';
    const char* told = answers[r].c_str() + 1;
    if (no_copies_.empty() && *told != '\0') no_copies_ = fmt::format("rank {}: {}", r, told);
  }
  if (no_copies_.empty()) {
    copies_->land(all_land);
    return Status::ok();
  }
  if (copies_) copies_->close();
  copies_ = nullptr;
  if (options_.node_gather == "auto") return Status::ok();
  return {Code::kUnsupported,
          fmt::format("PACELINE_NODE_GATHER=copies can't be: {}; leave it at auto, and NCCL "
                      "gathers",
                      no_copies_)};
}

Status Path::open_device() {
  PACELINE_RETURN_IF_ERROR(cu::check_device(api_, options_.device));
  PACELINE_CUDA_CALL(api_, device_get, &device_, options_.device);
  PACELINE_CUDA_CALL(api_, device_primary_ctx_retain, &context_, device_);
  PACELINE_CUDA_CALL(api_, ctx_set_current, context_);
  PACELINE_ASSIGN(auto kernels, device::cuda::Kernels::load(api_, device_, drivers_.images));
  kernels_ = std::make_unique<device::cuda::Kernels>(std::move(kernels));
  return Status::ok();
}

Status Path::make_streams() {
  PACELINE_ASSIGN(out_, objects_.stream());
  if (ahead()) {
    PACELINE_ASSIGN(copy_, objects_.stream());
  } else {
    copy_ = out_;
  }
  PACELINE_ASSIGN(gather_, objects_.stream());
  PACELINE_ASSIGN(watch_, objects_.stream());
  PACELINE_ASSIGN(passed_, objects_.event());
  PACELINE_ASSIGN(caller_, objects_.event());
  lanes_.back().in = gather_;
  for (auto& lane : std::span(lanes_).first(lanes_.size() - 1)) {
    PACELINE_ASSIGN(lane.in, objects_.stream());
    if (shape_.nodes > 2) {
      PACELINE_ASSIGN(lane.back, objects_.stream());
    }
    for (auto& e : std::span(lane.sums_out).first(shape_.nodes > 2 ? lane.sums_out.size() : 0)) {
      PACELINE_ASSIGN(e, objects_.event());
    }
    PACELINE_ASSIGN(lane.in_done, objects_.event());
    PACELINE_ASSIGN(lane.back_done, objects_.event());
  }
  PACELINE_ASSIGN(all_out_, objects_.event());
  PACELINE_ASSIGN(all_copied_, objects_.event());
  PACELINE_ASSIGN(committed_, objects_.event());
  copied_.resize(kPieceEvents);
  for (auto& e : copied_) {
    PACELINE_ASSIGN(e, objects_.event());
  }
  ends_.resize(kEnds);
  for (auto& e : ends_) {
    PACELINE_ASSIGN(e, objects_.event());
  }
  begins_.resize(ahead() ? 0 : kEnds);
  for (auto& e : begins_) {
    PACELINE_ASSIGN(e, objects_.event());
  }
  out_after_.resize(kEnds);
  outs_.resize(ahead() ? 0 : kEnds);
  for (auto& e : outs_) {
    PACELINE_ASSIGN(e, objects_.event());
  }
  residuals_ = std::make_unique<Residuals>(api_, out_);
  sum_residuals_ = std::make_unique<Residuals>(api_, gather_);
  return Status::ok();
}

/// Whether the way in is enqueued with the way out, and so in the order of the script's calls, on all ranks alike.
///
/// It is where NCCL gathers, whose kernels wait for each other (path.h): a launcher would have to catch up with every call.
/// And where streams share few hardware queues, what waits in one of them would hold up what it waits for.
bool Path::ahead() const {
  return (shape_.local_size > 1 && copies_ == nullptr) || shares_queues();
}

bool Path::shares_queues() const {
  if (options_.ahead) return *options_.ahead;
  const char* text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return text != nullptr && std::atoi(text) < kFewQueues;
}

Status Path::make_slots() {
  PathRequest widest;
  widest.shape = shape_;
  widest.piece_bytes = options_.piece_bytes;
  const auto nodes = static_cast<uint64_t>(shape_.nodes);
  // The parts of two hops are rounded up, each. (The least piece is longer than piece_bytes may be.)
  slot_bytes_ = std::max(options_.piece_bytes, kPieceGranule * sizeof(float)) * 17 / 16 +
                2 * kPieceGranule + nodes * (kPartGranule * sizeof(float) + 2 * kHostAlign);
  slot_bytes_ = (slot_bytes_ + kHostAlign - 1) / kHostAlign * kHostAlign;
  // By rows it takes a byte a row of a piece, which has 16 at least.
  out_state_bytes_ = std::max(most_selection_bytes(widest), slot_bytes_ / 16);
  out_slots_.resize(kOutSlots);
  for (auto& s : out_slots_) {
    PACELINE_ASSIGN(s.memory, objects_.memory(slot_bytes_, "encodings on their way out"));
    PACELINE_ASSIGN(s.encoded, objects_.event());
  }
  PACELINE_ASSIGN(out_state_, objects_.memory(out_state_bytes_, "the selection of top-k"));
  PACELINE_ASSIGN(reports_, objects_.memory(kEnds * sizeof(uint32_t), "reports"));
  lanes_.resize(static_cast<size_t>(options_.lanes) + 1);
  for (auto& lane : lanes_) {
    PACELINE_ASSIGN(lane.in_slots, objects_.memory(nodes * slot_bytes_, "encodings that come in"));
    if (shape_.nodes == 2 || &lane == &lanes_.back()) continue;
    PACELINE_ASSIGN(lane.sum_slot, objects_.memory(slot_bytes_, "encoded sums"));
    PACELINE_ASSIGN(lane.back_slots, objects_.memory(2 * slot_bytes_, "sums that come in"));
  }
  const int lanes = options_.lanes + 1;
  const size_t bytes = Flags::bytes(lanes);
  PACELINE_ASSIGN(auto* memory, objects_.pinned(bytes, "flags"));
  std::memset(memory, 0, bytes);
  flags_ = Flags(memory, shape_.local_size > 1);
  return Status::ok();
}

/// Blocks until the stream is done or the job has failed, at most so long: stream_synchronize on a GPU that hangs would
/// not end.
Status Path::drain(cu::Stream stream, const char* what, double seconds) const {
  const Time until = after(SteadyClock().now(), to_time(seconds));
  for (;;) {
    const auto error = api_.stream_query(stream);
    if (error == 0) return Status::ok();
    if (error != cu::kNotReady) return cu::explain(api_, error, what);
    if (auto status = wires_health(); !status && !destroyed_) return status;
    if (SteadyClock().now() > until)
      return {Code::kTimeout,
              fmt::format("rank {}: {}: the GPU has not finished within {:g} s; it is busy with "
                          "something else, or hangs (nvidia-smi shows which)",
                          me_.rank, what, seconds)};
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

Status Path::make_companions() {
  for (int i = 1; i < wire_threads_; ++i) {
    PACELINE_ASSIGN(auto* made, drivers_.companion(comm_));
    companions_.emplace_back(made);
  }
  return Status::ok();
}

/// The ticket of the node's page: the first rank's, of no use where there is none.
std::string Path::make_page() {
  std::string none(NodePage::kTicketBytes, '\0');
  if (me_.local_rank != 0 || !options_.node_page) return none;
  auto made = NodePage::make(shape_.local_size);
  if (!made) {
    log::info("the node meets over the wire: {}", made.status().message());
    return none;
  }
  page_ = std::make_unique<NodePage>(std::move(*made));
  return page_->ticket();
}

/// A rank of the node that can't open it never moves its word there: the others then meet over the wire alone.
void Path::open_page(std::string_view ticket) {
  if (me_.local_rank == 0 || !options_.node_page) return;
  auto opened = NodePage::open(ticket, shape_.local_size);
  if (opened)
    page_ = std::make_unique<NodePage>(std::move(*opened));
  else
    log::info("the node meets over the wire: {}", opened.status().message());
}

Status Path::join_node() {
  if (!node_) return Status::ok();
  std::vector<int> ranks(static_cast<size_t>(shape_.local_size));
  for (size_t r = 0; r < places_.size(); ++r) {
    if (places_[r].first == me_.node)
      ranks[static_cast<size_t>(places_[r].second)] = static_cast<int>(r);
  }
  for (auto& group : node_groups_) {
    PACELINE_ASSIGN(group, wire_.group(ranks));
  }
  NodeIds ids;
  if (me_.local_rank == 0) {
    PACELINE_ASSIGN(ids, Node::make_ids(*nccl_));
  }
  const cu::IpcMemHandle own = copies_ ? copies_->handle() : cu::IpcMemHandle{};
  std::string mine(reinterpret_cast<const char*>(&own), sizeof own);
  mine.append(reinterpret_cast<const char*>(&ids), sizeof ids);
  mine.append(make_page());
  PACELINE_ASSIGN(auto rows, wire_.gather(mine, mine.size(), "NCCL's identities"));
  std::memcpy(&ids, rows[static_cast<size_t>(node_root_)].data() + sizeof own, sizeof ids);
  open_page(
      std::string_view(rows[static_cast<size_t>(node_root_)]).substr(sizeof own + sizeof ids));
  PACELINE_RETURN_IF_ERROR(open_copies(rows));
  // NCCL has no deadline: a thread of its own waits, and is left behind if another rank fails meanwhile.
  struct Joining {
    std::promise<void> begun;
    std::promise<Status> done;
  };
  auto joining = std::make_shared<Joining>();
  auto joined = joining->done.get_future();
  std::thread([node = node_, joining, ids, api = &api_, context = context_] {
    api->ctx_set_current(context);
    joining->begun.set_value();
    joining->done.set_value(node->join(ids));
  }).detach();
  joining->begun.get_future().wait();  // what it uses of this path it has used
  while (joined.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
    if (auto status = wire_.health(); !status) return status;
  }
  return joined.get();
}

Status Path::warm_up() {
  PACELINE_RETURN_IF_ERROR(warm_up_memory_operations());
  PACELINE_CUDA_CALL(api_, memset_d8_async, reports_, 0, kEnds * sizeof(uint32_t), out_);
  PACELINE_RETURN_IF_ERROR(warm_up_codecs());
  if (node_) {
    PACELINE_CUDA_CALL(api_, memset_d8_async, out_slots_[0].memory, 0, slot_bytes_, out_);
    PACELINE_RETURN_IF_ERROR(node_->warm_up(out_slots_[0].memory, slot_bytes_, out_));
    PACELINE_RETURN_IF_ERROR(drain(out_, "the first collectives in the node", kDrainSeconds));
  }
  return warm_up_wire();
}

Status Path::warm_up_memory_operations() {
  // The stream waits for a flag that it has written itself: nobody else is needed.
  const auto flag = Flags::address(flags_.out());
  const char* const what = "stream memory operations (cuStreamWriteValue32, cuStreamWaitValue32)";
  if (auto error = api_.stream_write_value32(out_, flag, 1, 0); error != 0)
    return cu::explain(api_, error, what);
  if (auto error = api_.stream_wait_value32(out_, flag, 1, cu::kWaitValueGeq); error != 0)
    return cu::explain(api_, error, what);
  PACELINE_RETURN_IF_ERROR(drain(out_, what, kDrainSeconds));
  if (Flags::load(flags_.out()) != 1)
    return {Code::kUnsupported, fmt::format("{}: the host does not see what a stream wrote", what)};
  Flags::store(flags_.out(), 0);
  return Status::ok();
}

Status Path::warm_up_codecs() {
  constexpr uint64_t kElements = 4096;
  const auto& slot = out_slots_[0];
  const auto data = lanes_[0].in_slots;
  PACELINE_CUDA_CALL(api_, memset_d8_async, data, 0, kElements * sizeof(float), out_);
  for (auto codec : {WireCodec::kExact, WireCodec::kFp16, WireCodec::kBf16, WireCodec::kTopK,
                     WireCodec::kInt8}) {
    for (auto dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      device::cuda::WireFormat format;
      format.codec = codec;
      format.dtype = dtype;
      device::cuda::EncodeArguments e;
      e.gradient = data;
      e.elements = kElements;
      e.encoded = slot.memory;
      e.state = out_state_;
      e.state_capacity = out_state_bytes_;
      PACELINE_RETURN_IF_ERROR(kernels_->encode(format, e, out_));
      if (codec == WireCodec::kTopK) {
        e.addends = {&data, 1};
        PACELINE_RETURN_IF_ERROR(kernels_->encode(format, e, out_));
      }
      device::cuda::CombineArguments c;
      c.encoded = {&slot.memory, 1};
      c.elements = kElements;
      c.output = data;
      PACELINE_RETURN_IF_ERROR(kernels_->combine(format, c, out_));
    }
  }
  PACELINE_RETURN_IF_ERROR(warm_up_rows());
  return drain(out_, "the first kernels", kDrainSeconds);
}

/// Connections to the ranks that this one will talk to open on their first use.
Status Path::warm_up_wire() {
  std::vector<uint64_t> words(peers_.size());
  uint64_t mine = 1;
  Status status;
  for (const auto& wire : wires()) {
    std::vector<paceline_op> ops;
    for (size_t n = 0; n < peers_.size(); ++n) {
      if (peers_[n] == me_.rank) continue;
      PACELINE_ASSIGN(auto in,
                      wire.receive(peers_[n], kWarmTag, &words[n], sizeof(uint64_t), "hello"));
      PACELINE_ASSIGN(auto out, wire.send(peers_[n], kWarmTag, &mine, sizeof(uint64_t), "hello"));
      ops.push_back(in);
      ops.push_back(out);
    }
    for (auto op : ops) {
      if (auto s = wire.wait(op); !s && status) status = s;
    }
  }
  return status;
}

void Path::start() {
  if (page_ && me_.local_rank == 0) page_->settled();  // all have warmed up, and so opened it
  Pump::Options o;
  o.flags = flags_;
  o.lanes = options_.lanes + 1;
  o.node = shape_.node;
  o.node_groups = node_groups_;
  o.page = page_.get();
  o.local_rank = shape_.local_rank;
  o.local_size = shape_.local_size;
  o.shares_link = std::atof(setting("link_rate").c_str()) > 0;
  o.peers = peers_;
  o.check = [this] { return check_gpu(); };
  o.tell = [this](const Status& why) {
    tell(why);
    // Who hears of the failure may free what the launcher would still write to.
    for (auto* thread : {launcher_.get(), writer_.get()}) {
      if (thread != nullptr) thread->halt(kHaltSeconds);
    }
  };
  o.failed = [this](const Status&) {
    if (node_) node_->abort();
  };
  o.enter = [this] {
    api_.ctx_set_current(context_);
    // This thread asks streams how they are while the caller may be capturing a graph of its own: that is none of its
    // business, and must not end the capture.
    int mode = cu::kCaptureModeRelaxed;
    api_.thread_exchange_stream_capture_mode(&mode);
  };
  o.least_slice = options_.least_slice;
  if (!ahead()) {
    Launcher::Options l;
    l.enter = o.enter;
    l.failed = [this](const Status& why) { pump_->fail(why); };
    launcher_ = std::make_unique<Launcher>(l);
    writer_ = std::make_unique<Launcher>(std::move(l));
  }
  pump_ = std::make_unique<Pump>(wires(), std::move(o));
  PathRequest q;
  q.shape = shape_;
  q.format.codec = codec_;
  q.lanes = options_.lanes;
  q.piece_bytes = options_.piece_bytes;
  description_ = fmt::format(
      "{} nodes × {} GPUs: {}{} between nodes, pieces of {}, {} lane{}{}", shape_.nodes,
      shape_.local_size,
      shape_.local_size == 1 ? ""
      : copies_              ? "NCCL and copies in the node, "
      : no_copies_.empty()   ? "NCCL in the node, "
                             : fmt::format("NCCL in the node (no copies: {}), ", no_copies_),
      codec_name(codec_), bytes_text(options_.piece_bytes), options_.lanes,
      options_.lanes == 1 ? "" : "s",
      wire_threads_ == 1 ? "" : fmt::format(", {} threads on the wire", wire_threads_));
}

}  // namespace paceline::gpu
