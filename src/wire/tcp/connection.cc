#include "wire/tcp/connection.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace paceline::wire {
namespace {

constexpr std::size_t kInput = 128 * 1024;  // holds the longest control frame, and many short ones
constexpr std::size_t kOutputBatch = 64 * 1024;  // control bytes gathered for one write
constexpr std::size_t kReadBudget = 512 * 1024;
static_assert(kInput > kFrameHeader + kMaxEager);

IoResult from_errno(ssize_t n) {
  if (n == 0) return {IoEnd::kBroken, 0, {}};
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {IoEnd::kBlocked, 0, {}};
  return {IoEnd::kBroken, errno, {}};
}

}  // namespace

IoResult flush_output(Connection& c, Counters& counters) {
  while (c.has_output()) {
    ssize_t n =
        ::send(c.fd.get(), c.out.data() + c.out_begin, c.out.size() - c.out_begin, MSG_NOSIGNAL);
    if (n <= 0) return from_errno(n == 0 ? -1 : n);
    c.out_begin += static_cast<std::size_t>(n);
    counters.wire_sent += static_cast<uint64_t>(n);
  }
  c.out.clear();
  c.out_begin = 0;
  return {IoEnd::kBudget, 0, {}};
}

IoResult fill_input(Connection& c, Counters& counters) {
  if (c.in.empty()) c.in.resize(kInput);
  if (c.in_begin > 0) {
    std::memmove(c.in.data(), c.in.data() + c.in_begin, c.in_end - c.in_begin);
    c.in_end -= c.in_begin;
    c.in_begin = 0;
  }
  std::size_t room = c.in.size() - c.in_end;
  ssize_t n = ::recv(c.fd.get(), c.in.data() + c.in_end, room, 0);
  if (n <= 0) return from_errno(n);
  c.in_end += static_cast<std::size_t>(n);
  counters.wire_received += static_cast<uint64_t>(n);
  // A short read has emptied the socket: no second call only to hear so.
  return {static_cast<std::size_t>(n) < room ? IoEnd::kBlocked : IoEnd::kBudget, 0, {}};
}

IoResult parse_control(Connection& c, Session& session) {
  while (c.in_end - c.in_begin >= kFrameHeader) {
    const std::byte* at = c.in.data() + c.in_begin;
    auto frame = decode_frame(std::span<const std::byte, kFrameHeader>(at, kFrameHeader));
    if (!frame.is_ok()) return {IoEnd::kViolation, 0, frame.status()};
    if (frame->type == FrameType::kPiece) {
      return {IoEnd::kViolation, 0, {Code::kCorrupted, "a piece on the control connection"}};
    }
    if (c.in_end - c.in_begin < kFrameHeader + frame->length) break;
    Status taken = session.take_control(*frame, {at + kFrameHeader, frame->length});
    if (!taken.is_ok()) return {IoEnd::kViolation, 0, taken};
    c.in_begin += kFrameHeader + frame->length;
  }
  return {IoEnd::kBlocked, 0, {}};
}

IoResult pump_control(Connection& c, Session& session, Counters& counters) {
  while (true) {
    if (c.out_begin >=
        kOutputBatch) {  // on a link that is never done it would grow by all that has left
      c.out.erase(c.out.begin(), c.out.begin() + static_cast<std::ptrdiff_t>(c.out_begin));
      c.out_begin = 0;
    }
    while (c.out.size() - c.out_begin < kOutputBatch && session.pull_control(c.out)) {
    }
    if (!c.has_output()) return {IoEnd::kBudget, 0, {}};
    IoResult r = flush_output(c, counters);
    if (r.end != IoEnd::kBudget) return r;
  }
}

namespace {

/// Sends some of what is left of the header and the payload by copying; `payload` may be empty.
ssize_t send_copy(Connection& c, std::span<const std::byte> payload, int flags) {
  iovec parts[2];
  std::size_t count = 0;
  if (c.piece_sent < kFrameHeader)
    parts[count++] = {c.header.data() + c.piece_sent, kFrameHeader - c.piece_sent};
  if (!payload.empty()) parts[count++] = {const_cast<std::byte*>(payload.data()), payload.size()};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  return ::sendmsg(c.fd.get(), &message, MSG_NOSIGNAL | flags);
}

}  // namespace

