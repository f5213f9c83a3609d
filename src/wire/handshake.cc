#include "wire/handshake.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"

namespace paceline::wire {
namespace {

constexpr uint32_t kMagic = 0x4E4C4350;  // "PCLN"
constexpr std::size_t kMessageHeader = 8;
constexpr uint8_t kHello = 1;
constexpr uint8_t kAnswer = 2;
constexpr uint8_t kProof = 3;
constexpr uint8_t kAccept = 4;
constexpr uint8_t kRefuse = 5;
constexpr std::size_t kNonce = 32;

std::span<const std::byte> text(std::string_view s) { return std::as_bytes(std::span(s)); }

void put_message(uint8_t kind, std::span<const std::byte> body, std::vector<std::byte>& out) {
  ByteWriter w;
  w.put(kMagic);
  w.put(kind);
  w.put(uint8_t{0});
  w.put(static_cast<uint16_t>(body.size()));
  w.put_bytes(body);
  out.insert(out.end(), w.bytes().begin(), w.bytes().end());
}

void put_nonce(ByteWriter& w) {
  std::byte nonce[kNonce];
  random_bytes(nonce);
  w.put_bytes(nonce);
}

Mac proof_of(const Identity& self, std::string_view side, std::span<const std::byte> hello,
             std::span<const std::byte> answer) {
  return hmac_sha256(self.secret, {text("paceline wire"), text(side), hello, answer});
}

/// A stranger's word, for a log that people read on terminals.
std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 32;
  std::string out(text.substr(0, kLongest));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return out;
}

Status version_mismatch(const Identity& self, std::string_view other, uint32_t wire,
                        std::string_view build) {
  return {Code::kMismatch,
          fmt::format("{} runs paceline {} (wire version {}), {} runs paceline {} (wire version "
                      "{}): install the same "
                      "version everywhere",
                      self.name, self.build, self.wire_version, other, printable(build), wire)};
}

}  // namespace

void Handshake::fail(Complaint about, Status why, bool is_final) {
  state_ = State::kFailed;
  complaint_ = about;
  status_ = std::move(why);
  final_ = is_final;
}

Handshake Handshake::connector(const Identity& self, Rank peer, uint64_t incarnation,
                               std::string name, Purpose purpose, std::vector<std::byte>& out) {
  Handshake h(self);
  h.is_connector_ = true;
  h.peer_ = peer;
  h.incarnation_ = incarnation;
  h.name_ = std::move(name);
  h.purpose_ = purpose;
  ByteWriter w;
  w.put(self.wire_version);
  w.put_string(self.build);
  put_nonce(w);
  w.put_string(self.job_id);
  w.put(self.piece_bytes);
  w.put(self.rank);
  w.put(peer);
  w.put(self.incarnation);
  w.put(static_cast<uint8_t>(purpose.is_control ? 1 : 0));
  w.put(purpose.flow);
  w.put(purpose.count);
  h.hello_ = w.take();
  put_message(kHello, h.hello_, out);
  return h;
}

Handshake Handshake::acceptor(const Identity& self) {
  Handshake h(self);
  h.name_ = "a caller";
  return h;
}

std::size_t Handshake::feed(std::span<const std::byte> in, std::vector<std::byte>& out) {
  std::size_t used = 0;
  while (state_ == State::kRunning && used < in.size()) {
    // First the header, then as much as it says: never a byte of what follows the handshake.
    std::size_t want = kMessageHeader;
    if (buffer_.size() >= kMessageHeader) {
      ByteReader r(buffer_);
      r.get<uint32_t>();
      r.get<uint16_t>();
      want += r.get<uint16_t>();
    }
    auto n = std::min(want - buffer_.size(), in.size() - used);
    buffer_.insert(buffer_.end(), in.begin() + static_cast<std::ptrdiff_t>(used),
                   in.begin() + static_cast<std::ptrdiff_t>(used + n));
    used += n;
    if (buffer_.size() < kMessageHeader) continue;
    ByteReader r(buffer_);
    auto magic = r.get<uint32_t>();
    auto kind = r.get<uint8_t>();
    auto zero = r.get<uint8_t>();
    auto length = r.get<uint16_t>();
    if (magic != kMagic || zero != 0 || kind < kHello || kind > kRefuse ||
        length > kMaxHandshakeBody) {
      fail(Complaint::kProtocol,
           {Code::kUnauthenticated, fmt::format("{} does not speak paceline's protocol", name_)},
           false);
      return used;
    }
    if (buffer_.size() < kMessageHeader + length) continue;
    auto message = std::move(buffer_);
    buffer_.clear();
    take(kind, std::span<const std::byte>(message).subspan(kMessageHeader), out);
  }
  return used;
}

