#include "gpu/pump.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/clock.h"
#include "base/log.h"
#include "base/pause.h"
#include "base/scheduling.h"
#include "device/cuda/layout.h"
#include "gpu/pump_track.h"
#include "gpu/rest.h"

namespace paceline::gpu {
namespace {

constexpr Time kNap = 15 * kMicrosecond;
constexpr Time kLongerNap = 50 * kMicrosecond;
constexpr Time kLookForNode = 70 * kMicrosecond;  // longer than for other things
// While so many bytes a wire are yet to leave nothing here is urgent: a thread needs 0.3 ms for them at 25 Gb/s.
constexpr uint64_t kPlenty = 1U << 20;
constexpr Time kBusyNap = 100 * kMicrosecond;
constexpr size_t kToldOperations = 4096;
constexpr Time kWatchEvery = 200 * kMillisecond;
// Pieces whose receives are posted between two looks at the flags: one takes as long as its sends, and neither must wait for
// the other's end.
constexpr int kPostsAtOnce = 1;

Time now() { return SteadyClock().now(); }

uint32_t tag_of(int lane, int hop) { return static_cast<uint32_t>(lane * 2 + hop); }

}  // namespace

Pump::Pump(const std::vector<Wire>& wires, Options options)
    : options_(std::move(options)), wires_(wires) {
  lanes_.resize(static_cast<size_t>(options_.lanes));
  if (options_.shares_link)
    share_.emplace(options_.page, options_.local_rank, options_.local_size,
                   static_cast<int>(wires_.size()));
  pump_thread_ = std::thread([this] { pump(); });
  if (options_.check) watch_thread_ = std::thread([this] { watch(); });
}

// --- The pump thread --------------------------------------------------------------------------------------------

void Pump::pump() {
  // No enter() here: this thread may begin when another one waits inside the driver already, for what is moved below.
  become_network_thread("paceline-pump");
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
    }
    if (must_fail_.load(std::memory_order_acquire)) fail_now();
    if (failed_.load(std::memory_order_acquire)) {
      std::unique_lock lock(mutex_);
      submitted_turn_.wait(lock, [&] { return stopping_; });
      return;
    }
    if (take_submitted()) meet();  // what has no pieces here has arrived
    bool moved = has_streamed();
    moved |= post_receives();  // first: the others send when they have heard of them
    moved |= send_pieces();
    moved |= send_sums();
    moved |= look_at_page();
    moved |= retire();
    share_link();
    hold(!operations_.empty());
    idle(moved);
  }
}

/// A piece that was not sent waits for this GPU, for other ranks of the node (NCCL) or, as a sum, for another node: what is
/// late is then not this rank's script.
void Pump::hold(bool holds) {
  if (holds == holding_) return;
  holding_ = holds;
  for (const auto& wire : wires_)
    wire.hold(holds ? "waits for its GPU or for other ranks" : nullptr);
}

bool Pump::take_submitted() {
  std::lock_guard lock(mutex_);
  const bool any = !inbox_.empty();
  while (!inbox_.empty()) {
    auto& o = inbox_.front();
    const auto& plan = *o->plan;
    o->pieces.resize(plan.pieces.size());
    if (o->brings) meetings_[NodePage::For::kGiven].to_ask.push_back(o);
    if (o->meets) meetings_[NodePage::For::kInPlace].to_ask.push_back(o);
    if (plan.hops == 2) {
      for (size_t i = 0; i < plan.pieces.size(); ++i)
        lanes_[static_cast<size_t>(plan.pieces[i].lane)].sums.emplace_back(o, i);
    }
    operations_.push_back(std::move(o));
    inbox_.pop_front();
  }
  return any;
}

/// The message between this node and another one of a piece. Their numbers' sum is the same at both ends, and spreads
/// what several nodes exchange of a short piece.
Deal Pump::deal(const Operation& o, size_t index, int node, uint64_t bytes) const {
  // Of rows the receiver does not know the length: they go whole.
  const uint64_t least = o.plan->by_rows() ? UINT64_MAX : options_.least_slice;
  return {bytes, index + static_cast<uint64_t>(options_.node + node),
          static_cast<int>(wires_.size()), least};
}

