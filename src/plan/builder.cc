#include "plan/builder.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace paceline::plan {

AccessMap::Cells::iterator AccessMap::cut(uint64_t at) {
  auto cell = std::prev(cells_.upper_bound(at));
  if (cell->first == at) return cell;
  Cell right = cell->second;
  cell->second.end = at;
  return cells_.emplace_hint(std::next(cell), at, std::move(right));
}

void AccessMap::read(uint64_t begin, uint64_t end, uint32_t step, std::vector<uint32_t>& after) {
  cut(end);
  for (auto cell = cut(begin); cell->first < end; ++cell) {
    if (cell->second.writer != kNoStep) after.push_back(cell->second.writer);
    cell->second.readers.push_back(step);
  }
}

void AccessMap::write(uint64_t begin, uint64_t end, uint32_t step, std::vector<uint32_t>& after) {
  cut(end);
  auto first = cut(begin);
  auto last = first;
  for (; last->first < end; ++last) {
    // Readers have waited for the writer themselves.
    if (last->second.readers.empty() && last->second.writer != kNoStep) {
      after.push_back(last->second.writer);
    }
    for (uint32_t reader : last->second.readers) {
      if (reader != step) after.push_back(reader);
    }
  }
  cells_.erase(std::next(first), last);
  first->second = Cell{end, step, {}};
}

Builder::Builder(const PlanRequest& request, Rank me, MessageSink* sink)
    : sink_(sink), element_(dtype_size(request.dtype)) {
  plan_.request = request;
  plan_.me = me;
  next_send_.resize(static_cast<std::size_t>(request.shape.size));
  next_receive_.resize(static_cast<std::size_t>(request.shape.size));
}

bool Builder::same_node(Rank a, Rank b) const {
  if (a == b) return true;
  const auto& node_of = request().shape.node_of;
  return node_of[static_cast<std::size_t>(a)] == node_of[static_cast<std::size_t>(b)];
}

Range Builder::bytes_of(Buffer buffer, Span elements) const {
  return {buffer, elements.begin * element_, elements.size() * element_};
}

Range Builder::in(Span elements) const {
  return bytes_of(request().in_place ? Buffer::kOutput : Buffer::kInput, elements);
}

Range Builder::out(Span elements) const { return bytes_of(Buffer::kOutput, elements); }

Range Builder::scratch(uint64_t bytes) {
  Range range{Buffer::kScratch, plan_.scratch_bytes, bytes};
  plan_.scratch_bytes += (bytes + 63) / 64 * 64;
  return range;
}

Range Builder::encoding(Span elements) {
  return scratch(coded_bytes(request().codec, request().dtype, elements.size()));
}

Range Builder::encoding_in(Range room, Span elements) const {
  const uint64_t bytes = coded_bytes(request().codec, request().dtype, elements.size());
  assert(bytes <= room.bytes);
  return {room.buffer, room.offset, bytes};
}

uint32_t Builder::copy(Range dst, Range src) {
  if (dst == src || dst.bytes == 0) return kNoStep;
  return push({.kind = StepKind::kCopy, .src = src, .dst = dst});
}

uint32_t Builder::reduce(Range dst, Range src) {
  if (dst.bytes == 0) return kNoStep;
  return push({.kind = StepKind::kReduce, .src = src, .dst = dst});
}

uint32_t Builder::scale(Range dst, double divisor) {
  if (dst.bytes == 0) return kNoStep;
  return push({.kind = StepKind::kScale, .dst = dst, .divisor = divisor});
}

uint32_t Builder::encode(Range dst, Range src, std::vector<uint32_t> addends) {
  if (src.bytes == 0) return kNoStep;
  return push({.kind = StepKind::kEncode, .src = src, .dst = dst, .addends = std::move(addends)});
}

uint32_t Builder::decode(Range dst, Range src) {
  if (dst.bytes == 0) return kNoStep;
  return push({.kind = StepKind::kDecode, .src = src, .dst = dst});
}

uint32_t Builder::decode_reduce(Range dst, Range src) {
  if (dst.bytes == 0) return kNoStep;
  return push({.kind = StepKind::kDecodeReduce, .src = src, .dst = dst});
}

uint32_t Builder::decode_sum(Range dst, std::vector<Coded> codes) {
  if (dst.bytes == 0) return kNoStep;
  const Range& first = codes.front().range;
  const Range& last = codes.back().range;
  const Range all{first.buffer, first.offset, last.offset + last.bytes - first.offset};
  return push({.kind = StepKind::kDecodeSum,
               .src = all,
               .dst = dst,
               .divisor = divisor(),
               .codes = std::move(codes)});
}

uint32_t Builder::zero(Range dst) {
  if (dst.bytes == 0) return kNoStep;
  return push({.kind = StepKind::kZero, .dst = dst});
}

uint32_t Builder::send(Rank peer, Range src, uint64_t piece, uint32_t bytes_from) {
  if (src.bytes == 0) return kNoStep;
  Step step = sending(peer, src, piece);
  step.bytes_from = bytes_from;
  if (bytes_from != kNoStep) wait_for(bytes_from);
  return push(std::move(step));
}

Step Builder::sending(Rank peer, Range src, uint64_t piece) {
  Step step;
  step.kind = StepKind::kSend;
  step.lane = static_cast<uint8_t>(piece % static_cast<uint64_t>(request().lanes));
  step.peer = peer;
  step.slot = next_send_[static_cast<std::size_t>(peer)]++;
  step.src = src;
  return step;
}

uint32_t Builder::send_for_answer(Rank peer, Range src, Range answer, uint64_t piece) {
  if (src.bytes == 0) return kNoStep;
  Step step = sending(peer, src, piece);
  step.answer = answer;
  return push(std::move(step));
}