void Handshake::take(uint8_t kind, std::span<const std::byte> body, std::vector<std::byte>& out) {
  if (!is_connector_ && kind == kHello && !answered_) {
    on_hello(body, out);
  } else if (!is_connector_ && kind == kProof && answered_) {
    on_proof(body, out);
  } else if (is_connector_ && kind == kAnswer && !answered_) {
    on_answer(body, out);
  } else if (is_connector_ && (kind == kRefuse || (kind == kAccept && answered_))) {
    on_verdict(kind, body);
  } else {
    fail(Complaint::kOrder,
         {Code::kUnauthenticated, fmt::format("{} sent an unexpected handshake message", name_)},
         false);
  }
}

void Handshake::on_hello(std::span<const std::byte> body, std::vector<std::byte>& out) {
  ByteReader r(body);
  auto wire = r.get<uint32_t>();
  auto build = r.get_string(64);
  if (r.ok() && wire != self_->wire_version) {
    turn_away(Complaint::kVersion, version_mismatch(*self_, "a caller", wire, build), out);
    return;
  }
  r.get_bytes(kNonce);
  auto job = r.get_string(128);
  auto piece = r.get<uint32_t>();
  peer_ = r.get<Rank>();
  auto meant = r.get<Rank>();
  incarnation_ = r.get<uint64_t>();
  auto control = r.get<uint8_t>();
  purpose_.is_control = control == 1;
  purpose_.flow = r.get<uint8_t>();
  purpose_.count = r.get<uint32_t>();
  if (!r.ok() || r.remaining() != 0 || control > 1 || incarnation_ == 0 || peer_ < 0) {
    fail(Complaint::kForm, {Code::kUnauthenticated, "a caller sent a malformed hello"}, false);
    return;
  }
  name_ = fmt::format("rank {}", peer_);
  if (job != self_->job_id) {
    turn_away(
        Complaint::kJob,
        {Code::kUnauthenticated, fmt::format("{} of another job called {}", name_, self_->name)},
        out);
  } else if (meant != self_->rank) {
    turn_away(Complaint::kPlace,
              {Code::kPeerLost,
               fmt::format("{} looked for rank {} but found {}", name_, meant, self_->name)},
              out);
  } else if (build != self_->build) {
    turn_away(Complaint::kVersion, version_mismatch(*self_, name_, wire, build), out);
  } else if (piece != self_->piece_bytes) {
    turn_away(
        Complaint::kSettings,
        {Code::kMismatch, fmt::format("{} and {} run with different settings (pieces of {} and "
                                      "{} bytes): start all ranks with the same environment",
                                      self_->name, name_, self_->piece_bytes, piece)},
        out);
  }
  if (state_ != State::kRunning) return;
  hello_.assign(body.begin(), body.end());
  ByteWriter w;
  w.put(self_->wire_version);
  w.put_string(self_->build);
  put_nonce(w);
  w.put(self_->rank);
  w.put(self_->incarnation);
  answer_ = w.bytes();
  w.put_bytes(proof_of(*self_, "acceptor", hello_, answer_));
  put_message(kAnswer, w.bytes(), out);
  answered_ = true;
}