Status Pump::receive_slices(const Shared& o, size_t index, int node, std::byte* to, uint64_t bytes,
                            Kind kind) {
  const auto tag = tag_of(o->plan->pieces[index].lane, kind == Kind::kIn ? 0 : 1);
  const int rank = options_.peers[static_cast<size_t>(node)];
  for (const auto& s : deal(*o, index, node, bytes)) {
    const auto receive = [&](const Wire& wire, Notice notice) {
      return wire.receive(rank, tag, to + s.first, s.bytes, o->name.c_str(), o->plan->by_rows(),
                          notice);
    };
    PACELINE_RETURN_IF_ERROR(track(wires_[static_cast<size_t>(s.wire)], o, index, kind, receive));
  }
  return Status::ok();
}

Status Pump::send_slices(const Shared& o, size_t index, int node, const std::byte* from,
                         uint64_t bytes, int hop) {
  const auto tag = tag_of(o->plan->pieces[index].lane, hop);
  const int rank = options_.peers[static_cast<size_t>(node)];
  wire_bytes_ += bytes;
  for (const auto& s : deal(*o, index, node, bytes)) {
    const auto send = [&](const Wire& wire, Notice notice) {
      return wire.send(rank, tag, from + s.first, s.bytes, o->name.c_str(), o->plan->by_rows(),
                       notice);
    };
    PACELINE_RETURN_IF_ERROR(
        track(wires_[static_cast<size_t>(s.wire)], o, index, Kind::kSend, send, s.bytes));
  }
  return Status::ok();
}

Status Pump::post_piece(const Shared& o, size_t index) {
  const auto& plan = *o->plan;
  const auto& piece = plan.pieces[index];
  auto& state = o->pieces[index];
  const int me = options_.node;
  const int nodes = plan.request.shape.nodes;
  {
    std::lock_guard lock(mutex_);
    auto& lane = lanes_[static_cast<size_t>(piece.lane)];
    lane.in.emplace_back(o, index);
    if (plan.hops == 2) lane.back.emplace_back(o, index);
    for (int n = 0; n < nodes; ++n) {
      if (n == me) continue;
      if (plan.sends(n)) state.in_left += deal(*o, index, n, plan.part_bytes(piece, me)).count();
      if (plan.hops == 2) state.back_left += deal(*o, index, n, plan.part_bytes(piece, n)).count();
    }
    state.in = state.in_left == 0;
    state.back = state.back_left == 0;
    advance(lane);
  }
  for (int n = 0; n < nodes; ++n) {
    if (n == me) continue;
    const auto slot = plan.slot(piece, n);
    // With one hop every part is the whole piece.
    if (plan.sends(n))
      PACELINE_RETURN_IF_ERROR(receive_slices(o, index, n, o->host + piece.in_offset + slot,
                                              plan.part_bytes(piece, me), Kind::kIn));
    if (plan.hops == 2)
      PACELINE_RETURN_IF_ERROR(receive_slices(o, index, n, o->host + piece.back_offset + slot,
                                              plan.part_bytes(piece, n), Kind::kBack));
  }
  return Status::ok();
}

bool Pump::post_receives() {
  int budget = kPostsAtOnce;
  bool moved = false;
  while (posting_ < operations_.size() && budget > 0) {
    const auto& o = operations_[posting_];
    if (o->posted == o->plan->pieces.size()) {
      ++posting_;
      continue;
    }
    if (o->tenant > retired()) break;  // its memory is still being sent from, or read by the GPU
    if (auto status = post_piece(o, o->posted); !status) {
      fail(status);
      return true;
    }
    ++o->posted;
    --budget;
    moved = true;
  }
  if (moved) meet();  // pieces that nobody sends here have arrived
  return moved;
}

