#include "engine/executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>

#include "device/cpu/kernels.h"
#include "engine/describe.h"

namespace paceline::engine {
namespace {

using plan::Buffer;
using plan::Step;
using plan::StepKind;

// Multiple of every element size and of the SIMD width: where a slice may end.
constexpr uint64_t kSliceAlign = 4096;
constexpr uint64_t kAnswerPart = 16 * 1024;

bool is_network(StepKind k) {
  return k == StepKind::kSend || k == StepKind::kReceive || k == StepKind::kReceiveReduce ||
         k == StepKind::kReceiveDecode || k == StepKind::kReceiveDecodeReduce;
}
bool has_sink(StepKind k) {
  return k == StepKind::kReceiveReduce || k == StepKind::kReceiveDecode ||
         k == StepKind::kReceiveDecodeReduce;
}
bool is_sparse(const plan::PlanRequest& r) { return r.codec.codec == plan::Codec::kTopK; }

std::span<const float> floats(const std::byte* p, uint64_t bytes) {
  return {reinterpret_cast<const float*>(p), bytes / sizeof(float)};
}
std::span<float> floats(std::byte* p, uint64_t bytes) {
  return {reinterpret_cast<float*>(p), bytes / sizeof(float)};
}

}  // namespace

Executor::Executor(std::shared_ptr<PreparedPlan> plan) : plan_(std::move(plan)) {
  const auto& steps = plan_->plan.steps;
  waits_.resize(steps.size());
  posted_.resize(steps.size());
  lengths_.resize(steps.size());
  answered_.resize(steps.size());
  held_.resize(steps.size());
  ready_.reserve(steps.size());
  unheard_.reserve(plan_->neighbours.size());
  cascade_.reserve(steps.size());
  sink_of_.resize(steps.size());
  uint32_t sinks = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (has_sink(steps[i].kind)) sink_of_[i] = sinks++;
  }
  sinks_.resize(sinks);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (has_sink(steps[i].kind)) sinks_[sink_of_[i]].bind(this, static_cast<uint32_t>(i));
  }
}

void Executor::start(const Binding& binding, wire::Channel& channel) {
  binding_ = binding;
  std::copy(plan_->waits.begin(), plan_->waits.end(), waits_.begin());
  std::fill(posted_.begin(), posted_.end(), 0);
  ready_.clear();
  current_ = plan::kNoStep;
  slice_done_ = 0;
  unheard_ = plan_->neighbours;
  remaining_ = waits_.size();
  failure_ = Status::ok();
  failed_peer_ = damaged_by_ = -1;
  for (uint32_t i = 0; i < plan_->waits.size(); ++i) {
    if (plan_->waits[i] == 0) make_ready(i, channel);
  }
}

std::byte* Executor::at(const plan::Range& r) {
  switch (r.buffer) {
    case Buffer::kInput:
      return const_cast<std::byte*>(binding_.input) + r.offset;
    case Buffer::kOutput:
      return binding_.output + r.offset;
    case Buffer::kScratch:
      return binding_.scratch + r.offset;
  }
  return nullptr;
}

void Executor::make_ready(uint32_t step, wire::Channel& channel) {
  const Step& s = plan_->plan.steps[step];
  if (is_network(s.kind)) {
    post(step, channel);
  } else if (s.kind == StepKind::kNothing) {
    release(step, channel);
  } else {
    ready_.push_back(step);
    std::push_heap(ready_.begin(), ready_.end(), std::greater<>());
  }
}

// Marks `step` as done and readies what waited for it alone. Joins (kNothing) are released in turn,
// in a loop and not by recursion, for chains of them may be long.
void Executor::release(uint32_t step, wire::Channel& channel) {
  const bool outermost = cascade_.empty();
  cascade_.push_back(step);
  if (!outermost) return;
  for (std::size_t next = 0; next < cascade_.size(); ++next) {
    auto at = cascade_[next];
    --remaining_;
    for (auto k = plan_->successor_start[at]; k < plan_->successor_start[at + 1]; ++k) {
      auto successor = plan_->successors[k];
      if (--waits_[successor] == 0) make_ready(successor, channel);
    }
  }
  cascade_.clear();
}

