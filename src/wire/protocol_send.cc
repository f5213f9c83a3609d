// The sending half of a session: eager messages, offers, pieces.
#include <fmt/format.h>

#include <algorithm>

#include "base/crc32c.h"
#include "wire/protocol.h"

namespace paceline::wire {
namespace {

// No correct peer has so many receives posted whose sends are not; a flood must not eat the memory.
constexpr std::size_t kMaxAnnounced = 1U << 20;

}  // namespace

Status Session::fits(Tag tag, uint32_t mine, uint32_t theirs, uint64_t length,
                     uint64_t capacity) const {
  if (mine != 0 && theirs != 0 && mine != theirs) {
    return mismatch(
        tag,
        fmt::format("they belong to different operations (digests {:#x} and {:#x})", mine, theirs));
  }
  if (length > capacity) {
    return mismatch(tag, fmt::format("it has {} bytes, the receive takes {}", length, capacity));
  }
  return Status::ok();
}

void Session::send(Tag tag, uint32_t digest, std::span<const std::byte> data, uint64_t cookie) {
  if (refuse_request(cookie)) return;
  if (sends_.contains(tag)) {
    complete(cookie, 0,
             {Code::kInvalidArgument, fmt::format("two sends to {} with tag {:#x}", name_, tag)});
    return;
  }
  auto early = announced_.find(tag);
  if (early != announced_.end()) {
    Announced to = early->second;
    announced_.erase(early);
    start_send(new_send(tag, digest, data, cookie), to);
    return;
  }
  const bool is_short = data.size() <= shared_.options.eager_limit;
  if (may_be_eager(data.size())) {
    send_eager(tag, digest, data, cookie);
    return;
  }
  uint32_t slot = new_send(tag, digest, data, cookie);
  sends_.emplace(tag, slot);
  if (is_short) {
    offer(slot);
  } else {
    to_offer_.push_back({slot, send_ops_[slot].generation, shared_.now});
  }
}

uint32_t Session::new_send(Tag tag, uint32_t digest, std::span<const std::byte> data,
                           uint64_t cookie) {
  uint32_t slot;
  if (free_sends_.empty()) {
    slot = static_cast<uint32_t>(send_ops_.size());
    send_ops_.emplace_back();
  } else {
    slot = free_sends_.back();
    free_sends_.pop_back();
  }
  SendOp& op = send_ops_[slot];
  op.tag = tag;
  op.digest = digest;
  op.data = data;
  op.cookie = cookie;
  op.message = 0;
  op.pieces = op.next = op.writing = op.fresh = 0;
  op.offered = op.queued = false;
  op.end.reset();
  op.used = true;
  op.again.clear();
  return slot;
}

bool Session::may_be_eager(uint64_t bytes) const {
  return bytes <= shared_.options.eager_limit &&
         eager_sent_ + eager_cost(bytes) <= eager_matched_by_peer_ + shared_.options.eager_budget;
}

void Session::send_eager(Tag tag, uint32_t digest, std::span<const std::byte> data,
                         uint64_t cookie) {
  Frame f;
  f.type = FrameType::kEager;
  f.tag = tag;
  f.digest = digest;
  f.total = data.size();
  push(f, data);
  eager_sent_ += eager_cost(data.size());
  shared_.counters.payload_sent += data.size();
  complete(cookie, data.size(), Status::ok());
}

void Session::offer(uint32_t slot) {
  SendOp& op = send_ops_[slot];
  if (op.offered) return;
  op.offered = true;
  Frame f;
  f.type = FrameType::kOffer;
  f.tag = op.tag;
  f.digest = op.digest;
  f.total = op.data.size();
  push(f);
}

void Session::start_send(uint32_t slot, const Announced& to) {
  SendOp& op = send_ops_[slot];
  Status ok = fits(op.tag, op.digest, to.digest, op.data.size(), to.capacity);
  if (!ok.is_ok()) {
    push_reject(op.tag, to.message, ok);
    end_send(slot, ok);
    return;
  }
  // Its receive is posted, so it needs no credit; but credit also bounds the copies that are kept here.
  if (op.data.empty() || may_be_eager(op.data.size())) {
    send_eager(op.tag, op.digest, op.data, op.cookie);
    op.used = false;
    sends_.erase(op.tag);
    ++op.generation;
    free_sends_.push_back(slot);
    return;
  }
  op.message = to.message;
  uint64_t size = shared_.options.piece_bytes;
  op.pieces = static_cast<uint32_t>((op.data.size() + size - 1) / size);
  op.where.assign(op.pieces, kNowhere);
  sends_.erase(op.tag);
  started_.emplace(op.message, slot);
  queue_send(slot, false);
}

void Session::queue_send(uint32_t slot, bool first) {
  SendOp& op = send_ops_[slot];
  if (op.queued) return;
  op.queued = true;
  Waiting w{slot, op.generation, 0};
  if (first) {
    ready_.push_front(w);
  } else {
    ready_.push_back(w);
  }
}

void Session::end_send(uint32_t slot, Status status) {
  SendOp& op = send_ops_[slot];
  uint64_t bytes = status.is_ok() ? op.data.size() : 0;
  complete(op.cookie, bytes, std::move(status));
  if (op.message != 0) {
    started_.erase(op.message);
    if (shared_.options.lossy) {
      flying_count_ -=
          static_cast<uint32_t>(std::count(op.where.begin(), op.where.end(), uint8_t{1}));
    }
  } else {
    sends_.erase(op.tag);
  }
  op.used = false;
  op.data = {};
  ++op.generation;  // pieces on their way, queue entries: stale from now on
  free_sends_.push_back(slot);
}

bool Session::has_pieces() const {
  if (!lost_.is_ok()) return false;
  return !ready_.empty() &&
         (!shared_.options.lossy || flying_count_ < shared_.options.window_pieces);
}

uint32_t Session::piece_length(const SendOp& op, uint32_t index) const {
  uint64_t at = uint64_t{index} * shared_.options.piece_bytes;
  return static_cast<uint32_t>(
      std::min<uint64_t>(shared_.options.piece_bytes, op.data.size() - at));
}

bool Session::pull_piece(uint32_t flow, Piece& piece) {
  while (has_pieces()) {
    Waiting w = ready_.front();
    SendOp& op = send_ops_[w.slot];
    if (!op.used || op.generation != w.generation || op.end) {
      ready_.pop_front();
      continue;
    }
    uint32_t index = 0;
    bool is_repeat = !op.again.empty();
    if (is_repeat) {
      index = op.again.back();
      op.again.pop_back();
      if (op.where[index] != kNowhere) continue;
      ++shared_.counters.repeats;
    } else if (op.next < op.pieces) {
      index = op.next++;
      shared_.counters.payload_sent += piece_length(op, index);
    } else {
      op.queued = false;
      ready_.pop_front();
      continue;
    }
    op.where[index] = static_cast<uint8_t>(1 + flow);
    ++op.writing;
    if (!is_repeat) ++op.fresh;
    ++writing_;
    uint64_t at = uint64_t{index} * shared_.options.piece_bytes;
    piece.frame = Frame{};
    piece.frame.type = FrameType::kPiece;
    piece.frame.length = piece_length(op, index);
    piece.frame.digest = op.digest;
    piece.frame.tag = op.tag;
    piece.frame.message = op.message;
    piece.frame.total = op.data.size();
    piece.frame.position = at;
    piece.frame.acknowledged = taken_;
    piece.frame.freed = static_cast<uint32_t>(eager_matched_);
    piece.data = op.data.data() + at;
    piece.slot = w.slot;
    piece.generation = w.generation;
    piece.is_repeat = is_repeat;
    if (shared_.options.payload_sum) {
      piece.frame.has_sum = true;
      piece.frame.sum = crc32c({piece.data, piece.frame.length});
    }
    if (shared_.options.lossy) {
      flying_.push_back({w.slot, w.generation, index, shared_.now, is_repeat});
      ++flying_count_;
    }
    return true;
  }
  return false;
}

void Session::piece_written(const Piece& piece) {
  --writing_;
  SendOp& op = send_ops_[piece.slot];
  if (!op.used || op.generation != piece.generation) return;
  if (!piece.is_repeat) --op.fresh;
  if (--op.writing == 0 && op.end) end_send(piece.slot, *op.end);
}

void Session::flow_broken(uint32_t flow) {
  for (auto& [message, slot] : started_) {
    SendOp& op = send_ops_[slot];
    for (uint32_t i = op.next; i-- > 0;) {  // backwards: `again` is taken from its end
      if (op.where[i] != 1 + flow) continue;
      op.where[i] = kNowhere;
      op.again.push_back(i);
    }
    if (!op.again.empty()) queue_send(slot, true);
  }
}

Status Session::on_ready(const Frame& frame) {
  if (frame.message == 0) return {Code::kCorrupted, "a posted receive without its number"};
  Announced to{frame.message, frame.total, frame.digest};
  if (started_.contains(frame.message)) return {Code::kCorrupted, "a receive announced twice"};
  auto it = sends_.find(frame.tag);
  if (it != sends_.end()) {
    start_send(it->second, to);
    return Status::ok();
  }
  if (announced_.size() >= kMaxAnnounced) {
    return {Code::kResourceExhausted, "more than a million receives posted ahead"};
  }
  announced_[frame.tag] = to;
  return Status::ok();
}

Status Session::on_done(const Frame& frame) {
  auto it = started_.find(frame.message);
  if (it == started_.end()) return Status::ok();  // cancelled here meanwhile
  SendOp& op = send_ops_[it->second];
  if (op.next < op.pieces || op.fresh != 0) {
    return {Code::kCorrupted, "a message said to be complete before it was sent"};
  }
  if (op.writing == 0) {
    end_send(it->second, Status::ok());
  } else {
    op.end =
        Status::ok();  // a flow broke, and repeats a piece that had come: piece_written() ends it
  }
  return Status::ok();
}

Status Session::on_withdraw(const Frame& frame) {
  auto it = announced_.find(frame.tag);
  if (it != announced_.end() && it->second.message == frame.message) announced_.erase(it);
  auto started = started_.find(frame.message);
  if (started == started_.end()) return Status::ok();
  Status why(Code::kAborted,
             fmt::format("{} gave up its receive of message {:#x}", name_, frame.tag));
  SendOp& op = send_ops_[started->second];
  if (op.writing == 0) {
    end_send(started->second, std::move(why));
  } else {
    op.end = std::move(why);  // a flow still reads the caller's memory: piece_written() ends it
  }
  return Status::ok();
}

void Session::on_piece_ack(const Frame& frame) {
  auto it = started_.find(frame.message);
  if (it == started_.end() || frame.position % shared_.options.piece_bytes != 0) return;
  SendOp& op = send_ops_[it->second];
  uint64_t index = frame.position / shared_.options.piece_bytes;
  if (index >= op.next || op.where[index] == kArrived) return;
  if (op.where[index] != kNowhere) {
    --flying_count_;
    forget_landed_pieces();
    // Karn's rule: only pieces that left once tell the round trip.
    if (!flying_.empty()) {
      const Flying& oldest = flying_.front();
      if (oldest.slot == it->second && oldest.index == index && !oldest.repeated) {
        sample_round_trip(shared_.now - oldest.sent);
      }
    }
  }
  op.where[index] = kArrived;
}

void Session::forget_landed_pieces() {
  while (!flying_.empty()) {
    const Flying& f = flying_.front();
    const SendOp& op = send_ops_[f.slot];
    if (op.used && op.generation == f.generation && op.where[f.index] != kArrived) break;
    flying_.pop_front();
  }
}

void Session::resend_overdue_pieces() {
  bool any = false;
  for (forget_landed_pieces(); !flying_.empty(); forget_landed_pieces()) {
    const Flying f = flying_.front();
    if (shared_.now < after(f.sent, rto_)) break;
    flying_.pop_front();
    SendOp& op = send_ops_[f.slot];
    op.where[f.index] = kNowhere;
    --flying_count_;
    op.again.push_back(f.index);
    queue_send(f.slot, true);
    any = true;
  }
  if (any) rto_ = std::min(2 * rto_, shared_.options.maximum_rto);
}

}  // namespace paceline::wire
