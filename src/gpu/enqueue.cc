// What one all-reduce puts on the streams, in the order that path.h argues for.
#include <fmt/format.h>

#include "drivers/cuda/loader.h"
#include "gpu/path.h"

namespace paceline::gpu {
namespace {

cu::DevicePtr element(const PathPlan& plan, uint64_t data, uint64_t index) {
  return data + index * dtype_size(plan.request.format.dtype);
}

}  // namespace

Status Path::enqueue(Job& job, cu::Stream caller) {
  PACELINE_CUDA_CALL(api_, event_record, caller_, caller);
  return enqueue_behind(job, caller_);
}

Status Path::enqueue_behind(Job& job, cu::Event caller) {
  PACELINE_CUDA_CALL(api_, stream_wait_event, out_, caller, 0);
  PACELINE_RETURN_IF_ERROR(enqueue_out(job));
  job.out_after = out_after_[job.sequence % out_after_.size()] = out_issued_;
  if (!launches_later()) return enqueue_way_in(job);
  launch_later(job);
  // NCCL's kernels stand in the script's order (path.h).
  if (job.operation->meets && !job.operation->copies) launcher_->catch_up(job.sequence);
  return Status::ok();
}

Status Path::enqueue_way_in(Job& job) {
  const auto& plan = *job.operation->plan;
  if (plan.hops == 2 && launches_later()) {
    PACELINE_RETURN_IF_ERROR(launcher_->run_early(job.sequence));
    for (size_t i = 0; i < plan.pieces.size(); ++i) PACELINE_RETURN_IF_ERROR(enqueue_back(job, i));
    return enqueue_end(job);
  }
  // Flags are waited for in the order in which they will be set, more or less: sums come back as later pieces come in.
  const size_t ahead = plan.hops == 2 ? lanes_.size() : 0;
  for (size_t i = 0; i < plan.pieces.size() + ahead; ++i) {
    if (i < plan.pieces.size())
      PACELINE_RETURN_IF_ERROR(plan.reports() ? enqueue_in(job, i) : enqueue_moved_in(job, i));
    if (plan.hops == 2 && i >= ahead) PACELINE_RETURN_IF_ERROR(enqueue_back(job, i - ahead));
  }
  return enqueue_end(job);
}

/// `stream` goes on once `flag` has reached `value` (and `after` has happened). One stream waits for all flags, the others
/// for events behind it: a GPU that polls for two values at once starts every kernel of every stream about 1.3 µs later, one
/// that polls for eight 3.8 µs (H200), and waits for events cost nothing.
Status Path::await(cu::Stream stream, const uint32_t* flag, uint32_t value, cu::Event after) {
  if (launches_later()) {
    PACELINE_ASSIGN(const bool there, launcher_->wait_for(flag, value));
    if (there) return Status::ok();
  }
  return await_on_device(stream, flag, value, after);
}

/// This rank's own encoding is in pinned memory, where theirs come in. The host makes the order between the copy out and
/// what the other nodes send; CUDA is told of it too.
Status Path::await_own(const Job& job, size_t index, Lane& lane) {
  if (!launches_later()) return Status::ok();  // together with theirs
  if (job.operation->plan->hops == 1) return await(lane.in, flags_.out(), job.out_flags[index]);
  Flags::store(&lane.ahead_through, job.back_flags[index] - 1);
  return await_part(job, index, lane, flags_.out(), job.out_flags[index]);
}

/// The piece has come. (An event that a later piece has used again, in very long operations, only waits for more of the way
/// out, which never waits for the way in.)
Status Path::await_theirs(const Job& job, size_t index, Lane& lane) {
  const auto& plan = *job.operation->plan;
  const auto* flag = flags_.in(plan.pieces[index].lane);
  if (launches_later() && plan.hops == 2)
    return await_part(job, index, lane, flag, job.in_flags[index]);
  return await(lane.in, flag, job.in_flags[index], job.copied[index]);
}

Status Path::await_piece(const Job& job, size_t index, Lane& lane) {
  PACELINE_RETURN_IF_ERROR(await_own(job, index, lane));
  return await_theirs(job, index, lane);
}

/// What may stand before pieces of other operations: the lane's stream waits itself, not the watch stream, where it would
/// hold up theirs. (While the way out waits for memory nothing stands before others.)
Status Path::await_part(const Job& job, size_t index, Lane& lane, const uint32_t* flag,
                        uint32_t value) {
  PACELINE_ASSIGN(const bool there, launcher_->wait_for(flag, value));
  if (there) return Status::ok();
  if (!goes_ahead(lane, job.back_flags[index])) return await_on_device(lane.in, flag, value);
  PACELINE_CUDA_CALL(api_, stream_wait_value32, lane.in, Flags::address(flag), value,
                     cu::kWaitValueGeq);
  return Status::ok();
}

/// Whether the way out does not wait for memory now, nor has a wait for it still to come.
bool Path::memory_is_free() const {
  return reached(Flags::load(flags_.waited()), Flags::load(&awaited_));
}

bool Path::goes_ahead(Lane& lane, uint32_t sum) {
  const std::lock_guard lock(ahead_);
  if (!memory_is_free()) return false;
  Flags::store(&lane.ahead_through, sum);
  return true;
}

/// Until no lane waits so. (For all that was submitted, everything that these waits need is under way.)
void Path::wait_for_parts() {
  for (int l = 0; l < options_.lanes; ++l) {
    const auto& lane = lanes_[static_cast<size_t>(l)];
    launcher_->wait_until(flags_.sums(l), Flags::load(&lane.ahead_through));
  }
}

/// Whether await_piece() would return at once.
bool Path::has_come(const Job& job, size_t index) const {
  const auto& piece = job.operation->plan->pieces[index];
  return reached(Flags::load(flags_.out()), job.out_flags[index]) &&
         reached(Flags::load(flags_.in(piece.lane)), job.in_flags[index]);
}

Status Path::await_on_device(cu::Stream stream, const uint32_t* flag, uint32_t value,
                             cu::Event after) {
  if (after != nullptr) PACELINE_CUDA_CALL(api_, stream_wait_event, watch_, after, 0);
  PACELINE_CUDA_CALL(api_, stream_wait_value32, watch_, Flags::address(flag), value,
                     cu::kWaitValueGeq);
  PACELINE_CUDA_CALL(api_, event_record, passed_, watch_);
  PACELINE_CUDA_CALL(api_, stream_wait_event, stream, passed_, 0);
  return Status::ok();
}

// --- The way out ------------------------------------------------------------------------------------------------

Status Path::enqueue_out(Job& job) {
  const auto& o = *job.operation;
  const auto& plan = *o.plan;
  PACELINE_RETURN_IF_ERROR(clear_reports(o.sequence));
  // What has to give memory back is enqueued before anything that waits for it: what holds up the device (path.h) may come
  // right after. Whether ranks of a node do so differs where it has come on some, and so is in place on all.
  const bool waits = o.tenant > pump_->retired();
  if (waits && launches_later()) launcher_->catch_up(o.tenant);
  if (job.residuals) PACELINE_RETURN_IF_ERROR(hand_over(job));
  if (job.collective != nullptr)
    PACELINE_RETURN_IF_ERROR(enqueue_begin(job));
  else if (o.brings)
    PACELINE_RETURN_IF_ERROR(add_in_node(job));
  else if (shape_.local_size > 1)
    PACELINE_RETURN_IF_ERROR(node_->reduce_scatter(plan, job.data, out_));
  // Not through the watch stream where the launcher has it: this wait ends with what that one puts there later.
  // Then no third stream may wait beside these two, so where memory is short the host waits for what has gone ahead.
  if (waits && launches_later()) {
    {
      const std::lock_guard lock(ahead_);
      Flags::store(&awaited_, static_cast<uint32_t>(o.tenant));
    }
    wait_for_parts();
    PACELINE_CUDA_CALL(api_, stream_wait_value32, copy_, Flags::address(flags_.retired()),
                       static_cast<uint32_t>(o.tenant), cu::kWaitValueGeq);
    PACELINE_CUDA_CALL(api_, stream_write_value32, copy_, Flags::address(flags_.waited()),
                       static_cast<uint32_t>(o.tenant), 0);
  } else if (waits) {
    PACELINE_RETURN_IF_ERROR(
        await_on_device(copy_, flags_.retired(), static_cast<uint32_t>(o.tenant)));
  }
  for (size_t i = 0; i < plan.pieces.size(); ++i)
    PACELINE_RETURN_IF_ERROR(plan.reports() ? enqueue_piece_out(job, i)
                                            : enqueue_moved_out(job, i));
  return enqueue_report(job);
}

// The reduce-scatter. While a backward pass goes on this is the only stream that waits, which costs nothing (launcher.h), and
// what it waits for needs no more than the same calls on the node's other ranks, as NCCL's kernels do (path.h).
Status Path::add_in_node(Job& job) {
  const auto& plan = *job.operation->plan;
  const auto sequence = static_cast<uint32_t>(job.sequence);
  PACELINE_RETURN_IF_ERROR(copies_->give(plan, job.data, out_));
  PACELINE_CUDA_CALL(api_, stream_write_value32, out_, Flags::address(flags_.given()), sequence, 0);
  PACELINE_CUDA_CALL(api_, stream_wait_value32, out_, Flags::address(flags_.brought()), sequence,
                     cu::kWaitValueGeq);
  auto sources = copies_->sources(plan, job.data);
  if (plan.request.format.codec == device::cuda::WireCodec::kTopK &&
      sources.size() <= device::cuda::kMaxAddends + 1) {
    job.parts = std::move(sources);  // the encoder adds them up as it reads them
    return Status::ok();
  }
  device::cuda::WireFormat exact;
  exact.dtype = plan.request.format.dtype;
  device::cuda::CombineArguments c;
  c.encoded = sources;
  c.elements = plan.own.elements;
  c.output = element(plan, job.data, plan.own.first);
  return kernels_->combine(exact, c, out_);
}

// Report words are a ring, cleared by halves: a half when its first word is used, after all copies of what it held.
Status Path::clear_reports(uint64_t sequence) {
  const uint64_t half = ends_.size() / 2;
  if (sequence % half != 0) return Status::ok();
  PACELINE_CUDA_CALL(api_, event_record, all_copied_, copy_);
  PACELINE_CUDA_CALL(api_, stream_wait_event, out_, all_copied_, 0);
  PACELINE_CUDA_CALL(api_, memset_d8_async, reports_ + sequence % ends_.size() * sizeof(uint32_t),
                     0, half * sizeof(uint32_t), out_);
  return Status::ok();
}

Status Path::copy_report(const Job& job, cu::Stream stream) {
  PACELINE_CUDA_CALL(api_, memcpy_dtoh_async, job.operation->host + kReportOffset, job.report,
                     sizeof(uint32_t), stream);
  return Status::ok();
}

/// Whether all copies out that were enqueued are over: no call of the driver is needed to know.
bool Path::out_is_idle() const { return reached(Flags::load(flags_.out()), out_issued_); }

/// Which parameters' elements lie in `span` of the buffer.
std::vector<ResidualRange> Path::ranges_of(const Job& job, Span span) {
  std::vector<ResidualRange> ranges;
  uint64_t at = 0;
  const uint64_t begin = job.segments_first + span.first;
  const uint64_t end = begin + span.elements;
  for (const auto& s : *job.segments) {
    const uint64_t from = std::max(at, begin);
    const uint64_t until = std::min(at + s.elements, end);
    if (from < until) ranges.push_back({s.key, s.offset + (from - at), until - from});
    at += s.elements;
  }
  return ranges;
}

// Another cut of the buckets (DDP rebuilds them once) makes other ranks the owners of what this rank has residuals of. They
// go with this rank's gradient: the node adds it up, and the new owner encodes the sum. Residuals of sums (int8, two hops)
// go the same way: what a node has added up and not sent may come from any of its ranks' gradients.
Status Path::hand_over(Job& job) {
  const auto& plan = *job.operation->plan;
  const uint64_t own_end = plan.own.first + plan.own.elements;
  std::vector<Span> away = {{0, plan.own.first}, {own_end, plan.request.count - own_end}};
  PACELINE_RETURN_IF_ERROR(hand_over(job, *residuals_, away));
  if (!sum_residuals_->ready()) return Status::ok();
  uint64_t at = 0;
  away.clear();
  for (size_t i = 0; plan.hops == 2 && i < plan.pieces.size(); ++i) {
    const Span part = plan.part(plan.pieces[i], shape_.node);
    away.push_back({at, part.first - at});
    at = part.first + part.elements;
  }
  away.push_back({at, plan.request.count - at});
  const std::lock_guard lock(sums_books_);
  return hand_over(job, *sum_residuals_, away);
}

Status Path::hand_over(Job& job, Residuals& from, std::span<const Span> away) {
  std::vector<Residuals::Parting> partings;
  for (const Span span : away) {
    if (span.elements == 0) continue;
    partings.clear();
    from.release(ranges_of(job, span), partings);
    // Sums are written on the lanes; the last commit came after all of them.
    if (!partings.empty() && &from == sum_residuals_.get())
      PACELINE_CUDA_CALL(api_, stream_wait_event, out_, committed_, 0);
    for (const auto& p : partings) {
      for (uint64_t done = 0; done < p.elements; done += kHandOverElements)
        PACELINE_RETURN_IF_ERROR(add_to_gradient(job, span.first + p.at + done,
                                                 p.values + done * sizeof(float),
                                                 std::min(kHandOverElements, p.elements - done)));
    }
  }
  return Status::ok();
}

// gradient += residual / scale, by the codecs' kernels, which want aligned memory: through copies. It happens once.
Status Path::add_to_gradient(Job& job, uint64_t first, cu::DevicePtr residual, uint64_t elements) {
  using device::cuda::WireCodec;
  const auto dtype = job.operation->plan->request.format.dtype;
  const uint64_t bytes = elements * dtype_size(dtype);
  const cu::DevicePtr gradient = element(*job.operation->plan, job.data, first);
  const auto [values, scaled, before] = hand_over_memory_;
  PACELINE_CUDA_CALL(api_, memcpy_dtod_async, values, residual, elements * sizeof(float), out_);
  PACELINE_CUDA_CALL(api_, memcpy_dtod_async, before, gradient, bytes, out_);
  device::cuda::EncodeArguments e;
  e.gradient = values;
  e.elements = elements;
  e.scale = 1 / job.scale_in;
  e.encoded = scaled;
  device::cuda::WireFormat cast;
  cast.codec = dtype == DType::kFloat16    ? WireCodec::kFp16
               : dtype == DType::kBFloat16 ? WireCodec::kBf16
                                           : WireCodec::kExact;
  PACELINE_RETURN_IF_ERROR(kernels_->encode(cast, e, out_));
  device::cuda::WireFormat exact;
  exact.dtype = dtype;
  const cu::DevicePtr both[] = {before, scaled};
  device::cuda::CombineArguments c;
  c.encoded = both;
  c.elements = elements;
  c.output = values;
  PACELINE_RETURN_IF_ERROR(kernels_->combine(exact, c, out_));
  PACELINE_CUDA_CALL(api_, memcpy_dtod_async, gradient, values, bytes, out_);
  return Status::ok();
}

device::cuda::EncodeArguments Path::cast_of(const Job& job, Span span, int node, cu::DevicePtr to) {
  device::cuda::EncodeArguments e;
  e.gradient = element(*job.operation->plan,
                       job.source + static_cast<uint64_t>(node) * job.source_stride, span.first);
  e.elements = span.elements;
  e.scale = job.scale_in;
  e.encoded = to;
  return e;
}

Status Path::encode_part(Job& job, Span span, int node, cu::DevicePtr to) {
  const auto& plan = *job.operation->plan;
  auto e = cast_of(job, span, node, to);
  std::vector<cu::DevicePtr> parts = job.parts;
  for (auto& part : parts)
    part += (span.first - plan.own.first) * dtype_size(plan.request.format.dtype);
  if (!parts.empty()) {
    e.gradient = parts.front();
    e.addends = std::span(parts).subspan(1);
  }
  e.state = out_state_;
  e.state_capacity = out_state_bytes_;
  e.report = job.report;
  if (job.residuals) {
    PACELINE_ASSIGN(auto place, residuals_->place(ranges_of(job, span), out_));
    e.residual = place.before;
    e.next_residual = place.after;
    if (job.momentum > 0) {
      e.velocity = place.velocity_before;
      e.next_velocity = place.velocity_after;
      e.momentum = job.momentum;
    }
  }
  return kernels_->encode(plan.request.format, e, out_);
}

Status Path::enqueue_piece_out(Job& job, size_t index) {
  const auto& o = *job.operation;
  const auto& plan = *o.plan;
  const auto& piece = plan.pieces[index];
  auto& slot = out_slots_[next_slot_++ % out_slots_.size()];
  if (copy_ != out_ && slot.copied != nullptr && !reached(Flags::load(flags_.out()), slot.flag))
    PACELINE_CUDA_CALL(api_, stream_wait_event, out_, slot.copied, 0);
  job.copied[index] = slot.copied = copied_[++next_copied_ % copied_.size()];
  // A piece alone, with nothing before it on its way out and its pinned memory free, needs no stream of its own for the
  // copy. The out flag still grows in order: what comes later on the copy stream waits for this.
  const bool alone =
      copy_ == out_ || (plan.pieces.size() == 1 && out_is_idle() && o.tenant <= pump_->retired());
  cu::Stream stream = alone ? out_ : copy_;
  const int nodes = plan.scatters() ? shape_.nodes : 1;
  for (int n = 0; n < nodes; ++n) {
    const Span part = plan.part(piece, n);
    if (plan.by_rows())
      PACELINE_RETURN_IF_ERROR(encode_rows(job, piece, slot.memory));
    else if (part.elements > 0)
      PACELINE_RETURN_IF_ERROR(encode_part(job, part, n, slot.memory + plan.slot(piece, n)));
  }
  if (!alone) {
    PACELINE_CUDA_CALL(api_, event_record, slot.encoded, out_);
    PACELINE_CUDA_CALL(api_, stream_wait_event, copy_, slot.encoded, 0);
  }
  // This rank's own encoding lands among those that come in; the others' where they are sent from.
  const auto me = static_cast<uint64_t>(shape_.node);
  std::byte* const own = o.host + piece.in_offset + me * piece.slot_bytes;
  const auto copy = [&](std::byte* to, uint64_t first, uint64_t bytes) -> Status {
    if (bytes > 0)
      PACELINE_CUDA_CALL(api_, memcpy_dtoh_async, to, slot.memory + first, bytes, stream);
    return Status::ok();
  };
  if (!plan.scatters()) {
    PACELINE_RETURN_IF_ERROR(copy(own, 0, plan.part_bytes(piece, 0)));
  } else {
    std::byte* const away = o.host + piece.out_offset;
    const uint64_t mine = me * piece.slot_bytes;
    const uint64_t next = mine + piece.slot_bytes;
    const auto last = static_cast<uint64_t>(nodes) * piece.slot_bytes;
    PACELINE_RETURN_IF_ERROR(copy(away, 0, mine));
    PACELINE_RETURN_IF_ERROR(copy(own, mine, plan.part_bytes(piece, shape_.node)));
    PACELINE_RETURN_IF_ERROR(copy(away + next, next, last - next));
  }
  if (index + 1 == plan.pieces.size()) PACELINE_RETURN_IF_ERROR(copy_report(job, stream));
  job.out_flags[index] = slot.flag = ++out_issued_;
  PACELINE_CUDA_CALL(api_, stream_write_value32, stream, Flags::address(flags_.out()), out_issued_,
                     0);
  if (copy_ == out_) return Status::ok();
  PACELINE_CUDA_CALL(api_, event_record, slot.copied, stream);
  if (alone) {
    beside_ = slot.copied;
    beside_flag_ = out_issued_;
  }
  return Status::ok();
}

Status Path::enqueue_report(Job& job) {
  const auto& plan = *job.operation->plan;
  if (launches_later()) {
    if (plan.reports() && plan.pieces.empty()) {
      PACELINE_RETURN_IF_ERROR(copy_report(job, out_));
      PACELINE_CUDA_CALL(api_, stream_write_value32, out_, Flags::address(flags_.out()),
                         ++out_issued_, 0);
    } else if (!plan.reports()) {
      job.all_out = outs_[job.sequence % outs_.size()];
      PACELINE_CUDA_CALL(api_, event_record, job.all_out, out_);
    }
    return Status::ok();
  }
  // With the last piece the report has gone, and its way in comes after all of the way out.
  if (plan.reports() && !plan.pieces.empty()) return Status::ok();
  PACELINE_CUDA_CALL(api_, event_record, all_out_, out_);
  if (plan.reports()) {
    PACELINE_CUDA_CALL(api_, stream_wait_event, copy_, all_out_, 0);
    PACELINE_RETURN_IF_ERROR(copy_report(job, copy_));
    PACELINE_CUDA_CALL(api_, stream_write_value32, copy_, Flags::address(flags_.out()),
                       ++out_issued_, 0);
  }
  // The gradient must not be gathered over before it is encoded, where this rank has no piece of its own.
  PACELINE_CUDA_CALL(api_, stream_wait_event, gather_, all_out_, 0);
  return Status::ok();
}

// --- The way in -------------------------------------------------------------------------------------------------

Status Path::enqueue_in(Job& job, size_t index) {
  const auto& o = *job.operation;
  const auto& plan = *o.plan;
  const auto& piece = plan.pieces[index];
  auto& lane = lanes_[static_cast<size_t>(piece.lane)];
  const Span part = plan.part(piece, shape_.node);
  const auto nodes = static_cast<uint64_t>(shape_.nodes);
  const auto me = static_cast<uint64_t>(shape_.node);
  const auto copy = [&](uint64_t first, uint64_t last) -> Status {  // slots
    const uint64_t at = first * piece.slot_bytes;
    if (first < last)
      PACELINE_CUDA_CALL(api_, memcpy_htod_async, lane.in_slots + at, o.host + piece.in_offset + at,
                         (last - first) * piece.slot_bytes, lane.in);
    return Status::ok();
  };
  // The own encoding need not come back from the host where it is a cast that can be made again, meanwhile.
  const bool again = launches_later() && !plan.by_rows() && !job.residuals && part.elements > 0;
  PACELINE_RETURN_IF_ERROR(await_own(job, index, lane));
  if (again)
    PACELINE_RETURN_IF_ERROR(kernels_->encode(
        plan.request.format, cast_of(job, part, shape_.node, lane.in_slots + me * piece.slot_bytes),
        lane.in));
  PACELINE_RETURN_IF_ERROR(await_theirs(job, index, lane));
  if (plan.by_rows()) {
    PACELINE_RETURN_IF_ERROR(enqueue_rows_in(job, index, lane));
  } else if (part.elements > 0) {
    PACELINE_RETURN_IF_ERROR(copy(0, again ? me : nodes));
    if (again) PACELINE_RETURN_IF_ERROR(copy(me + 1, nodes));
    std::vector<cu::DevicePtr> encodings;
    for (uint64_t n = 0; n < nodes; ++n) encodings.push_back(lane.in_slots + n * piece.slot_bytes);
    device::cuda::CombineArguments c;
    c.encoded = encodings;
    c.elements = part.elements;
    c.scale = plan.hops == 1 ? job.scale_out : 1.0F;
    c.output = element(plan, job.target, part.first);
    PACELINE_RETURN_IF_ERROR(kernels_->combine(plan.request.format, c, lane.in));
  }
  return plan.hops == 2 ? enqueue_sum(job, index) : Status::ok();
}

Status Path::enqueue_sum(Job& job, size_t index) {
  const auto& o = *job.operation;
  const auto& plan = *o.plan;
  const auto& piece = plan.pieces[index];
  auto& lane = lanes_[static_cast<size_t>(piece.lane)];
  const Span part = plan.part(piece, shape_.node);
  if (part.elements > 0) {
    device::cuda::EncodeArguments e;
    e.gradient = element(plan, job.data, part.first);
    e.elements = part.elements;
    e.encoded = lane.sum_slot;
    if (job.sum_residuals) {
      const std::lock_guard lock(sums_books_);
      PACELINE_ASSIGN(auto place, sum_residuals_->place(ranges_of(job, part), lane.in));
      e.residual = place.before;
      e.next_residual = place.after;
    }
    PACELINE_RETURN_IF_ERROR(kernels_->encode(plan.request.format, e, lane.in));
    const auto own = piece.back_offset + static_cast<uint64_t>(shape_.node) * piece.slot_bytes;
    PACELINE_CUDA_CALL(api_, memcpy_dtoh_async, o.host + own, lane.sum_slot,
                       plan.part_bytes(piece, shape_.node), lane.in);
  }
  const uint32_t flag = job.back_flags[index];
  PACELINE_CUDA_CALL(api_, stream_write_value32, lane.in, Flags::address(flags_.sums(piece.lane)),
                     flag, 0);
  PACELINE_CUDA_CALL(api_, event_record, lane.sums_out[flag % lane.sums_out.size()], lane.in);
  return Status::ok();
}

Status Path::enqueue_back(Job& job, size_t index) {
  const auto& o = *job.operation;
  const auto& plan = *o.plan;
  const auto& piece = plan.pieces[index];
  auto& lane = lanes_[static_cast<size_t>(piece.lane)];
  const uint32_t flag = job.back_flags[index];
  // This rank's own sum. (Where later pieces have used the event again, theirs too: they never wait for this one.)
  PACELINE_CUDA_CALL(api_, stream_wait_event, lane.back, lane.sums_out[flag % lane.sums_out.size()],
                     0);
  PACELINE_RETURN_IF_ERROR(await(lane.back, flags_.back(piece.lane), flag));
  PACELINE_CUDA_CALL(api_, memcpy_htod_async, lane.back_slots, o.host + piece.back_offset,
                     static_cast<uint64_t>(shape_.nodes) * piece.slot_bytes, lane.back);
  for (int n = 0; n < shape_.nodes; ++n) {
    const Span part = plan.part(piece, n);
    if (part.elements == 0) continue;
    const cu::DevicePtr encoding = lane.back_slots + static_cast<uint64_t>(n) * piece.slot_bytes;
    device::cuda::CombineArguments c;
    c.encoded = {&encoding, 1};
    c.elements = part.elements;
    c.scale = job.scale_out;
    c.output = element(plan, job.data, part.first);
    PACELINE_RETURN_IF_ERROR(kernels_->combine(plan.request.format, c, lane.back));
  }
  return Status::ok();
}

Status Path::enqueue_end(Job& job) {
  const auto& o = *job.operation;
  if (job.all_out != nullptr) PACELINE_CUDA_CALL(api_, stream_wait_event, gather_, job.all_out, 0);
  // The gradient must not be gathered over before it is encoded, where this rank has no piece of its own.
  if (launches_later()) PACELINE_RETURN_IF_ERROR(await(gather_, flags_.out(), job.out_after));
  for (auto& lane : std::span(lanes_).first(o.plan->lanes_used())) {
    const bool back = o.plan->hops == 2;
    const auto done = back ? lane.back_done : lane.in_done;
    PACELINE_CUDA_CALL(api_, event_record, done, back ? lane.back : lane.in);
    PACELINE_CUDA_CALL(api_, stream_wait_event, gather_, done, 0);
  }
  if (o.copies) PACELINE_RETURN_IF_ERROR(copies_->put(*o.plan, job.data, gather_));
  PACELINE_CUDA_CALL(api_, stream_write_value32, gather_, Flags::address(flags_.done()),
                     static_cast<uint32_t>(o.sequence), 0);
  if (o.meets)
    PACELINE_RETURN_IF_ERROR(await(gather_, flags_.met(), static_cast<uint32_t>(o.sequence)));
  if (job.collective != nullptr)
    PACELINE_RETURN_IF_ERROR(enqueue_spread(job));
  else if (o.copies)
    PACELINE_RETURN_IF_ERROR(copies_->take(*o.plan, job.data, gather_));
  else if (shape_.local_size > 1)
    PACELINE_RETURN_IF_ERROR(node_->all_gather(*o.plan, job.data, gather_));
  if (shape_.local_size > 1)
    PACELINE_CUDA_CALL(api_, stream_write_value32, gather_, Flags::address(flags_.finished()),
                       static_cast<uint32_t>(o.sequence), 0);
  PACELINE_CUDA_CALL(api_, event_record, ends_[o.sequence % ends_.size()], gather_);
  return Status::ok();
}

}  // namespace paceline::gpu