Status Pump::send_piece(const Shared& o, size_t index) {
  const auto& plan = *o->plan;
  const auto& piece = plan.pieces[index];
  const int me = options_.node;
  const int nodes = plan.request.shape.nodes;
  uint64_t of_rows = 0;
  if (plan.by_rows()) {
    PACELINE_ASSIGN(of_rows,
                    rows_to_send(*o, piece, o->host + piece.in_offset + plan.slot(piece, me)));
  }
  // Each begins with its neighbour, so that not all send to one node at a time.
  for (int step = 1; step < nodes && plan.sends(me); ++step) {
    const int n = (me + step) % nodes;
    const auto bytes = plan.by_rows() ? of_rows : plan.part_bytes(piece, plan.hops == 1 ? me : n);
    if (bytes == 0) continue;
    const auto* from = plan.scatters() ? o->host + piece.out_offset + plan.slot(piece, n)
                                       : o->host + piece.in_offset + plan.slot(piece, me);
    PACELINE_RETURN_IF_ERROR(send_slices(o, index, n, from, bytes, 0));
  }
  return Status::ok();
}

/// By the rank that met it: which rank's numbers these are says where to look, and others need not have any.
void Pump::count_saturated(const Operation& o) {
  ++saturated_;
  if (!log::first("gpu-saturated")) return;
  const auto& format = o.plan->request.format;
  const bool fp16 = device::cuda::dense_wire_dtype(format) == DType::kFloat16;
  const bool is_cast = format.codec == device::cuda::WireCodec::kFp16;
  // What is sent is finite: a loss scaler that looks for Inf does not lower its scale by itself.
  log::warning(
      "rank {}: {} ({}) has finite numbers beyond {}, which are sent as the largest one; no "
      "GradScaler sees that: {}. Said once; paceline_cuda_stats counts such operations",
      options_.peers[static_cast<size_t>(options_.node)], o.name, o.plan->describe_data(),
      fp16 ? "fp16's 65504" : "bf16's 3.39e38",
      is_cast ? "make PACELINE_GRADIENT_SCALE (also below 1) or the loss scale smaller, or "
                "use bf16 in fp16's place"
              : "make the loss scale smaller");
}

Status Pump::send_report(const Shared& o) {
  const auto bits =
      o->plan->reports() ? *reinterpret_cast<const uint32_t*>(o->host + kReportOffset) : 0;
  if ((bits & device::cuda::kReportCorrupted) != 0)
    return {Code::kCorrupted,
            fmt::format("{}: an encoding holds impossible counts or positions", o->name)};
  o->report = static_cast<int32_t>(std::min<uint64_t>(o->rows, Operation::kNonFinite - 1));
  if ((bits & device::cuda::kReportNonFinite) != 0) o->report |= Operation::kNonFinite;
  if ((bits & device::cuda::kReportSaturated) != 0) count_saturated(*o);
  const auto shape = o->plan->describe_data();
  return track(wires_.front(), o, 0, Kind::kReport, [&](const Wire& wire, Notice notice) {
    return wire.largest(&o->report, o->name.c_str(), shape.c_str(), notice);
  });
}

bool Pump::send_pieces() {
  bool moved = false;
  while (sending_ < operations_.size()) {
    const auto& o = operations_[sending_];
    const bool last = o->sent == o->plan->pieces.size();
    const uint32_t out = Flags::load(options_.flags.out());
    const bool flagged = last ? o->plan->reports() : o->plan->sends(options_.node);
    // The report has come with the last piece, if there is one.
    const size_t flags = last && o->sent > 0 ? o->sent : o->sent + 1;
    if (flagged && !reached(out, o->out_before + static_cast<uint32_t>(flags))) break;
    // A stream that a failure has let go on may have encoded what is not there.
    if (failed_.load(std::memory_order_acquire)) break;
    auto status = last ? send_report(o) : send_piece(o, o->sent);
    if (!status) {
      fail(status);
      return true;
    }
    ++o->sent;
    if (last) ++sending_;
    moved = true;
    if (o->sent == o->plan->pieces.size()) all_are_out(*o);
  }
  return moved;
}