uint32_t Executor::digest_for(const Step& s) const {
  if (binding_.send_counts.empty()) return binding_.digest;
  auto peer = static_cast<std::size_t>(s.peer);
  auto count =
      s.kind == StepKind::kSend ? binding_.send_counts[peer] : binding_.receive_counts[peer];
  auto folded = static_cast<uint32_t>(mix(binding_.digest, count));
  return folded == 0 ? 1 : folded;
}

void Executor::post(uint32_t step, wire::Channel& channel) {
  const Step& s = plan_->plan.steps[step];
  auto peer = binding_.ranks[static_cast<std::size_t>(s.peer)];
  auto tag = binding_.tag + s.slot;
  auto cookie = binding_.cookie + step;
  posted_[step] = 1;
  if (s.kind == StepKind::kSend) {
    auto bytes =
        s.bytes_from == plan::kNoStep ? s.src.bytes : std::min(s.src.bytes, lengths_[s.bytes_from]);
    const std::span<const std::byte> data{at(s.src), bytes};
    wire::Answer answer;
    if (s.answer.bytes != 0) answer.place = at(s.answer);
    if (s.answer_of != plan::kNoStep) answer.given = answered_[s.answer_of];
    channel.send_with_answer(peer, tag, digest_for(s), data, cookie, answer);
    return;
  }
  wire::Inbox inbox;
  if (s.kind == StepKind::kReceive) {
    inbox.into = at(s.dst);
    inbox.capacity = s.dst.bytes;
  } else {
    inbox.sink = &sinks_[sink_of_[step]];
    inbox.capacity = plan::message_bytes(plan_->plan.request, s);
    inbox.hold = s.may_be_held;
  }
  channel.receive(peer, tag, digest_for(s), inbox, cookie);
  lengths_[step] = inbox.capacity;
}

void Executor::complete(uint32_t step, const wire::Completion& completion, wire::Channel& channel) {
  const Step& s = plan_->plan.steps[step];
  posted_[step] = 0;
  auto peer = binding_.ranks[static_cast<std::size_t>(s.peer)];
  if (!completion.status) return fail(completion.status, peer);
  if (s.kind != StepKind::kSend) {
    if (completion.bytes != lengths_[step] && !s.short_message) {
      return fail({Code::kMismatch, fmt::format("a message of {} bytes came where {} were due",
                                                completion.bytes, lengths_[step])},
                  peer);
    }
    if (!unheard_.empty()) std::erase(unheard_, s.peer);
    lengths_[step] = completion.bytes;
    answered_[step] = completion.answered;
    held_[step] = completion.held;
  }
  if (!failure_) return;
  release(step, channel);
}

void Executor::absorb(uint32_t step, uint64_t offset, std::span<const std::byte> data) {
  const Step& s = plan_->plan.steps[step];
  const auto& request = plan_->plan.request;
  if (s.kind == StepKind::kReceiveReduce) {
    auto elements = data.size() / dtype_size(request.dtype);
    if (s.src.bytes == 0) {
      cpu::reduce(request.dtype, request.op, at(s.dst) + offset, data.data(), elements);
    } else {
      cpu::reduce_into(request.dtype, request.op, at(s.dst) + offset, at(s.src) + offset,
                       data.data(), elements);
    }
    if (s.divisor != 1.0) cpu::divide(request.dtype, at(s.dst) + offset, s.divisor, elements);
    return;
  }
  // Dense codecs: 16 bits on the wire become 32 in memory.
  auto elements = data.size() / 2;
  auto into = floats(at(s.dst) + offset * 2, elements * sizeof(float));
  if (s.kind == StepKind::kReceiveDecode)
    return codec::decode_dense(request.codec, data.data(), into);
  if (s.src.bytes > 0) std::memcpy(into.data(), at(s.src) + offset * 2, into.size_bytes());
  codec::decode_reduce_dense(request.codec, request.op, data.data(), into);
}