uint32_t Builder::send_answer(Rank peer, Range src, uint32_t answer_of, uint64_t piece) {
  if (src.bytes == 0) return kNoStep;
  Step step = sending(peer, src, piece);
  step.answer_of = answer_of;
  return push(std::move(step));
}

Step Builder::receiving(StepKind kind, Rank peer, Range dst, uint64_t piece) {
  Step step;
  step.kind = kind;
  step.lane = static_cast<uint8_t>(piece % static_cast<uint64_t>(request().lanes));
  step.peer = peer;
  step.slot = next_receive_[static_cast<std::size_t>(peer)]++;
  step.dst = dst;
  return step;
}

uint32_t Builder::receive(Rank peer, Range dst, uint64_t piece, bool short_message) {
  if (dst.bytes == 0) return kNoStep;
  Step step = receiving(StepKind::kReceive, peer, dst, piece);
  step.short_message = short_message;
  return push(std::move(step));
}

uint32_t Builder::receive_sum(Rank peer, Range dst, uint64_t piece) {
  if (dst.bytes == 0) return kNoStep;
  Step step = receiving(StepKind::kReceive, peer, dst, piece);
  step.brings_sum = true;
  return push(std::move(step));
}

uint32_t Builder::receive_reduce(Rank peer, Range dst, Range left, uint64_t piece) {
  if (dst.bytes == 0) return kNoStep;
  Step step = receiving(StepKind::kReceiveReduce, peer, dst, piece);
  if (left != dst) step.src = left;
  return push(std::move(step));
}

uint32_t Builder::receive_reduce_answering(Rank peer, Range dst, Range left, uint64_t piece) {
  if (dst.bytes == 0) return kNoStep;
  Step step = receiving(StepKind::kReceiveReduce, peer, dst, piece);
  if (left != dst) step.src = left;
  step.divisor = divisor();
  step.answers = true;
  return push(std::move(step));
}

uint32_t Builder::receive_reduce_held(Rank peer, Range dst, uint64_t piece) {
  if (dst.bytes == 0) return kNoStep;
  Step step = receiving(StepKind::kReceiveReduce, peer, dst, piece);
  step.may_be_held = true;
  return push(std::move(step));
}

uint32_t Builder::receive_decode(Rank peer, Range dst, uint64_t piece) {
  if (dst.bytes == 0) return kNoStep;
  return push(receiving(StepKind::kReceiveDecode, peer, dst, piece));
}

uint32_t Builder::receive_decode_reduce(Rank peer, Range dst, Range left, uint64_t piece) {
  if (dst.bytes == 0) return kNoStep;
  Step step = receiving(StepKind::kReceiveDecodeReduce, peer, dst, piece);
  if (left != dst) step.src = left;
  return push(std::move(step));
}

void Builder::wait_for(uint32_t step) {
  if (step != kNoStep) pending_.push_back(step);
}

void Builder::finish_sum(Range sum) {
  if (divisor() != 1.0) scale(sum, divisor());
}

double Builder::divisor() const {
  return request().op == ReduceOp::kAverage ? static_cast<double>(size()) : 1.0;
}

AccessMap& Builder::map(Buffer buffer) { return maps_[static_cast<std::size_t>(buffer)]; }

void Builder::derive_dependencies(Step& step, uint32_t index) {
  auto& after = step.after;
  after = std::exchange(pending_, {});
  auto read = [&](const Range& r) {
    if (r.bytes) map(r.buffer).read(r.offset, r.offset + r.bytes, index, after);
  };
  read(step.src);
  switch (step.kind) {
    case StepKind::kReduce:
    case StepKind::kScale:
    case StepKind::kDecodeReduce:
      read(step.dst);
      break;
    case StepKind::kReceiveReduce:
    case StepKind::kReceiveDecodeReduce:
      if (step.src.bytes == 0) read(step.dst);
      break;
    default:
      break;
  }
  auto write = [&](const Range& r) {
    if (r.bytes) map(r.buffer).write(r.offset, r.offset + r.bytes, index, after);
  };
  write(step.dst);
  if (step.brings_sum) {
    std::erase_if(after, [&](uint32_t k) { return plan_.steps[k].kind == StepKind::kSend; });
  }
  std::sort(after.begin(), after.end());
  after.erase(std::unique(after.begin(), after.end()), after.end());
  drop_implied(after);
}

// What a dependency waits for itself need not be named again. One generation is looked at: enough
// for the patterns that algorithms emit.
void Builder::drop_implied(std::vector<uint32_t>& after) const {
  if (after.size() < 2 || after.size() > 16) return;
  std::vector<uint32_t> keep;
  for (uint32_t candidate : after) {
    bool implied = std::any_of(after.begin(), after.end(), [&](uint32_t other) {
      const auto& theirs = plan_.steps[other].after;
      return std::binary_search(theirs.begin(), theirs.end(), candidate);
    });
    if (!implied) keep.push_back(candidate);
  }
  after = std::move(keep);
}

uint32_t Builder::push(Step step) {
  if (sink_ != nullptr) {
    if (step.kind == StepKind::kSend) sink_->message(me(), step.peer, step.src.bytes);
    pending_.clear();
    return 0;
  }
  auto index = static_cast<uint32_t>(plan_.steps.size());
  derive_dependencies(step, index);
  plan_.steps.push_back(std::move(step));
  return index;
}

Plan Builder::take(Algorithm algorithm) {
  plan_.algorithm = algorithm;
  return std::move(plan_);
}

}  // namespace paceline::plan
