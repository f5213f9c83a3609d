#include "gpu/path.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "drivers/cuda/loader.h"

namespace paceline::gpu {
namespace {

using device::cuda::WireCodec;

// Plans that are kept: a model has tens of buckets.
constexpr size_t kPlansKept = 1024;
// A join of many operations may wait for the GPU to get to the last ones of them (pass_trial.h): their waits may be put on
// streams, for they slow down little that is left to compute, and meanwhile the host is ahead by what follows, an optimizer's
// step and the beginning of the next forward pass. With such waits a GPU starts every kernel later (launcher.h), so a model of
// many kernels wants the host to wait; a host that is the slower of the two, which has yet to launch the optimizer and a forward
// pass of many small layers while the GPU is busy, loses what it waits. In any case it goes on early enough to have the
// optimizer's step on its stream when the gradients are there: by when operations of the last pass were out.
constexpr uint64_t kLastOnes = 2;
constexpr Time kMostLead = 8 * kMillisecond;
// For so long the host looks for the end of what the GPU does with the last piece.
constexpr Time kLook = 300 * kMicrosecond;

/// Where the residuals of a call without segments are kept. Not by the operation's name: where the caller gives none it is
/// new in every step, and what a call is cut into would have one each.
uint64_t key_of(const AllReduce& r) {
  if (!r.name.empty()) return std::hash<std::string>()(r.name);
  return std::hash<std::string>()(fmt::format("all-reduce without a name of {} elements", r.count));
}

}  // namespace

Status Path::usable(const char* what) {
  if (pump_ == nullptr) return {Code::kInternal, "the path for CUDA tensors was not created"};
  if (destroyed_) return {Code::kInvalidArgument, fmt::format("{}: the path was destroyed", what)};
  return pump_->failure();
}

Status Path::ended_by(Status status) {
  const auto code = status.code();
  if (code == Code::kOk || code == Code::kInvalidArgument || code == Code::kUnsupported)
    return status;
  pump_->fail(status);
  return pump_->failure();  // an earlier one may have been the cause
}

// --- Memory -----------------------------------------------------------------------------------------------------

Status Path::reserve(uint64_t bytes, uint64_t largest) {
  PACELINE_RETURN_IF_ERROR(usable("reserve"));
  return ended_by(reserve_memory(bytes, largest));
}

Status Path::reserve_memory(uint64_t bytes, uint64_t largest) {
  if (largest > bytes)
    return {Code::kInvalidArgument,
            fmt::format("reserve: the largest buffer ({} bytes) is larger than all together ({})",
                        largest, bytes)};
  const CurrentContext current(api_, context_);
  PACELINE_RETURN_IF_ERROR(current.status());
  bool finite = true;
  PACELINE_RETURN_IF_ERROR(pump_->wait_arrival(0, finite));
  settle_launches();
  for (auto* stream : objects_.streams())
    PACELINE_RETURN_IF_ERROR(drain(stream, "reserve: operations under way", kEndSeconds));
  PACELINE_RETURN_IF_ERROR(pump_->wait_retired());  // sends read the memory that may be given back
  PathRequest q;
  q.shape = shape_;
  q.shape.local_rank = shape_.local_size - 1;  // it has what does not divide; rings are alike
  q.format.codec = codec_;
  q.format.ratio = ratio_;
  q.format.fp16_values = fp16_values_;
  q.count = bytes / sizeof(float);
  q.piece_bytes = options_.piece_bytes;
  q.lanes = options_.lanes;
  PACELINE_ASSIGN(auto plan, build_path(q));
  // Every buffer rounds its last piece up; and what does not fit is cut into several operations.
  const uint64_t wanted =
      std::max(plan.host_bytes + plan.host_bytes / 16, options_.least_host_bytes);
  if (ring_.size() < wanted) {
    auto fresh = std::make_unique<DeviceObjects>(api_);
    PACELINE_ASSIGN(auto* memory, fresh->pinned_pages(wanted, "encodings of one step"));
    {
      const std::lock_guard lock(memory_mutex_);
      reserved_.swap(fresh);
    }
    host_ = memory;
    ring_ = HostRing(wanted);
  }
  reserved_bytes_ = std::max(reserved_bytes_, bytes);
  const bool sums = codec_ == WireCodec::kInt8 || sum_residuals_->ready();
  if (has_residual(codec_)) return allocate_residuals(momentum_ > 0, sums);
  return residuals_->ready() ? allocate_residuals(residuals_->has_velocity(), sums) : Status::ok();
}

// --- Operations -------------------------------------------------------------------------------------------------

Result<device::cuda::WireFormat> Path::format_of(const AllReduce& r) const {
  device::cuda::WireFormat f;
  f.dtype = r.dtype;
  if (r.codec < -1 || r.codec > static_cast<int>(WireCodec::kInt8))
    return Status(
        Code::kInvalidArgument,
        fmt::format("there is no codec {}: 0 none, 1 fp16, 2 bf16, 3 top-k, 4 int8, -1 the "
                    "settings'",
                    r.codec));
  f.codec = r.codec >= 0 ? static_cast<WireCodec>(r.codec) : codec_;
  // With a momentum that stands for the optimizer's own all of a model takes part, whatever its buckets are.
  if (r.codec < 0 && f.codec == WireCodec::kTopK && r.momentum == 0 &&
      r.count * dtype_size(r.dtype) < topk_threshold_)
    f.codec = WireCodec::kExact;
  if ((f.codec == WireCodec::kFp16 && r.dtype == DType::kFloat16) ||
      (f.codec == WireCodec::kBf16 && r.dtype == DType::kBFloat16))
    f.codec = WireCodec::kExact;
  f.ratio = r.ratio > 0 ? r.ratio : ratio_;
  f.fp16_values = fp16_values_;
  if (!(f.ratio > 0 && f.ratio <= 0.5))
    return Status(
        Code::kInvalidArgument,
        fmt::format("top-k's ratio {:g} is not above 0 and at most 0.5; send all of it by "
                    "another codec",
                    f.ratio));
  if (!(r.momentum >= 0 && r.momentum < 1))
    return Status(Code::kInvalidArgument,
                  fmt::format("momentum {:g} is not at least 0 and below 1", r.momentum));
  return f;
}

Result<std::shared_ptr<const PathPlan>> Path::plan_for(const PathRequest& request) {
  for (const auto& p : plans_) {
    if (same(p->request, request)) return p;
  }
  PACELINE_ASSIGN(auto built, build_path(request));
  for (const auto& piece : built.pieces) {
    const uint64_t slots = built.scatters() ? static_cast<uint64_t>(shape_.nodes) : 1;
    if (built.reports() && slots * piece.slot_bytes > slot_bytes_)
      return Status(Code::kInternal, fmt::format("an encoding of {} bytes has no room in {}",
                                                 slots * piece.slot_bytes, slot_bytes_));
  }
  if (plans_.size() >= kPlansKept) plans_.clear();
  plans_.push_back(std::make_shared<const PathPlan>(std::move(built)));
  return plans_.back();
}

Status Path::refuse_capture(cu::Stream stream, PathKind kind, const std::string& name) const {
  int capturing = 0;
  PACELINE_CUDA_CALL(api_, stream_is_capturing, stream, &capturing);
  if (capturing == 0) return Status::ok();
  return {Code::kUnsupported,
          fmt::format("{} '{}': its stream is being captured into a CUDA graph; flags of the "
                      "network can't be replayed: keep the backward pass out of the capture",
                      kind_name(kind), name)};
}

uint64_t Path::count_in_node(const PathRequest& q) const {
  const uint64_t usual = options_.usual_in_node / dtype_size(q.format.dtype);
  const uint64_t parts = (q.count + usual / 2) / usual;
  if (q.kind != PathKind::kAllReduce || shape_.local_size == 1 || parts <= 1) return q.count;
  const uint64_t granule = cut_granule(q);
  return std::min(((q.count + parts - 1) / parts + granule - 1) / granule * granule, q.count);
}

/// What does not fit in half the pinned memory is cut, so that one part comes while the next goes. By the rank of the node
/// that has most, for all cut alike.
Result<uint64_t> Path::count_that_fits(PathRequest q) {
  q.shape.local_rank = q.kind == PathKind::kBroadcast ? q.root_local_rank : shape_.local_size - 1;
  const uint64_t all = q.count;
  q.count = count_in_node(q);
  for (;;) {
    PACELINE_ASSIGN(auto plan, plan_for(q));
    if (plan->host_bytes <= ring_.size() / (q.count == all ? 1 : 2)) return q.count;
    const uint64_t granule = cut_granule(q);
    if (q.count <= granule)
      return Status(Code::kResourceExhausted,
                    fmt::format("{} of pinned memory can't hold the smallest piece, {}, twice",
                                bytes_text(ring_.size()), bytes_text(plan->host_bytes)));
    q.count = std::max<uint64_t>(q.count / 2 / granule, 1) * granule;
  }
}

Result<uint64_t> Path::all_reduce(const AllReduce& r) {
  PACELINE_RETURN_IF_ERROR(usable("all-reduce"));
  auto id = all_reduce_checked(r);
  if (!id) return ended_by(id.status());
  return id;
}

Result<uint64_t> Path::all_reduce_checked(const AllReduce& r) {
  PACELINE_ASSIGN(auto format, format_of(r));
  const auto fail = [&](std::string_view what) {
    return Status(Code::kInvalidArgument, fmt::format("all-reduce '{}': {}", r.name, what));
  };
  if (dtype_size(r.dtype) != 2 && r.dtype != DType::kFloat32)
    return Status(Code::kUnsupported,
                  fmt::format("all-reduce '{}': {} is not reduced here; float32, float16 and "
                              "bfloat16 are",
                              r.name, dtype_name(r.dtype)));
  if (r.row_elements > 0 && r.count % r.row_elements != 0)
    return fail(fmt::format("{} elements are not whole rows of {}", r.count, r.row_elements));
  if (r.row_elements > 0 && has_residual(format.codec))
    return fail(fmt::format("rows travel as none, fp16 or bf16, not as {}, which keeps residuals",
                            codec_name(format.codec)));
  if (r.count > 0 && r.data == 0) return fail("the buffer is null");
  if (r.data % 16 != 0) return fail("the buffer is not aligned to 16 bytes");
  uint64_t covered = 0;
  for (const auto& s : r.segments) covered += s.elements;
  if (!r.segments.empty() && covered != r.count)
    return fail(fmt::format("its segments hold {} elements, the buffer {}; segments must cover it",
                            covered, r.count));
  const CurrentContext current(api_, context_);
  PACELINE_RETURN_IF_ERROR(current.status());
  PACELINE_RETURN_IF_ERROR(refuse_capture(r.stream, PathKind::kAllReduce, r.name));
  if (ring_.size() == 0) PACELINE_RETURN_IF_ERROR(reserve_memory(0, 0));
  if (has_residual(format.codec))
    PACELINE_RETURN_IF_ERROR(ensure_residuals(r.momentum > 0, format.codec == WireCodec::kInt8));
  PathRequest q;
  q.shape = shape_;
  q.format = format;
  q.count = r.count;
  q.piece_bytes = options_.piece_bytes;
  q.lanes = options_.lanes;
  if (r.prompt) q.piece_bytes = prompt_piece_bytes(q);
  q.row_elements = r.row_elements;
  RowsMet* met = nullptr;
  if (q.row_elements > 0) {
    met = &rows_met(r, q);
    PACELINE_ASSIGN(const bool by_rows, goes_by_rows(*met, q));
    if (!by_rows) q.row_elements = 0;
    met->last.clear();
  }
  PACELINE_ASSIGN(const uint64_t count, count_that_fits(q));
  uint64_t last = 0;
  for (uint64_t first = 0; first < std::max<uint64_t>(r.count, 1); first += count) {
    q.count = std::min(count, r.count - first);
    PACELINE_ASSIGN(auto operation, submit(r, q, first));
    last = operation->sequence;
    if (q.row_elements > 0) met->last.push_back(std::move(operation));
    if (count == 0) break;
  }
  return last;
}

Result<std::shared_ptr<const Operation>> Path::submit(const AllReduce& r, const PathRequest& q,
                                                      uint64_t first) {
  const auto& format = q.format;
  PACELINE_ASSIGN(auto plan, plan_for(q));
  Job job = make_job(plan, r.name);
  job.data = r.data + first * dtype_size(r.dtype);
  job.source = job.target = job.data;
  job.defers = !r.prompt;
  job.operation->meets = shape_.local_size > 1;
  job.operation->copies = copies_ != nullptr && copies_->fits(*plan);
  job.operation->brings = wants_copies(format.codec) && job.operation->copies && copies_->lands() &&
                          launches_later() && !r.prompt &&
                          plan->shard * dtype_size(r.dtype) >= options_.least_given;
  const double extra = format.codec == WireCodec::kFp16 ? gradient_scale_ : 1.0;
  job.scale_in = static_cast<float>((r.average ? 1.0 / me_.size : 1.0) * r.factor * extra);
  job.scale_out = static_cast<float>(1.0 / extra);
  job.momentum = format.codec == WireCodec::kTopK ? static_cast<float>(r.momentum) : 0;
  job.residuals = has_residual(format.codec);
  job.sum_residuals = job.residuals && plan->hops == 2;
  std::vector<ResidualRange> by_name;
  if (job.residuals && r.segments.empty()) by_name.push_back({key_of(r), 0, r.count});
  job.segments = r.segments.empty() ? &by_name : &r.segments;
  job.segments_first = first;
  PACELINE_RETURN_IF_ERROR(launch(job, r.stream).status());
  return std::shared_ptr<const Operation>(job.operation);
}

/// Whether copies bring gradients to who adds them up. They take no multiprocessor, and a thread submits them: top-k's step
/// is bound by the model's kernels, and a small model's by those or by its host. A large one's dense gradients wait for the
/// link, and NCCL's reduce-scatter, without a pass for the sum, has them there a little sooner.
bool Path::wants_copies(WireCodec codec) const {
  if (options_.node_reduce != "auto") return options_.node_reduce == "copies";
  if (codec == WireCodec::kTopK) return true;
  return reserved_bytes_ > 0 && reserved_bytes_ <= options_.small_model;
}

Path::Job Path::make_job(const std::shared_ptr<const PathPlan>& plan, const std::string& name) {
  const auto& q = plan->request;
  auto o = std::make_shared<Operation>();
  o->sequence = ++submitted_;
  o->plan = plan;
  o->name = name.empty() ? fmt::format("{} {}", kind_name(q.kind), o->sequence) : name;
  auto region = ring_.take(plan->host_bytes, o->sequence);
  o->host = host_ + region.offset;
  o->tenant = region.tenant;
  o->out_before = out_numbered_;
  Job job;
  job.operation = o;
  job.sequence = o->sequence;
  job.copied.resize(plan->pieces.size());
  job.out_flags.resize(plan->pieces.size(), out_numbered_);
  job.report = reports_ + (o->sequence % ends_.size()) * sizeof(uint32_t);
  number_pieces(job);
  return job;
}

/// The pump sets a lane's flags in the order of submission, for pieces too that nobody sends here.
void Path::number_pieces(Job& job) {
  const auto& plan = *job.operation->plan;
  job.in_turn_before = last_in_turn_;
  for (const auto& piece : plan.pieces) {
    auto& lane = lanes_[static_cast<size_t>(piece.lane)];
    job.in_flags.push_back(++lane.in_numbered);
    if (plan.hops == 2) job.back_flags.push_back(++lane.back_numbered);
  }
  if (plan.hops == 1 && plan.lanes_used() > 0) last_in_turn_ = job.sequence;
}

Result<uint64_t> Path::launch(Job& job, cu::Stream caller) {
  const auto& o = job.operation;
  o->launches = launches_later();
  // The pump may post its receives while the rest is enqueued.
  pump_->submit(o);
  // NCCL's kernels stand in the script's order (path.h), and who waits for the result need not wait for a thread.
  const bool defers = writer_ != nullptr && job.defers && (shape_.local_size == 1 || o->brings);
  if (!defers) settle_out();
  if (auto status = defers ? enqueue_later(job, caller) : enqueue(job, caller); !status) {
    pump_->fail({status.code(), fmt::format("{} '{}': {}", kind_name(o->plan->request.kind),
                                            o->name, status.message())});
    return pump_->failure();  // an earlier one may have been the cause
  }
  PACELINE_RETURN_IF_ERROR(pump_->failure());
  out_numbered_ =
      defers ? out_numbered_ + static_cast<uint32_t>(std::max<size_t>(o->plan->pieces.size(), 1))
             : out_issued_;
  return o->sequence;
}

Status Path::named(const Operation& o, const Status& status) {
  if (status || status.code() == Code::kAborted) return status;
  return {status.code(),
          fmt::format("{} '{}': {}", kind_name(o.plan->request.kind), o.name, status.message())};
}

/// The whole of an operation, by a thread: fifteen calls of the driver, which the thread that trains has no time for. What
/// its stream has to have done is marked now.
Status Path::enqueue_later(const Job& job, cu::Stream caller) {
  struct Held {
    Job job;
    std::vector<ResidualRange> segments;
  };
  const cu::Event begin = begins_[job.sequence % begins_.size()];
  PACELINE_CUDA_CALL(api_, event_record, begin, caller);
  auto held = std::make_shared<Held>(Held{job, *job.segments});
  held->job.segments = &held->segments;
  deferred_ = job.sequence;
  writer_->push(job.sequence, [this, held, begin] {
    return named(*held->job.operation, enqueue_behind(held->job, begin));
  });
  return Status::ok();
}

/// Until all ways out are on the streams: what they keep is this thread's again.
void Path::settle_out() {
  if (writer_) writer_->wait_launched(deferred_);
}

/// Until all that was submitted is on the streams, the way in too.
void Path::settle_launches() {
  settle_out();
  if (launches_later()) launcher_->wait_launched(submitted_);
}

/// The launcher's part, with what the caller's arguments were.
void Path::launch_later(const Job& job) {
  struct Held {
    Job job;
    Collective collective;
    std::vector<ResidualRange> segments;
  };
  auto held = std::make_shared<Held>(Held{job, {}, {}});
  if (job.collective != nullptr) held->collective = *job.collective;
  if (job.sum_residuals) held->segments = *job.segments;
  held->job.collective = job.collective == nullptr ? nullptr : &held->collective;
  held->job.segments = &held->segments;
  // Sums are made as their parts come: those of later operations must not stand behind what still comes back of this one.
  // On the streams they do not go before pieces that have to wait for their turn. Nor while memory is short: what waits for
  // it there waits for operations before.
  std::vector<Launcher::Early> sums;
  const auto& plan = *job.operation->plan;
  for (size_t i = 0; plan.hops == 2 && i < plan.pieces.size(); ++i) {
    sums.push_back(
        {job.sequence, [this, held, i] { return has_come(held->job, i); },
         [this, held, i] { return named(*held->job.operation, enqueue_in(held->job, i)); },
         held->job.in_turn_before, [this] { return memory_is_free(); }});
  }
  launcher_->push(
      job.sequence,
      [this, held] {
        auto& o = *held->job.operation;
        auto status = enqueue_way_in(held->job);
        if (status) pump_->launched(o);
        return named(o, status);
      },
      std::move(sums));
}

/// Until the launcher is through with what has arrived, which books of the sums' residuals it keeps.
void Path::settle_sums() {
  settle_out();
  if (launches_later() && sum_residuals_->ready()) launcher_->wait_launched(submitted_);
}

Status Path::join(uint64_t operation, cu::Stream stream) {
  PACELINE_RETURN_IF_ERROR(usable("join"));
  if (operation == 0 || operation > submitted_)
    return {Code::kInvalidArgument, fmt::format("join: there is no operation {}", operation)};
  const CurrentContext current(api_, context_);
  if (!current.status()) return ended_by(current.status());
  // Of many operations: by the script alone, for all ranks try the same at a time.
  const bool waits = operation <= joined_ + kLastOnes || end_of_pass_waits();
  const uint64_t ones = last_ones(operation);
  if (operation > joined_ + kLastOnes) last_pass_ = operation - joined_;
  joined_ = std::max(joined_, operation);
  settle_out();
  if (launches_later() && launcher_->launched() < operation) {
    const uint64_t done = std::max(launcher_->ahead_through(), launcher_->launched());
    if (waits && operation > done + ones)
      launcher_->wait_until(flags_.out(), out_after_[(operation - ones) % out_after_.size()]);
    launcher_->catch_up(operation);
  }
  PACELINE_RETURN_IF_ERROR(pump_->failure());
  // Where a later operation has used the event again, the wait is for that one: they end in order.
  if (auto error = api_.stream_wait_event(stream, ends_[operation % ends_.size()], 0); error != 0)
    return ended_by(cu::explain(api_, error, "join"));
  joined_at_ = SteadyClock().now();
  return Status::ok();
}

Status Path::rest() {
  PACELINE_RETURN_IF_ERROR(usable("rest"));
  const uint64_t last = submitted_;
  if (last == rested_for_ || joined_ < last) return Status::ok();
  rested_for_ = last;
  lead_ = std::min(SteadyClock().now() - joined_at_, kMostLead);
  const Time before = pump_->note_arrival(last);
  pump_->rest(last, host_rest_.until(SteadyClock().now(), joined_at_, before));
  return pump_->failure();
}

/// For how many of the pass's operations, which `operation` ends, the host does not wait.
uint64_t Path::last_ones(uint64_t operation) const {
  const uint64_t pass = operation - std::min(joined_, operation);
  if (pass <= kLastOnes || pass != last_pass_ || pass >= Pump::kOutTimes) return kLastOnes;
  uint64_t ones = kLastOnes;
  while (ones < pass && pump_->out_at(joined_) - pump_->out_at(joined_ - ones) < lead_) ++ones;
  return ones;
}

bool Path::end_of_pass_waits() {
  const std::lock_guard lock(memory_mutex_);
  return !launches_later() || join_trial_.usual(SteadyClock().now());
}

Status Path::wait_arrival(double timeout_s, bool& finite) {
  PACELINE_RETURN_IF_ERROR(usable("wait_arrival"));
  const Time since = SteadyClock().now();
  PACELINE_RETURN_IF_ERROR(pump_->wait_arrival(timeout_s, finite));
  return wait_finished(submitted_, since, timeout_s, finite);
}

Status Path::wait_operation(uint64_t operation, double timeout_s, bool& finite) {
  PACELINE_RETURN_IF_ERROR(usable("wait_operation"));
  if (operation == 0 || operation > submitted_)
    return {Code::kInvalidArgument,
            fmt::format("wait_operation: there is no operation {}", operation)};
  const Time since = SteadyClock().now();
  PACELINE_RETURN_IF_ERROR(pump_->wait_operation(operation, timeout_s, finite));
  return shape_.local_size > 1 ? wait_finished(operation, since, timeout_s, finite) : Status::ok();
}

/// What has come is put in place by kernels of ours and, in the node, of NCCL, which a lost neighbour spoils: until they are
/// through, a failure counts. The caller's time-out is that of the whole wait, which began at `began`; where it ends this
/// part, `finite` is the next wait's to tell.
Status Path::wait_finished(uint64_t operation, Time began, double timeout_s, bool finite) const {
  const auto now = [] { return SteadyClock().now(); };
  const Time since = now();
  const Time until = timeout_s > 0 ? after(began, to_time(timeout_s)) : kNever;
  while (!reached(Flags::load(flags_.finished()), static_cast<uint32_t>(operation))) {
    PACELINE_RETURN_IF_ERROR(pump_->failure());
    if (now() > until) {
      pump_->tell_again(finite);
      return {Code::kTimeout,
              fmt::format("rank {}: what has arrived from the other nodes is not through the GPUs "
                          "of this one within the caller's {:g} s: one of them is busy or hangs; "
                          "wait longer, or look at them (nvidia-smi)",
                          me_.rank, timeout_s)};
    }
    // Copies and kernels of a piece: to sleep, and be woken, would take longer.
    if (now() - since > kLook) std::this_thread::sleep_for(std::chrono::microseconds(5));
  }
  return pump_->failure();
}

Result<cu::DevicePtr> Path::gate() {
  PACELINE_RETURN_IF_ERROR(usable("gate"));
  return pump_->gate();
}

bool Path::arrived(uint64_t operation) const {
  if (!pump_) return true;
  if (!pump_->has_arrived(operation)) return false;
  return shape_.local_size == 1 || pump_->has_failed() ||
         reached(Flags::load(flags_.finished()), static_cast<uint32_t>(operation));
}

// --- Statistics --------------------------------------------------------------------------------------------------

paceline_cuda_stats Path::statistics() const {
  paceline_cuda_stats s{};
  s.operations = pump_ ? pump_->operations() : 0;
  s.wire_bytes = pump_ ? pump_->wire_bytes() : 0;
  s.rows_sent = pump_ ? pump_->rows_sent() : 0;
  s.rows_bound = pump_ ? pump_->rows_bound() : 0;
  s.saturated = pump_ ? pump_->saturated() : 0;
  const std::lock_guard lock(memory_mutex_);
  s.pass_ns_waiting = static_cast<uint64_t>(join_trial_.pass_usual());
  s.pass_ns_ahead = static_cast<uint64_t>(join_trial_.pass_other());
  for (const DeviceObjects* objects :
       {&objects_, static_cast<const DeviceObjects*>(reserved_.get()),
        static_cast<const DeviceObjects*>(residual_memory_.get())}) {
    if (objects == nullptr) continue;
    s.device_bytes += objects->device_bytes();
    s.pinned_bytes += objects->pinned_bytes();
  }
  if (copies_) s.device_bytes += copies_->device_bytes();
  s.residual_bytes = residual_memory_ ? residual_memory_->device_bytes() : 0;
  return s;
}

}  // namespace paceline::gpu