// In parts that stay in the nearest caches: each is read, added and written to both owners before the next one.
bool Executor::absorb_and_answer(uint32_t step, uint64_t offset, std::span<const std::byte> data,
                                 std::byte* place) {
  const Step& s = plan_->plan.steps[step];
  for (uint64_t at_byte = 0; at_byte < data.size(); at_byte += kAnswerPart) {
    const auto part = data.subspan(at_byte, std::min(kAnswerPart, data.size() - at_byte));
    absorb(step, offset + at_byte, part);
    if (s.answers) cpu::copy(place + at_byte, at(s.dst) + offset + at_byte, part.size());
  }
  return s.answers;
}

uint64_t Executor::work(uint64_t budget, wire::Channel& channel, Interlude& interlude) {
  uint64_t used = 0;
  while (failure_ && has_work() && used < budget) {
    if (current_ == plan::kNoStep) {
      std::pop_heap(ready_.begin(), ready_.end(), std::greater<>());
      current_ = ready_.back();
      ready_.pop_back();
      slice_done_ = 0;
    }
    bool finished = false;
    try {
      used += run_slice(current_, budget - used, finished, channel, interlude) + 64;
    } catch (const std::bad_alloc&) {
      // Whoever drives carries other operations too, and the other ranks have to hear of this one.
      fail({Code::kResourceExhausted, "no memory to code it or to add it up"});
    }
    if (!finished) continue;
    auto step = current_;
    current_ = plan::kNoStep;
    if (failure_) release(step, channel);
  }
  return used;
}

// Handles at most about `budget` bytes of a local step, from where the last slice ended. Steps that
// can't be cut (sparse ones) run whole.
uint64_t Executor::run_slice(uint32_t step, uint64_t budget, bool& finished, wire::Channel& channel,
                             Interlude& interlude) {
  const Step& s = plan_->plan.steps[step];
  finished = true;
  if (s.kind == StepKind::kDecodeSum) return decode_sum(s, interlude);
  if (s.kind == StepKind::kEncode && is_sparse(plan_->plan.request))
    return encode(s, step, channel, interlude);
  // The step's length, counted in what it reads (its destination, where it reads nothing or codes).
  const bool by_dst = s.kind == StepKind::kZero || s.kind == StepKind::kScale ||
                      s.kind == StepKind::kDecode || s.kind == StepKind::kDecodeReduce;
  const uint64_t total = by_dst ? s.dst.bytes : s.src.bytes;
  const uint64_t n =
      std::min(total - slice_done_, std::max(kSliceAlign, budget / kSliceAlign * kSliceAlign));
  {
    const OpenFor open(&interlude, n);
    run_dense(s, slice_done_, n);
  }
  slice_done_ += n;
  finished = slice_done_ == total;
  return n;
}

uint64_t Executor::decode_sum(const Step& s, Interlude& interlude) {
  encodings_.clear();
  for (const auto& code : s.codes)
    encodings_.emplace_back(at(code.range), std::min(code.range.bytes, lengths_[code.bytes_from]));
  Status status;
  {
    const OpenFor open(&interlude, s.dst.bytes);
    status = codec::decode_sum_topk(encodings_, floats(at(s.dst), s.dst.bytes), s.divisor,
                                    binding_.workers);
  }
  if (!status) {
    damaged_by_ = sender_of_damage(s);
    fail(status);
  }
  return s.dst.bytes;
}

// World numbering; -1: this rank's own encoding. The sum is lost anyway.
Rank Executor::sender_of_damage(const Step& s) {
  for (std::size_t i = 0; i < s.codes.size(); ++i) {
    if (codec::decode_sum_topk({&encodings_[i], 1}, floats(at(s.dst), s.dst.bytes))) continue;
    const Rank peer = plan_->plan.steps[s.codes[i].bytes_from].peer;
    return peer < 0 ? peer : binding_.ranks[static_cast<std::size_t>(peer)];
  }
  return -1;
}

