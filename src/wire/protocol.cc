// The control stream of a session: sequence numbers, acknowledgements, credits, timers, the end.
#include "wire/protocol.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc32c.h"
#include "base/log.h"

namespace paceline::wire {
namespace {

constexpr std::size_t kLossyControlWindow = 256;  // sequenced frames on their way
constexpr uint64_t kReorderWindow = 1024;
constexpr uint32_t kAcknowledgeEvery = 64;
constexpr std::size_t kSpareBuffers = 64;

}  // namespace

Session::Session(Shared& shared, Rank peer, std::string name)
    : shared_(shared), peer_(peer), name_(std::move(name)) {
  heard_at_ = shared.now;
  pinged_at_ = shared.now;
  rto_ = std::min(4 * shared.options.minimum_rto, shared.options.maximum_rto);
}

void Session::complete(uint64_t cookie, uint64_t bytes, Status status) {
  shared_.events.completions.push_back({cookie, bytes, std::move(status)});
}

Status Session::mismatch(Tag tag, std::string what) const {
  return {Code::kMismatch,
          fmt::format("{} and this rank disagree about message {:#x}: {}", name_, tag, what)};
}

bool Session::refuse_request(uint64_t cookie) {
  if (!lost_.is_ok()) {
    complete(cookie, 0, lost_);
  } else if (!shared_.aborted.is_ok()) {
    complete(cookie, 0, shared_.aborted);
  } else {
    return false;
  }
  return true;
}

void Session::push(Frame frame, std::span<const std::byte> payload) {
  Outgoing item;
  item.frame = frame;
  item.frame.length = static_cast<uint32_t>(payload.size());
  item.frame.position = first_ + outgoing_.size();
  if (!payload.empty()) {
    if (!spare_.empty()) {
      item.payload = std::move(spare_.back());
      spare_.pop_back();
    }
    item.payload.assign(payload.begin(), payload.end());
    if (shared_.options.payload_sum) {
      item.frame.has_sum = true;
      item.frame.sum = crc32c(payload);
    }
  }
  outgoing_.push_back(std::move(item));
}

void Session::push_reject(Tag tag, uint64_t message, const Status& why) {
  Frame f;
  f.type = FrameType::kReject;
  f.tag = tag;
  f.message = message;
  f.digest = static_cast<uint32_t>(why.code());
  auto text = std::string_view(why.message()).substr(0, 1024);
  push(f, std::as_bytes(std::span(text.data(), text.size())));
}

void Session::note(std::span<const std::byte> bytes) {
  if (!lost_.is_ok()) return;
  if (bytes.size() > kNoteLimit) {  // a defect of the caller: the peer would refuse the frame
    log::error("a note of {} bytes to {} is longer than {} and was not sent", bytes.size(), name_,
               kNoteLimit);
    return;
  }
  Frame f;
  f.type = FrameType::kNote;
  push(f, bytes);
}

void Session::goodbye() {
  if (!lost_.is_ok()) return;
  Frame f;
  f.type = FrameType::kGoodbye;
  push(f);
}

bool Session::has_control() const {
  if (!lost_.is_ok()) return false;
  bool window_open = !shared_.options.lossy || cursor_ < kLossyControlWindow;
  return (cursor_ < outgoing_.size() && window_open) || !piece_acks_.empty() || want_ping_ ||
         want_pong_ || acknowledge_at_ <= shared_.now;
}

bool Session::pull_control(std::vector<std::byte>& out) {
  if (!has_control()) return false;
  Frame frame;
  std::span<const std::byte> payload;
  bool window_open = !shared_.options.lossy || cursor_ < kLossyControlWindow;
  if (cursor_ < outgoing_.size() && window_open) {
    const Outgoing& item = outgoing_[cursor_];
    frame = item.frame;
    payload = item.payload;
    if (cursor_ == 0) control_sent_at_ = shared_.now;
    ++cursor_;
    if (frame.position <= sent_up_to_) {
      ++shared_.counters.repeats;
    } else {
      sent_up_to_ = frame.position;
    }
  } else if (!piece_acks_.empty()) {
    frame = piece_acks_.front();
    piece_acks_.pop_front();
  } else if (std::exchange(want_pong_, false)) {
    frame.type = FrameType::kPong;
  } else if (std::exchange(want_ping_, false)) {
    frame.type = FrameType::kPing;
  } else {
    frame.type = FrameType::kAck;
  }
  frame.acknowledged = taken_;
  frame.freed = static_cast<uint32_t>(eager_matched_);
  eager_told_ = eager_matched_;
  unacknowledged_ = 0;
  acknowledge_at_ = kNever;

  auto at = out.size();
  out.resize(at + kFrameHeader + payload.size());
  encode_frame(frame, std::span<std::byte, kFrameHeader>(out.data() + at, kFrameHeader));
  if (!payload.empty()) std::memcpy(out.data() + at + kFrameHeader, payload.data(), payload.size());
  return true;
}

void Session::rewind_control() { cursor_ = 0; }

void Session::control_lost() {
  rewind_control();
  connected_ = false;
}

void Session::control_regained() {
  rewind_control();
  connected_ = true;
}

void Session::schedule_acknowledgement(bool soon) {
  Time at = soon ? shared_.now : after(shared_.now, shared_.options.acknowledge_after);
  acknowledge_at_ = std::min(acknowledge_at_, at);
}

void Session::acknowledged_up_to(uint64_t sequence, uint32_t freed) {
  // Only ever forward: a late frame may carry an older state.
  bool any = false;
  while (!outgoing_.empty() && first_ <= sequence) {
    auto& payload = outgoing_.front().payload;
    if (payload.capacity() > 0 && spare_.size() < kSpareBuffers)
      spare_.push_back(std::move(payload));
    outgoing_.pop_front();
    ++first_;
    if (cursor_ > 0) --cursor_;
    any = true;
  }
  if (any && shared_.options.lossy) {
    control_sent_at_ = shared_.now;
    if (round_trip_ > 0) sample_round_trip(-1);
  }
  auto step = static_cast<uint32_t>(freed - static_cast<uint32_t>(eager_matched_by_peer_));
  if (step < (1U << 31) && eager_matched_by_peer_ + step <= eager_sent_)
    eager_matched_by_peer_ += step;
}

// RFC 6298, section 2; a negative sample only ends the back-off.
void Session::sample_round_trip(Time rtt) {
  if (rtt >= 0) {
    if (round_trip_ == 0) {
      round_trip_ = std::max<Time>(rtt, 1);
      variation_ = rtt / 2;
    } else {
      Time error = rtt > round_trip_ ? rtt - round_trip_ : round_trip_ - rtt;
      variation_ = (3 * variation_ + error) / 4;
      round_trip_ = (7 * round_trip_ + rtt) / 8;
    }
  }
  rto_ = std::clamp(round_trip_ + 4 * variation_, shared_.options.minimum_rto,
                    shared_.options.maximum_rto);
}

Status Session::take_control(const Frame& frame, std::span<const std::byte> payload) {
  if (!lost_.is_ok()) return Status::ok();
  if (payload.size() != frame.length) return {Code::kCorrupted, "a frame without its payload"};
  if (frame.has_sum && crc32c(payload) != frame.sum) {
    return {Code::kCorrupted, "a payload failed its CRC"};
  }
  if (frame.acknowledged > sent_up_to_) {
    return {Code::kCorrupted, "an acknowledgement of frames that were never sent"};
  }
  heard();
  acknowledged_up_to(frame.acknowledged, frame.freed);
  if (!is_sequenced(frame.type)) return process(frame, payload);

  if (frame.position <= taken_) {  // a repeat: its acknowledgement was lost
    schedule_acknowledgement(true);
    return Status::ok();
  }
  if (frame.position != taken_ + 1) {
    if (!shared_.options.lossy) return {Code::kCorrupted, "a gap in the control stream"};
    if (frame.position - taken_ <= kReorderWindow) {
      early_frames_.try_emplace(frame.position, frame,
                                std::vector<std::byte>(payload.begin(), payload.end()));
    }
    schedule_acknowledgement(true);
    return Status::ok();
  }
  // What is refused is not taken: it comes again after a reconnect, and whoever insists is lost by name.
  PACELINE_RETURN_IF_ERROR(process(frame, payload));
  ++taken_;
  while (!early_frames_.empty() && early_frames_.begin()->first == taken_ + 1) {
    auto node = early_frames_.extract(early_frames_.begin());
    PACELINE_RETURN_IF_ERROR(process(node.mapped().first, node.mapped().second));
    ++taken_;
  }
  ++unacknowledged_;
  bool much = eager_matched_ - eager_told_ >= shared_.options.eager_budget / 4;
  schedule_acknowledgement(shared_.options.lossy || much || unacknowledged_ >= kAcknowledgeEvery);
  return Status::ok();
}

Status Session::process(const Frame& frame, std::span<const std::byte> payload) {
  switch (frame.type) {
    case FrameType::kNote:
      shared_.events.notes.push_back({peer_, {payload.begin(), payload.end()}});
      return Status::ok();
    case FrameType::kEager:
      return on_eager(frame, payload);
    case FrameType::kReady:
      return on_ready(frame);
    case FrameType::kDone:
      return on_done(frame);
    case FrameType::kReject:
      return on_reject(frame, payload);
    case FrameType::kOffer:
      return on_offer(frame);
    case FrameType::kWithdraw:
      return on_withdraw(frame);
    case FrameType::kGoodbye:
      departed_ = true;
      schedule_acknowledgement(true);
      return Status::ok();
    case FrameType::kPieceAck:
      on_piece_ack(frame);
      return Status::ok();
    case FrameType::kPing:
      want_pong_ = true;
      return Status::ok();
    case FrameType::kAck:
    case FrameType::kPong:
      return Status::ok();
    case FrameType::kPiece:
      break;
  }
  return {Code::kCorrupted, "a piece on the control stream"};
}

Status Session::on_reject(const Frame& frame, std::span<const std::byte> payload) {
  auto code = static_cast<Code>(frame.digest);
  if (frame.digest == 0 || frame.digest > static_cast<uint32_t>(Code::kInternal)) {
    return {Code::kCorrupted, "a rejection without a reason"};
  }
  std::string text(reinterpret_cast<const char*>(payload.data()), payload.size());
  Status why(code, fmt::format("{} says: {}", name_, text));
  if (frame.message == 0) {  // of a send that waits
    if (auto it = sends_.find(frame.tag); it != sends_.end()) end_send(it->second, why);
    return Status::ok();
  }
  uint32_t slot = 0;
  if (find_receive(frame.message, &slot) != nullptr) end_receive(slot, 0, why);
  return Status::ok();
}

Time Session::next_timer() const {
  const Time acknowledges = connected_ ? acknowledge_at_ : kNever;
  if (!lost_.is_ok() || departed_) return lost_.is_ok() ? acknowledges : kNever;
  const auto& o = shared_.options;
  Time heard = std::max(heard_at_, shared_.grace);
  Time beat = o.heartbeat > 0 ? o.heartbeat : o.peer_timeout / 8;
  Time t = std::min(after(heard, o.peer_timeout), after(std::max(heard, pinged_at_), beat));
  t = std::min(t, acknowledges);
  if (!to_offer_.empty()) t = std::min(t, after(to_offer_.front().since, o.offer_after));
  if (o.lossy) {
    if (cursor_ > 0) t = std::min(t, after(control_sent_at_, rto_));
    if (!flying_.empty()) t = std::min(t, after(flying_.front().sent, rto_));
  }
  return t;
}

Status Session::on_timer() {
  if (!lost_.is_ok()) return Status::ok();
  const auto& o = shared_.options;
  Time now = shared_.now;
  if (!departed_) {
    Time heard = std::max(heard_at_, shared_.grace);
    if (now >= after(heard, o.peer_timeout)) {
      return {Code::kPeerLost,
              fmt::format("{} has not answered for {:.1f} s; is it running, and is the network up?",
                          name_, static_cast<double>(now - heard) / kSecond)};
    }
    Time beat = o.heartbeat > 0 ? o.heartbeat : o.peer_timeout / 8;
    if (now >= after(std::max(heard, pinged_at_), beat)) {
      want_ping_ = true;
      pinged_at_ = now;
    }
  }
  while (!to_offer_.empty() && now >= after(to_offer_.front().since, o.offer_after)) {
    Waiting w = to_offer_.front();
    to_offer_.pop_front();
    const SendOp& op = send_ops_[w.slot];
    if (op.used && op.generation == w.generation && op.message == 0) offer(w.slot);
  }
  if (o.lossy) {
    if (cursor_ > 0 && now >= after(control_sent_at_, rto_)) {
      rewind_control();
      control_sent_at_ = now;
      rto_ = std::min(2 * rto_, o.maximum_rto);
    }
    resend_overdue_pieces();
  }
  return Status::ok();
}

void Session::cancel_all(const Status& why) {
  for (uint32_t slot = 0; slot < send_ops_.size(); ++slot) {
    SendOp& op = send_ops_[slot];
    if (!op.used) continue;
    if (op.message != 0 && lost_.is_ok()) push_reject(op.tag, op.message, why);
    end_send(slot, why);
  }
  for (uint32_t slot = 0; slot < receive_ops_.size(); ++slot) {
    if (receive_ops_[slot].used) end_receive(slot, 0, why);
  }
  ready_.clear();  // has_pieces() would speak of sends that have ended
  to_offer_.clear();
}

void Session::lose(const Status& why, bool announce) {
  if (!lost_.is_ok()) return;
  lost_ = why;
  if (announce) shared_.events.losses.push_back({peer_, why});
  cancel_all(why);
  outgoing_.clear();
  cursor_ = 0;
  early_frames_.clear();
  unexpected_.clear();
  announced_.clear();
  piece_acks_.clear();
  ready_.clear();
  to_offer_.clear();
  flying_.clear();
}

}  // namespace paceline::wire