/// All pieces of this rank have been copied out: the lanes wait for the network alone.
void Pump::all_are_out(Operation& o) {
  out_at_[o.sequence % kOutTimes].store(now(), std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    --o.until_meeting;
  }
  meet();
}

Status Pump::send_sum(const Shared& o, size_t index) {
  const auto& plan = *o->plan;
  const auto& piece = plan.pieces[index];
  const int me = options_.node;
  const int nodes = plan.request.shape.nodes;
  const auto bytes = plan.part_bytes(piece, me);
  if (bytes == 0) return Status::ok();
  const auto* from = o->host + piece.back_offset + static_cast<uint64_t>(me) * piece.slot_bytes;
  for (int step = 1; step < nodes; ++step) {
    const int n = (me + step) % nodes;
    PACELINE_RETURN_IF_ERROR(send_slices(o, index, n, from, bytes, 1));
  }
  return Status::ok();
}

bool Pump::send_sums() {
  bool moved = false;
  for (int l = 0; l < options_.lanes; ++l) {
    auto& lane = lanes_[static_cast<size_t>(l)];
    while (!lane.sums.empty() && reached(Flags::load(options_.flags.sums(l)), lane.sums_seen + 1)) {
      ++lane.sums_seen;
      auto [o, index] = lane.sums.front();
      lane.sums.pop_front();
      if (auto status = send_sum(o, index); !status) {
        fail(status);
        return true;
      }
      moved = true;
    }
  }
  return moved;
}

bool Pump::retire() {
  bool moved = false;
  while (!operations_.empty() && sending_ > 0 && posting_ > 0) {
    const auto& o = operations_.front();
    if (!reached(Flags::load(options_.flags.done()), static_cast<uint32_t>(o->sequence))) break;
    std::lock_guard lock(mutex_);
    if (o->sends_left > 0 || o->arrivals_left > 0) break;
    if (!failure_) return false;
    retired_.store(o->sequence, std::memory_order_release);
    Flags::store(options_.flags.retired(), static_cast<uint32_t>(o->sequence));
    ++finished_;
    arrived_turn_.notify_all();
    operations_.pop_front();
    --sending_;
    --posting_;
    moved = true;
  }
  return moved;
}

uint64_t Pump::to_leave() const {
  uint64_t sum = 0;
  for (const auto& bytes : to_leave_) sum += bytes.load(std::memory_order_relaxed);
  return sum;
}

void Pump::share_link() {
  if (!share_) return;
  std::array<uint64_t, kMostWires> waiting{};
  for (size_t w = 0; w < wires_.size(); ++w)
    waiting[w] = to_leave_[w].load(std::memory_order_relaxed);
  const auto parts = share_->deal(std::span(waiting).first(wires_.size()), now());
  for (size_t w = 0; w < parts.size(); ++w) wires_[w].weigh(parts[w]);
}

void Pump::watch_over() {
  Status status;
  for (const auto& wire : wires_) {
    if (status) status = wire.health();
  }
  if (!status) fail(status);
}

void Pump::watch() {
  options_.enter();
  std::unique_lock lock(mutex_);
  const auto over = [&] { return stopping_ || !failure_; };
  while (!stopping_turn_.wait_for(lock, std::chrono::nanoseconds(kWatchEvery), over)) {
    lock.unlock();
    const auto status = options_.check();
    lock.lock();
    if (status || over()) continue;
    lock.unlock();
    fail(status);
    return;
  }
}

void Pump::idle(bool moved) {
  const Time t = now();
  if (t - last_look_ > kWatchEvery) {
    last_look_ = t;
    watch_over();
  }
  if (moved) {
    last_moved_ = t;
    return;
  }
  if (operations_.empty()) {
    std::unique_lock lock(mutex_);
    submitted_turn_.wait_for(lock, std::chrono::nanoseconds(kWatchEvery), [&] {
      return stopping_ || !inbox_.empty() || !failure_ || must_fail_;
    });
    last_moved_ = now();
    return;
  }
  // The ranks of a node are about as far, and what they wait for is a word in memory.
  const bool awaits =
      std::ranges::any_of(meetings_, [](const NodeMeeting& m) { return m.awaits.load(); });
  const Time hard = options_.page != nullptr && awaits ? kLookForNode : 0;
  const Time nap = nap_after(std::max<Time>(t - last_moved_ - hard, 0), kNap, kLongerNap);
  if (nap == 0)
    pause_cpu();
  else
    take_nap(to_leave() >= kPlenty * wires_.size() ? std::max(nap, kBusyNap) : nap);
}