IoResult pump_piece(Connection& c, Session& session, PageLender* lender, Shared& shared) {
  if (!c.has_piece) {
    if (!session.pull_piece(c.purpose.flow, c.piece)) return {IoEnd::kBlocked, 0, {}};
    c.has_piece = true;
    c.piece_sent = 0;
    encode_frame(c.piece.frame, c.header);
  }
  const std::size_t all = kFrameHeader + c.piece.frame.length;
  bool lend =
      lender != nullptr && lender->usable() && c.piece.frame.length >= PageLender::kWorthwhile;
  while (c.piece_sent < all) {
    const std::size_t done = std::max(c.piece_sent, kFrameHeader) - kFrameHeader;
    std::span<const std::byte> payload(c.piece.data + done, c.piece.frame.length - done);
    std::size_t sent = 0;
    IoResult stopped;
    bool has_stopped = false;
    if (lend && c.piece_sent >= kFrameHeader) {
      const PageLender::Sent s = [&] {
        const OpenFor others(shared.interlude, payload.size());
        return lender->send_some(c.fd.get(), payload);
      }();
      if (s.outcome == PageLender::Outcome::kUnsuitable) {
        lend = false;
        continue;
      }
      sent = s.bytes;
      shared.counters.lent += s.bytes;
      has_stopped = s.outcome != PageLender::Outcome::kSent;
      if (s.outcome == PageLender::Outcome::kBroken) stopped = {IoEnd::kBroken, s.error, {}};
    } else {
      // The header waits in the socket for the payload, to leave in one packet with it.
      const ssize_t n = [&] {
        const OpenFor others(shared.interlude, lend ? 0 : payload.size());
        return lend ? send_copy(c, {}, MSG_MORE) : send_copy(c, payload, 0);
      }();
      has_stopped = n <= 0;
      if (has_stopped) stopped = from_errno(n == 0 ? -1 : n);
      sent = has_stopped ? 0 : static_cast<std::size_t>(n);
    }
    if (has_stopped) {
      c.is_writable = false;
      return stopped;
    }
    c.piece_sent += sent;
    shared.counters.wire_sent += sent;
  }
  c.has_piece = false;
  session.piece_written(c.piece);
  return {IoEnd::kBudget, 0, {}};
}

namespace {

/// Where the rest of the current payload goes; nullptr: a violation.
std::byte* payload_target(Connection& c, Session& session, Spare& spare) {
  Placement to = session.place(c.frame);  // anew at each read: its receive may have ended meanwhile
  if (to.kind == Placement::Kind::kViolation) return nullptr;
  if (to.kind == Placement::Kind::kBuffer) return to.at;
  if (c.scratch.size() < c.frame.length) c.scratch = spare.take(c.frame.length);
  return c.scratch.data();
}

Status end_of_payload(Connection& c, Session& session, Spare& spare) {
  Frame frame = c.frame;
  c.has_frame = false;
  c.payload_have = 0;
  std::vector<std::byte> scratch = std::exchange(c.scratch, {});
  Status taken = session.placed(
      frame, std::span(scratch).first(std::min<std::size_t>(frame.length, scratch.size())));
  if (!scratch.empty()) spare.give_back(std::move(scratch), frame.length);
  return taken;
}

}  // namespace

IoResult read_pieces(Connection& c, Session& session, Shared& shared) {
  std::size_t budget = kReadBudget;
  while (true) {
    iovec parts[2];
    int count = 0;
    std::size_t wanted = 0;
    std::size_t payload_rest = 0;
    if (c.has_frame) {
      std::byte* to = payload_target(c, session, shared.spare);
      if (to == nullptr) return {IoEnd::kViolation, 0, {Code::kCorrupted, "a piece of no message"}};
      payload_rest = c.frame.length - c.payload_have;
      parts[count++] = {to + c.payload_have, payload_rest};
    }
    // The next header comes with the same call.
    parts[count++] = {c.header.data() + c.header_have, kFrameHeader - c.header_have};
    wanted = payload_rest + (kFrameHeader - c.header_have);
    const ssize_t got = [&] {
      const OpenFor others(shared.interlude, payload_rest);
      return ::readv(c.fd.get(), parts, count);
    }();
    if (got <= 0) return from_errno(got);
    auto n = static_cast<std::size_t>(got);
    shared.counters.wire_received += n;
    session.heard();
    std::size_t of_payload = std::min(n, payload_rest);
    c.header_have += n - of_payload;
    if (c.has_frame) {
      c.payload_have += of_payload;
      if (c.payload_have == c.frame.length) {
        Status ok = end_of_payload(c, session, shared.spare);
        if (!ok.is_ok()) return {IoEnd::kViolation, 0, ok};
      }
    }
    if (!c.has_frame && c.header_have == kFrameHeader) {
      auto frame = decode_frame(c.header);
      if (!frame.is_ok()) return {IoEnd::kViolation, 0, frame.status()};
      if (frame->type != FrameType::kPiece) {
        return {IoEnd::kViolation, 0, {Code::kCorrupted, "not a piece on a data connection"}};
      }
      c.frame = *frame;
      c.has_frame = true;
      c.header_have = 0;
      c.payload_have = 0;
      if (n == wanted && budget > n) {
        budget -= n;
        continue;
      }
    }
    if (n < wanted) return {IoEnd::kBlocked, 0, {}};
    if (budget <= n) return {IoEnd::kBudget, 0, {}};
    budget -= n;
  }
}

}  // namespace paceline::wire