// Bytes [from, from + n) of a step of a dense operation.
void Executor::run_dense(const Step& s, uint64_t from, uint64_t n) {
  const auto& request = plan_->plan.request;
  const auto size = dtype_size(request.dtype);
  std::byte* dst = at(s.dst);
  const std::byte* src = at(s.src);
  switch (s.kind) {
    case StepKind::kCopy:
      if (dst != src && n > 0) cpu::copy(dst + from, src + from, n);
      break;
    case StepKind::kReduce:
      cpu::reduce(request.dtype, request.op, dst + from, src + from, n / size);
      break;
    case StepKind::kScale:
      cpu::divide(request.dtype, dst + from, s.divisor, n / size);
      break;
    case StepKind::kZero:
      if (n > 0) std::memset(dst + from, 0, n);
      break;
    case StepKind::kEncode:
      codec::encode_dense(request.codec, floats(src + from, n), dst + from / 2);
      break;
    case StepKind::kDecode:
      codec::decode_dense(request.codec, src + from / 2, floats(dst + from, n));
      break;
    case StepKind::kDecodeReduce:
      codec::decode_reduce_dense(request.codec, request.op, src + from / 2, floats(dst + from, n));
      break;
    default:
      break;
  }
}

// Top-k: which elements of the operation's buffer `s.src` holds follows from its place in the input
// or output.
uint64_t Executor::encode(const Step& s, uint32_t step, wire::Channel& channel,
                          Interlude& interlude) {
  if (binding_.residuals == nullptr) {
    fail({Code::kInternal, "top-k without residuals"});
    return 0;
  }
  auto runs = binding_.residuals->runs(s.src.offset / sizeof(float), s.src.bytes / sizeof(float));
  if (!runs) {
    fail(runs.status());
    return 0;
  }
  const std::byte* src = at(s.src);
  const Reading reading(*this, s, channel);
  if (!failure_) return 0;
  const OpenFor open(&interlude, s.src.bytes);
  lengths_[step] = codec::encode_topk(plan_->plan.request.codec, floats(src, s.src.bytes), *runs,
                                      at(s.dst), binding_.workers, addends_)
                       .bytes;
  return s.src.bytes;
}

void Executor::open_addends(const Step& s, wire::Channel& channel) {
  addends_.clear();
  for (const uint32_t k : s.addends) {
    if (held_[k] == 0) continue;  // it came by another way, and is in the sum already
    const Step& receive = plan_->plan.steps[k];
    const Rank peer = binding_.ranks[static_cast<std::size_t>(receive.peer)];
    const auto data = channel.open_held(peer, held_[k]);
    if (data.empty()) {
      fail({Code::kAborted, "a rank of this node took its gradients back before they were read"},
           peer);
      return;
    }
    const auto values = floats(data.data(), data.size());
    addends_.push_back(
        {values.data(), (receive.dst.offset - s.src.offset) / sizeof(float), values.size()});
  }
}

void Executor::close_addends(const Step& s, wire::Channel& channel) {
  for (const uint32_t k : s.addends) {
    if (held_[k] == 0) continue;
    const Rank peer = binding_.ranks[static_cast<std::size_t>(plan_->plan.steps[k].peer)];
    if (!channel.close_held(peer, held_[k]))
      fail({Code::kAborted, "a rank of this node took its gradients back while they were read"},
           peer);
  }
}

void Executor::fail(Status why, Rank peer) {
  if (!failure_) {
    // A mismatch says more than the losses that follow from it.
    return;
  }
  failure_ = std::move(why);
  failed_peer_ = peer;
}

std::vector<Rank> Executor::blockers() const {
  std::vector<Rank> out;
  for (std::size_t i = 0; i < posted_.size(); ++i) {
    if (posted_[i])
      out.push_back(binding_.ranks[static_cast<std::size_t>(plan_->plan.steps[i].peer)]);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace paceline::engine