// --- What has ended, on the wires' threads -----------------------------------------------------------------------

void Pump::ended(const Ticket& ticket, paceline_op op, paceline_code code) {
  if (auto status = ticket.wire->ended(op, code); !status)
    fail_soon(std::move(status));
  else
    finish(ticket);
  meet();
  const std::lock_guard lock(mutex_);
  if (--under_way_ == 0) none_under_way_.notify_all();
}

/// fail() tells the other ranks, over this wire too, and ends NCCL: not on the thread that drives a wire.
void Pump::fail_soon(Status why) {
  const std::lock_guard lock(mutex_);
  if (must_fail_ || !failure_) return;
  to_fail_with_ = std::move(why);
  must_fail_.store(true, std::memory_order_release);
  submitted_turn_.notify_all();
  none_under_way_.notify_all();  // for stop(), where the pump's thread has ended
}

void Pump::fail_now() {
  Status why;
  {
    const std::lock_guard lock(mutex_);
    why = to_fail_with_;
  }
  fail(why);
}

void Pump::launched(Operation& operation) {
  const std::lock_guard lock(mutex_);
  if (failure_) arrived(operation);
}

void Pump::arrived(Operation& o) {
  if (--o.arrivals_left > 0) return;
  ++arrived_;
  arrived_early_.insert(o.sequence);
  while (!arrived_early_.empty() && *arrived_early_.begin() == arrived_through_ + 1) {
    arrived_early_.erase(arrived_early_.begin());
    if (++arrived_through_ == noted_) noted_at_ = now();
    arrived_turn_.notify_all();
  }
}

/// Writes the flags of pieces that have arrived, in the lane's order. With the mutex held.
void Pump::advance(Lane& lane) {
  if (!failure_) return;
  const auto index = static_cast<int>(&lane - lanes_.data());
  while (!lane.in.empty() && lane.in.front().first->pieces[lane.in.front().second].in) {
    Flags::store(options_.flags.in(index), ++lane.in_flag);
    --lane.in.front().first->until_meeting;
    arrived(*lane.in.front().first);
    lane.in.pop_front();
  }
  while (!lane.back.empty() && lane.back.front().first->pieces[lane.back.front().second].back) {
    Flags::store(options_.flags.back(index), ++lane.back_flag);
    --lane.back.front().first->until_meeting;
    arrived(*lane.back.front().first);
    lane.back.pop_front();
  }
}

void Pump::finish(const Ticket& ticket) {
  std::lock_guard lock(mutex_);
  auto& o = *ticket.operation;
  if (ticket.kind == Kind::kSend) {
    --o.sends_left;
    to_leave_[static_cast<size_t>(ticket.wire - wires_.data())] -= ticket.bytes;
    return;
  }
  if (ticket.kind == Kind::kReport) {
    if ((o.report & Operation::kNonFinite) != 0) {
      finite_ = false;
      if (not_finite_.size() < kToldOperations) not_finite_.push_back(o.sequence);
    }
    arrived(o);
    return;
  }
  if (ticket.kind == Kind::kMeeting) {
    const auto what = static_cast<NodePage::For>(ticket.piece);
    o.met[what] = true;
    pass(what);
    return;
  }
  auto& state = o.pieces[ticket.piece];
  if (o.copies) come_.store(true, std::memory_order_relaxed);
  if (ticket.kind == Kind::kIn)
    state.in = --state.in_left == 0;
  else
    state.back = --state.back_left == 0;
  advance(lanes_[static_cast<size_t>(o.plan->pieces[ticket.piece].lane)]);
}

}  // namespace paceline::gpu
