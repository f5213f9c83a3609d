// The receiving half of a session: matching, placing pieces, unexpected messages.
#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/crc32c.h"
#include "wire/protocol.h"

namespace paceline::wire {
namespace {

constexpr std::size_t kMaxUnexpected = 1U << 20;

}  // namespace

void Session::receive(Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) {
  if (refuse_request(cookie)) return;
  if (receives_.contains(tag)) {
    complete(
        cookie, 0,
        {Code::kInvalidArgument, fmt::format("two receives from {} with tag {:#x}", name_, tag)});
    return;
  }
  auto early = unexpected_.find(tag);
  Unexpected message;
  bool is_here = early != unexpected_.end();
  if (is_here) {
    message = std::move(early->second);
    unexpected_.erase(early);
    Status ok = fits(tag, digest, message.digest, message.total, inbox.capacity);
    if (!message.is_offer) {
      eager_held_ -= eager_cost(message.total);
      eager_matched_ += eager_cost(message.total);
      if (eager_matched_ - eager_told_ >= shared_.options.eager_budget / 4)
        schedule_acknowledgement(true);
    }
    if (!ok.is_ok()) {
      if (message.is_offer) push_reject(tag, 0, ok);
      complete(cookie, 0, std::move(ok));
      return;
    }
  }
  uint32_t slot;
  if (free_receives_.empty()) {
    slot = static_cast<uint32_t>(receive_ops_.size());
    receive_ops_.emplace_back();
  } else {
    slot = free_receives_.back();
    free_receives_.pop_back();
  }
  ReceiveOp& op = receive_ops_[slot];
  op.tag = tag;
  op.digest = digest;
  op.inbox = inbox;
  op.cookie = cookie;
  op.used = true;
  op.announced = op.total_known = false;
  op.total = op.missing = 0;
  receives_.emplace(tag, slot);
  if (is_here && !message.is_offer) {
    deliver_short(op, message.payload);
    end_receive(slot, message.payload.size(), Status::ok());
  } else if (is_here || inbox.capacity > shared_.options.eager_limit) {
    announce(slot);
  }
}

void Session::announce(uint32_t slot) {
  ReceiveOp& op = receive_ops_[slot];
  op.announced = true;
  Frame f;
  f.type = FrameType::kReady;
  f.tag = op.tag;
  f.digest = op.digest;
  f.message = (uint64_t{op.generation} << 32) | (slot + 1);
  f.total = op.inbox.capacity;
  push(f);
}

Session::ReceiveOp* Session::find_receive(uint64_t message, uint32_t* slot) {
  uint64_t number = message & 0xFFFFFFFFU;
  if (number == 0 || number > receive_ops_.size()) return nullptr;
  ReceiveOp& op = receive_ops_[number - 1];
  if (!op.used || !op.announced || op.generation != message >> 32) return nullptr;
  if (slot != nullptr) *slot = static_cast<uint32_t>(number - 1);
  return &op;
}

void Session::deliver_short(ReceiveOp& op, std::span<const std::byte> payload) {
  shared_.counters.payload_received += payload.size();
  if (payload.empty()) return;
  if (op.inbox.sink != nullptr) {
    op.inbox.sink->consume(0, payload);
  } else {
    std::memcpy(op.inbox.into, payload.data(), payload.size());
  }
}

void Session::end_receive(uint32_t slot, uint64_t bytes, Status status) {
  ReceiveOp& op = receive_ops_[slot];
  // Whatever ends an announced receive but the last of its pieces must be told: the sender would
  // wait for ever.
  bool all_arrived = status.is_ok() && op.total_known;
  if (op.announced && !all_arrived && lost_.is_ok()) {
    Frame f;
    f.type = FrameType::kWithdraw;
    f.tag = op.tag;
    f.message = (uint64_t{op.generation} << 32) | (slot + 1);
    push(f);
  }
  complete(op.cookie, bytes, std::move(status));
  receives_.erase(op.tag);
  op.used = false;
  op.inbox = {};
  ++op.generation;
  free_receives_.push_back(slot);
}

Status Session::on_eager(const Frame& frame, std::span<const std::byte> payload) {
  auto posted = receives_.find(frame.tag);
  uint64_t cost = eager_cost(payload.size());
  if (posted == receives_.end()) {
    if (unexpected_.contains(frame.tag)) return {Code::kCorrupted, "two messages with one tag"};
    if (!shared_.aborted.is_ok()) {  // nobody will ask for it
      eager_matched_ += cost;
      return Status::ok();
    }
    if (eager_held_ + cost > 2 * shared_.options.eager_budget) {
      return {Code::kResourceExhausted, "more unexpected bytes than the peer has credit for"};
    }
    eager_held_ += cost;
    unexpected_[frame.tag] = {false, frame.digest, frame.total, {payload.begin(), payload.end()}};
    return Status::ok();
  }
  uint32_t slot = posted->second;
  ReceiveOp& op = receive_ops_[slot];
  if (op.total_known) return {Code::kCorrupted, "a short message amid the pieces of a long one"};
  eager_matched_ += cost;
  Status ok = fits(frame.tag, op.digest, frame.digest, payload.size(), op.inbox.capacity);
  if (ok.is_ok()) deliver_short(op, payload);
  end_receive(slot, ok.is_ok() ? payload.size() : 0, std::move(ok));
  return Status::ok();
}

Status Session::on_offer(const Frame& frame) {
  auto posted = receives_.find(frame.tag);
  if (posted == receives_.end()) {
    if (!shared_.aborted.is_ok()) {
      push_reject(frame.tag, 0, shared_.aborted);
      return Status::ok();
    }
    if (unexpected_.contains(frame.tag)) return {Code::kCorrupted, "two messages with one tag"};
    if (unexpected_.size() >= kMaxUnexpected)
      return {Code::kResourceExhausted, "more than a million offers"};
    unexpected_[frame.tag] = {true, frame.digest, frame.total, {}};
    return Status::ok();
  }
  uint32_t slot = posted->second;
  ReceiveOp& op = receive_ops_[slot];
  if (op.announced) return Status::ok();  // the two crossed
  Status ok = fits(frame.tag, op.digest, frame.digest, frame.total, op.inbox.capacity);
  if (ok.is_ok()) {
    announce(slot);
  } else {
    push_reject(frame.tag, 0, ok);
    end_receive(slot, 0, std::move(ok));
  }
  return Status::ok();
}

Placement Session::place(const Frame& frame) {
  using Kind = Placement::Kind;
  if (!lost_.is_ok()) return {};
  ReceiveOp* op = find_receive(frame.message);
  if (op == nullptr) {
    // Ours once, and over; or never ours.
    uint64_t number = frame.message & 0xFFFFFFFFU;
    bool was_ours = number != 0 && number <= receive_ops_.size() &&
                    frame.message >> 32 <= receive_ops_[number - 1].generation;
    return {was_ours ? Kind::kDiscard : Kind::kViolation, nullptr};
  }
  const uint64_t size = shared_.options.piece_bytes;
  uint64_t expected = std::min<uint64_t>(size, frame.total - frame.position);
  bool is_regular = frame.position % size == 0 && frame.length == expected;
  if (!is_regular || frame.total > op->inbox.capacity || frame.tag != op->tag ||
      (op->total_known && op->total != frame.total)) {
    return {Kind::kViolation, nullptr};
  }
  if (!op->total_known) {
    op->total_known = true;
    op->total = frame.total;
    op->missing = static_cast<uint32_t>((frame.total + size - 1) / size);
    op->seen.assign((op->missing + 63) / 64, 0);
  }
  uint64_t index = frame.position / size;
  if ((op->seen[index / 64] >> (index % 64) & 1) != 0) return {};
  if (op->inbox.sink != nullptr) return {Kind::kSink, nullptr};
  return {Kind::kBuffer, op->inbox.into + frame.position};
}

Status Session::placed(const Frame& frame, std::span<const std::byte> scratch) {
  if (!lost_.is_ok()) return Status::ok();
  heard();
  Placement to = place(frame);
  if (to.kind == Placement::Kind::kViolation) return {Code::kCorrupted, "a piece of no message"};
  uint32_t slot = 0;
  ReceiveOp* op = find_receive(frame.message, &slot);
  if (to.kind != Placement::Kind::kDiscard) {
    std::span<const std::byte> data = to.kind == Placement::Kind::kSink
                                          ? scratch
                                          : std::span<const std::byte>(to.at, frame.length);
    if (data.size() != frame.length) return {Code::kInternal, "a piece without its payload"};
    if (frame.has_sum && crc32c(data) != frame.sum) {
      return {Code::kCorrupted, "a payload failed its CRC"};
    }
    uint64_t index = frame.position / shared_.options.piece_bytes;
    op->seen[index / 64] |= uint64_t{1} << (index % 64);
    --op->missing;
    shared_.counters.payload_received += frame.length;
    if (to.kind == Placement::Kind::kSink) op->inbox.sink->consume(frame.position, data);
  }
  if (shared_.options.lossy) {
    Frame ack;
    ack.type = FrameType::kPieceAck;
    ack.message = frame.message;
    ack.position = frame.position;
    piece_acks_.push_back(ack);
  }
  if (op != nullptr && op->missing == 0) {
    Frame done;
    done.type = FrameType::kDone;
    done.tag = op->tag;
    done.message = frame.message;
    uint64_t total = op->total;
    push(done);
    end_receive(slot, total, Status::ok());
  }
  return Status::ok();
}

}  // namespace paceline::wire