void Handshake::on_answer(std::span<const std::byte> body, std::vector<std::byte>& out) {
  ByteReader r(body);
  auto wire = r.get<uint32_t>();
  auto build = r.get_string(64);
  if (r.ok() && (wire != self_->wire_version || build != self_->build)) {
    fail(Complaint::kVersion, version_mismatch(*self_, name_, wire, build), true);
    return;
  }
  r.get_bytes(kNonce);
  auto rank = r.get<Rank>();
  auto incarnation = r.get<uint64_t>();
  auto signed_bytes = body.size() - r.remaining();
  auto code = r.get_bytes(kMacBytes);
  if (!r.ok() || r.remaining() != 0) {
    fail(Complaint::kForm,
         {Code::kUnauthenticated, fmt::format("{} sent a malformed answer", name_)}, false);
    return;
  }
  answer_.assign(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(signed_bytes));
  if (!equal_secret(code, proof_of(*self_, "acceptor", hello_, answer_))) {
    fail(Complaint::kSecret,
         {Code::kUnauthenticated,
          fmt::format(
              "{} does not hold the secret that {} holds: give all ranks the same PACELINE_SECRET",
              name_, self_->name)},
         true);
    return;
  }
  if (rank != peer_ || (incarnation_ != 0 && incarnation != incarnation_)) {
    fail(
        Complaint::kPlace,
        {Code::kPeerLost, fmt::format("{} is gone: another process answers at its address", name_)},
        true);
    return;
  }
  incarnation_ = incarnation;
  answered_ = true;
  put_message(kProof, proof_of(*self_, "connector", hello_, answer_), out);
}

void Handshake::on_proof(std::span<const std::byte> body, std::vector<std::byte>& out) {
  if (!equal_secret(body, proof_of(*self_, "connector", hello_, answer_))) {
    turn_away(
        Complaint::kSecret,
        {Code::kUnauthenticated,
         fmt::format(
             "{} does not hold the secret that {} holds: give all ranks the same PACELINE_SECRET",
             name_, self_->name)},
        out);
    return;
  }
  state_ = State::kProven;
}

void Handshake::on_verdict(uint8_t kind, std::span<const std::byte> body) {
  ByteReader r(body);
  if (kind == kAccept) {
    count_ = r.get<uint32_t>();
    if (!r.ok() || r.remaining() != 0) {
      fail(Complaint::kForm,
           {Code::kUnauthenticated, fmt::format("{} sent a malformed verdict", name_)}, false);
      return;
    }
    state_ = State::kDone;
    return;
  }
  auto code = r.get<uint8_t>();
  auto duplicate = r.get<uint8_t>();
  count_ = r.get<uint32_t>();
  auto why = r.get_string(1024);
  if (!r.ok() || r.remaining() != 0 || code == 0 || code > static_cast<uint8_t>(Code::kInternal)) {
    fail(Complaint::kForm,
         {Code::kUnauthenticated, fmt::format("{} sent a malformed refusal", name_)}, false);
    return;
  }
  if (duplicate != 0) {
    state_ = State::kDuplicate;
    return;
  }
  for (char& c : why) {  // it comes from a stranger, perhaps: no control characters into our log
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  fail(Complaint::kVerdict,
       {static_cast<Code>(code), fmt::format("{} refused the connection: {}", name_, why)}, true);
}

void Handshake::accept(uint32_t count, std::vector<std::byte>& out) {
  ByteWriter w;
  w.put(count);
  put_message(kAccept, w.bytes(), out);
  state_ = State::kDone;
}

void Handshake::refuse(const Status& why, bool is_duplicate, uint32_t count,
                       std::vector<std::byte>& out) {
  send_refusal(why, is_duplicate, count, out);
  fail(Complaint::kMember, why, true);
}

void Handshake::turn_away(Complaint about, const Status& why, std::vector<std::byte>& out) {
  send_refusal(why, false, 0, out);
  fail(about, why, true);
}

void Handshake::send_refusal(const Status& why, bool is_duplicate, uint32_t count,
                             std::vector<std::byte>& out) {
  ByteWriter w;
  w.put(static_cast<uint8_t>(why.code()));
  w.put(static_cast<uint8_t>(is_duplicate ? 1 : 0));
  w.put(count);
  w.put_string(shortened(why.message(), 1024));
  put_message(kRefuse, w.bytes(), out);
}

}  // namespace paceline::wire
