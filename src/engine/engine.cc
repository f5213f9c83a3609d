#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/log.h"
#include "engine/engine_impl.h"

namespace paceline::engine {
namespace {

using plan::Collective;

// Local work per operation and per call of progress(): small enough that the wire is looked after
// every few tens of microseconds, large enough that looking costs nothing.
constexpr uint64_t kWorkSlice = 256 * 1024;
constexpr uint64_t kWorkBudget = 2 * kWorkSlice;  // of all operations in one call, the oldest first
constexpr Time kAdmissionPatience = 20 * kMillisecond;
constexpr std::size_t kIdleExecutors = 4;
constexpr std::size_t kRemembered = 256;

uint64_t hash_counts(const std::vector<uint64_t>& counts) {
  if (counts.empty()) return 0;
  uint64_t h = counts.size();
  for (auto c : counts) h = mix(h, c);
  return h | 1;
}

void describe_into(const Operation& o, plan::Algorithm algorithm, Description& d) {
  d.kind = static_cast<uint8_t>(o.collective);
  d.dtype = o.dtype;
  d.op = o.op;
  d.algorithm = algorithm;
  d.codec = o.codec;
  d.root = o.root;
  d.count = o.count;
  d.counts_hash =
      o.collective == Collective::kAllToAll && !o.send_counts.empty() ? 1 : hash_counts(o.counts);
  d.name = shortened(o.name, Description::kTextLimit);
  d.shape = shortened(o.shape, Description::kTextLimit);
}

bool is_in_place(const Operation& o, Rank me) {
  switch (o.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
      return o.input == o.output;
    case Collective::kBroadcast:
      return me != o.root || o.input == o.output;
    case Collective::kAllGather: {
      uint64_t before = 0;
      for (Rank r = 0; r < me; ++r)
        before += o.counts.empty() ? o.count : o.counts[static_cast<std::size_t>(r)];
      return o.input == static_cast<const std::byte*>(o.output) + before * dtype_size(o.dtype);
    }
    default:
      return false;
  }
}

bool overlap(const void* a, uint64_t a_bytes, const void* b, uint64_t b_bytes) {
  auto x = reinterpret_cast<uintptr_t>(a);
  auto y = reinterpret_cast<uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && x < y + b_bytes && y < x + a_bytes;
}

}  // namespace

EngineImpl::EngineImpl(const EngineOptions& options, const bootstrap::Topology& topology,
                       wire::Channel& channel)
    : options_(options), topology_(topology), channel_(channel) {
  gone_.resize(static_cast<std::size_t>(topology_.size()));
  std::vector<Rank> world(static_cast<std::size_t>(topology_.size()));
  for (std::size_t i = 0; i < world.size(); ++i) world[i] = static_cast<Rank>(i);
  auto made = create_group(world);
  (void)made;  // the world is never refused
  // Connections of the control tree must exist before a failure: only then does it show, and
  // travel.
  ControlNote hello;
  for (Rank r : control_neighbours(topology_.rank, topology_.size())) post(r, hello);
}

uint32_t EngineImpl::take_record() {
  if (free_records_.empty()) {
    records_.push_back(std::make_unique<Record>());
    free_records_.push_back(static_cast<uint32_t>(records_.size() - 1));
  }
  auto slot = free_records_.back();
  free_records_.pop_back();
  return slot;
}

const Record* EngineImpl::find(OpId id) const {
  auto slot = static_cast<std::size_t>(id & 0xffffff);
  if (slot >= records_.size()) return nullptr;
  const Record* r = records_[slot].get();
  return r->state != Record::State::kFree && r->id == id ? r : nullptr;
}
Record* EngineImpl::find(OpId id) { return const_cast<Record*>(std::as_const(*this).find(id)); }

void EngineImpl::fill_request(const Operation& o, const Group& g, plan::PlanRequest& q) const {
  q.collective = o.collective;
  q.dtype = o.dtype;
  q.op = o.op;
  q.count = o.count;
  q.counts = o.counts;
  if (q.counts.empty() &&
      (o.collective == Collective::kAllGather || o.collective == Collective::kReduceScatter ||
       o.collective == Collective::kGather || o.collective == Collective::kScatter)) {
    q.counts.assign(g.ranks.size(), o.count);
  }
  q.send_counts = o.send_counts;
  q.receive_counts = o.receive_counts;
  if (o.collective == Collective::kAllToAll && o.send_counts.empty()) {
    q.send_counts.assign(g.ranks.size(), o.count);
    q.receive_counts.assign(g.ranks.size(), o.count);
  }
  q.root = o.root;
  q.in_place = is_in_place(o, g.me);
  q.codec = o.codec;
  q.lanes = options_.lanes;
  q.piece_bytes = options_.piece_bytes;
  q.inner_size = options_.inner_size;
  q.algorithm = o.algorithm;
  if (q.algorithm == plan::Algorithm::kAuto && o.collective == Collective::kAllReduce)
    q.algorithm = settled_algorithm(options_, q, g.shape);
}

Result<plan::PlanRequest> EngineImpl::request_for(const Operation& operation) const {
  const Group* g = group(operation.group);
  if (g == nullptr)
    return Status(Code::kInvalidArgument, fmt::format("there is no group {}", operation.group));
  plan::PlanRequest q;
  fill_request(operation, *g, q);
  q.shape = g->shape;
  return q;
}

Result<std::shared_ptr<PreparedPlan>> EngineImpl::plan_for(const Operation& o, Group& g,
                                                           BufferBytes bytes) {
  fill_request(o, g, probe_);
  auto hash = hash_request(probe_);
  if (auto found = g.plans.find(hash, probe_)) {
    ++statistics_.plans_reused;
    return found;
  }
  auto request = probe_;
  request.shape = g.shape;
  PACELINE_ASSIGN(auto built, plan::build(request, g.me));
  log::debug("a plan for {} of {} elements: {}", plan::collective_name(o.collective), request.count,
             built.summary());
  PACELINE_ASSIGN(auto prepared, prepare(std::move(built), bytes.input, bytes.output));
  if (prepared->slots >> kSlotBits != 0) {
    return Status(
        Code::kUnsupported,
        fmt::format("{}: {} messages between two ranks are too many; raise the piece size",
                    plan::collective_name(o.collective), prepared->slots));
  }
  ++statistics_.plans_built;
  if (auto gone = g.plans.insert(hash, prepared)) {
    statistics_.predicted_link_bytes +=
        gone->runs == 0 ? 0 : gone->runs * gone->predicted_link_bytes(channel_.packets());
    g.idle.erase(gone.get());
  }
  return prepared;
}

Result<OpId> EngineImpl::submit(const Operation& o, Time now) {
  if (!failure_) return failure_;
  if (finishing_) return Status(Code::kAborted, "the communicator is being destroyed");
  Group* g = group(o.group);
  if (g == nullptr)
    return Status(Code::kInvalidArgument, fmt::format("there is no group {}", o.group));
  auto size = static_cast<Rank>(g->ranks.size());
  PACELINE_RETURN_IF_ERROR(validate(o, size, g->me));
  auto bytes = buffer_bytes(o, size, g->me);
  PACELINE_ASSIGN(auto prepared, plan_for(o, *g, bytes));

  auto slot = take_record();
  Record& r = *records_[slot];
  r.id = ++generation_ << 24 | slot;
  r.transfer = r.any_length = false;
  r.group = o.group;
  r.key = {g->stream, g->next_sequence++};
  describe_into(o, prepared->plan.request.algorithm, r.description);
  r.digest = digest_of(r.description);
  r.timeout = o.timeout > 0 ? o.timeout : options_.default_timeout;
  r.input_bytes = bytes.input;
  r.window_bytes = o.window_bytes;
  r.in_window = false;
  r.output = static_cast<std::byte*>(o.output);
  r.output_bytes = bytes.output;
  r.send_counts = o.send_counts;
  r.receive_counts = o.receive_counts;

  auto idle = g->idle.find(prepared.get());
  if (idle != g->idle.end() && !idle->second.empty()) {
    r.executor = std::move(idle->second.back());
    idle->second.pop_back();
  } else {
    r.executor = std::make_unique<Executor>(prepared);
  }
  r.binding = {};
  r.binding.input = static_cast<const std::byte*>(o.input);
  r.binding.output = r.output;
  r.binding.ranks = g->ranks;
  r.binding.tag = tag_of(r.key);
  r.binding.digest = r.digest;
  r.binding.send_counts = r.send_counts;
  r.binding.receive_counts = r.receive_counts;
  r.binding.cookie = static_cast<uint64_t>(slot) << 32;
  const bool selects = o.codec.codec == plan::Codec::kTopK;
  if (selects) {
    r.residuals.bind(residuals_, o);
    r.binding.residuals = &r.residuals;
    r.binding.workers = workers_;
  }
  // Another cut of the buckets makes other ranks encode what this one has residuals of, or none where all of it travels.
  const bool sums = o.op == ReduceOp::kSum || o.op == ReduceOp::kAverage;
  if (!o.segments.empty() && o.collective == Collective::kAllReduce && sums &&
      o.dtype == DType::kFloat32 && o.input == o.output) {
    if (!selects) r.residuals.bind(residuals_, o);
    r.residuals.hand_over(prepared->encoded, static_cast<float*>(o.output));
  }
  scratch_.note_bucket(std::max(bytes.input, bytes.output));
  active_.push_back(slot);
  begin(r, now);
  r.state = Record::State::kWaitingForScratch;
  ++waiting_;
  // First come, first served: an operation that needs scratch does not pass one that waits for it.
  // Nor does one that waits for its turn.
  const bool may_start =
      waiting_ == 1 || (r.executor->plan().plan.scratch_bytes == 0 && r.window_bytes == 0);
  if (may_start && !interlude_.is_open) try_start(r, false);
  return r.id;
}

void EngineImpl::begin(Record& r, Time now) {
  now_ = std::max(now_, now);
  r.deadline = after(now_, r.timeout);
  r.last_move = now_;
  r.stall_asked = 0;
  r.ended_once = -1;
  r.inquiry_silent_at = kNever;
  r.inquiry_over_at = kNever;
  r.asked.clear();
  r.outcome.status = Status::ok();
  r.outcome.finite = true;
  next_check_ = std::min({next_check_, r.deadline, after(now_, kSecond)});
}

// Gets the scratch and sets the executor off. Returns false while the bound on scratch, or its window, forbids it.
bool EngineImpl::try_start(Record& r, bool force) {
  if (r.window_bytes > 0 && windowed_ >= r.window_bytes && !force) return false;
  auto need = r.executor->plan().plan.scratch_bytes;
  // A reduce-scatter into a view of its own input, or the like: work on a copy of the input.
  const bool stage = !r.executor->plan().plan.request.in_place && r.binding.input != r.output &&
                     overlap(r.binding.input, r.input_bytes, r.output, r.output_bytes);
  const bool same = !r.executor->plan().plan.request.in_place && r.binding.input == r.output &&
                    r.input_bytes > 0 && r.output_bytes > 0;
  const uint64_t staged = stage || same ? r.input_bytes : 0;
  need = (need + 63) / 64 * 64;
  auto scratch = scratch_.acquire(need + staged, force);
  if (!scratch) return false;
  r.state = Record::State::kRunning;
  --waiting_;
  r.in_window = r.window_bytes > 0;
  if (r.in_window) windowed_ += r.input_bytes;
  if (need + staged > 0 && scratch->data == nullptr) {
    fail({Code::kResourceExhausted,
          fmt::format("{}: no memory for {} bytes of scratch on {}", r.description.title(),
                      need + staged, topology_.name(topology_.rank))},
         -1);
    return true;
  }
  r.scratch = *scratch;
  r.binding.scratch = scratch->data;
  if (staged > 0) {
    std::copy_n(r.binding.input, staged, scratch->data + need);
    r.binding.input = scratch->data + need;
  }
  r.executor->start(r.binding, channel_);
  settle(r);
  return true;
}

// Once those that have scratch or a window have rested for a while, and nothing has come to wait for one as long. What
// else moves does not count: it may never rest. Never while all are one group's: its order is the same on all ranks, so
// those that have theirs come to an end without those that wait, however late a rank is.
Time EngineImpl::forced_at() const {
  Time moved = last_admission_;
  const GroupId* one = nullptr;
  bool several = false;
  for (auto slot : active_) {
    const Record& r = *records_[slot];
    const bool waits = r.state == Record::State::kWaitingForScratch;
    const bool has = r.scratch.data != nullptr || r.in_window;
    if (!waits && !has) continue;
    moved = std::max(moved, r.last_move);
    several = several || (one != nullptr && *one != r.group);
    one = &r.group;
  }
  return several ? after(moved, kAdmissionPatience) : kNever;
}

void EngineImpl::admit_waiting(Time now) {
  if (waiting_ == 0) return;
  // Ranks may submit to different groups in different orders: the bound must not hold up what
  // others wait for.
  bool force = now >= forced_at();
  for (std::size_t i = 0; i < active_.size(); ++i) {
    Record& r = *records_[active_[i]];
    if (r.state != Record::State::kWaitingForScratch) continue;
    if (!try_start(r, force)) return;
    last_admission_ = now;
    if (force) return;
  }
}

// Looks whether a running operation has come to an end.
void EngineImpl::settle(Record& r) {
  if (r.state != Record::State::kRunning || r.transfer) return;
  if (!r.executor->failure()) {
    auto why = r.executor->failure();
    auto peer = r.executor->failed_peer();
    if (why.code() == Code::kMismatch && peer >= 0) {
      on_mismatch(r, peer, now_);
    } else if (peer >= 0) {
      suspect(peer, why);
    } else {
      auto text = why.message();
      if (Rank by = r.executor->damaged_by(); by >= 0) {
        text =
            fmt::format("{}, sent by {}; with PACELINE_CHECKSUM=on what TCP damages is sent again",
                        text, topology_.name(by));
      }
      fail({why.code(), fmt::format("{} on {}: {}", r.description.title(),
                                    topology_.name(topology_.rank), text)},
           -1);
    }
    return;
  }
  if (!r.executor->done()) return;
  check_finite(r);
  ++statistics_.operations;
  statistics_.payload_bytes += r.input_bytes;
  PreparedPlan& plan = r.executor->plan();
  if (plan.is_kept) {
    ++plan.runs;
  } else {
    statistics_.predicted_link_bytes += plan.predicted_link_bytes(channel_.packets());
  }
  end(r, Status::ok());
}

// Top-k: a run with an Inf or NaN in it has been decoded as NaN on every rank, the one that met it too. What a rank
// has of it depends on the plan's sharding, so each looks into every run; then all end alike.
void EngineImpl::check_finite(Record& r) {
  if (r.executor->plan().plan.algorithm != plan::Algorithm::kSparse) return;
  auto* out = reinterpret_cast<float*>(r.output);
  bool finite = true;
  for (auto offset : r.executor->plan().finite_samples) {
    if (std::isnan(out[offset / sizeof(float)])) finite = false;
  }
  r.outcome.finite = finite;
  if (!finite)
    std::fill_n(out, r.output_bytes / sizeof(float), std::numeric_limits<float>::quiet_NaN());
}

void EngineImpl::remember(const Record& r) {
  if (remembered_.size() < kRemembered) remembered_.resize(kRemembered);
  Remembered& m = remembered_[remembered_next_++ % kRemembered];
  m.key = r.key;
  m.digest = r.digest;
  m.description = r.description;
}

void EngineImpl::end(Record& r, Status status) {
  r.outcome.status = std::move(status);
  remember(r);
  release_resources(r);
  r.state = Record::State::kEnded;
  auto slot = static_cast<uint32_t>(r.id & 0xffffff);
  active_.erase(std::find(active_.begin(), active_.end(), slot));
  just_ended_.push_back(r.id);
}

void EngineImpl::release_resources(Record& r) {
  scratch_.release(r.scratch);
  r.scratch = {};
  if (r.in_window) windowed_ -= r.input_bytes;
  r.in_window = false;
  if (!r.executor) return;
  Group* g = group(r.group);
  // A plan that had to leave the cache meanwhile does not come again: what is made for it anew has another address.
  if (g != nullptr && failure_ && r.executor->plan().is_kept) {
    auto& idle = g->idle[&r.executor->plan()];
    if (idle.size() < kIdleExecutors) idle.push_back(std::move(r.executor));
  }
  r.executor.reset();
}

void EngineImpl::carried(const wire::Completion& c, Time now) {
  auto slot = static_cast<std::size_t>(c.cookie >> 32);
  if (slot >= records_.size()) return;
  Record& r = *records_[slot];
  if (r.state != Record::State::kRunning) return;
  r.last_move = now;
  if (!r.transfer) {
    r.executor->complete(static_cast<uint32_t>(c.cookie), c, channel_);
    return settle(r);
  }
  if (c.status && (r.sending || r.any_length || c.bytes == r.output_bytes)) {
    ++statistics_.operations;
    statistics_.payload_bytes += r.input_bytes;
    return end(r, Status::ok());
  }
  if (c.status || c.status.code() == Code::kMismatch) return on_mismatch(r, r.peer, now);
  suspect(r.peer, c.status);
}

// The oldest first: what is to be sent leaves before more is made ready. False: there was nothing of this kind.
bool EngineImpl::run_local_steps(bool sums) {
  uint64_t done = 0;
  bool any = false;
  for (std::size_t i = 0; i < active_.size() && done < kWorkBudget; ++i) {
    Record& r = *records_[active_[i]];
    if (r.state != Record::State::kRunning || r.transfer || !r.executor->has_work()) continue;
    if (r.executor->only_adds_up() != sums) continue;
    done += r.executor->work(kWorkSlice, channel_, interlude_);
    any = true;
    r.last_move = now_;
    auto before = active_.size();
    settle(r);
    if (!failure_) break;
    if (active_.size() < before) --i;
  }
  return any;
}

bool EngineImpl::progress(Time now, std::vector<OpId>& ended) {
  now_ = std::max(now_, now);
  events_.clear();
  const bool aborted_before = channel_aborted_;
  bool moved = channel_.progress(now, events_);
  if (aborted_before) buffers_free_ = true;
  for (const auto& n : events_.notes) on_note(n, now_);
  for (const auto& c : events_.completions) {
    if (failure_) carried(c, now_);
  }
  for (const auto& l : events_.losses) on_loss(l);
  if (failure_ && now_ >= suspicion_.due && !farewell_)
    fail_with_peer(suspicion_.peer, suspicion_.why);
  if (failure_) {
    // What others wait for goes before what only this rank does: a top-k sum of an old bucket would keep a new one's
    // encoding, and with it the link, waiting for a millisecond.
    moved |= run_local_steps(false) || run_local_steps(true);
    admit_waiting(now_);
    if (now_ >= next_check_) check_timers(now_);
    if (finishing_) try_goodbye();
  }
  if (!failure_ && buffers_free_ && !is_telling()) {
    while (!active_.empty()) {
      Record& r = *records_[active_.front()];
      end(r, failure_);
    }
    waiting_ = 0;
  }
  ended.insert(ended.end(), just_ended_.begin(), just_ended_.end());
  moved |= !just_ended_.empty();
  just_ended_.clear();
  return moved;
}

Time EngineImpl::next_timer() const {
  Time t = channel_.next_timer();
  if (!failure_) {
    if (!buffers_free_) return std::min(t, now_);
    if (is_telling()) return std::min(t, tell_until_);
    return active_.empty() ? t : std::min(t, now_);
  }
  if (!farewell_) t = std::min(t, suspicion_.due);
  if (!just_ended_.empty()) return now_;
  bool waits = false;
  for (auto slot : active_) {
    const Record& r = *records_[slot];
    if (r.state == Record::State::kRunning && !r.transfer && r.executor->has_work()) return now_;
    if (r.state == Record::State::kWaitingForScratch) waits = true;
  }
  if (waits) t = std::min(t, std::max(forced_at(), now_));
  if (!active_.empty()) t = std::min(t, next_check_);
  return farewell_until_ > now_ ? std::min(t, farewell_until_) : t;
}

const Outcome* EngineImpl::outcome(OpId id) const {
  const Record* r = find(id);
  return r != nullptr && r->state == Record::State::kEnded ? &r->outcome : nullptr;
}

bool EngineImpl::met_neighbours(OpId id) const {
  const Record* r = find(id);
  if (r == nullptr || r->state == Record::State::kEnded) return true;
  return r->state == Record::State::kRunning && r->executor != nullptr &&
         r->executor->met_neighbours();
}

void EngineImpl::forget(OpId id) {
  Record* r = find(id);
  if (r == nullptr || r->state != Record::State::kEnded) return;
  r->state = Record::State::kFree;
  free_records_.push_back(static_cast<uint32_t>(id & 0xffffff));
}

Status EngineImpl::scale_residuals(double factor) { return residuals_.scale(factor); }
Status EngineImpl::read_residual(uint64_t key, std::span<float> data) const {
  return residuals_.read(key, data);
}
Status EngineImpl::write_residual(uint64_t key, std::span<const float> data) {
  return residuals_.write(key, data);
}

Statistics EngineImpl::statistics() const {
  auto s = statistics_;
  for (const auto& g : groups_) {
    if (!g || !g->alive) continue;
    g->plans.for_each([&](PreparedPlan& p) {
      if (p.runs > 0) s.predicted_link_bytes += p.runs * p.predicted_link_bytes(channel_.packets());
    });
  }
  s.scratch_bytes = scratch_.high_water();
  s.residual_bytes = residuals_.statistics().bytes;
  return s;
}

std::unique_ptr<Engine> make_engine(const EngineOptions& options,
                                    const bootstrap::Topology& topology, wire::Channel& channel) {
  return std::make_unique<EngineImpl>(options, topology, channel);
}

}  // namespace paceline::engine
