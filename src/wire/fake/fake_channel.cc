#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/crc32c.h"
#include "wire/fake/fake_network.h"

namespace paceline::wire {

FakeChannel::FakeChannel(FakeNetwork& network, Rank rank, Rank size, std::string host)
    : network_(network), rank_(rank), size_(size), host_(std::move(host)) {
  shared_.options = network.options().protocol;
  shared_.now = network.now();
}

FakeChannel::~FakeChannel() { network_.leave(rank_); }

void FakeChannel::set_peer_host(Rank peer, const std::string& host) {
  hosts_[peer] = host;
  auto known = sessions_.find(peer);
  if (known != sessions_.end()) known->second->rename(fmt::format("rank {} (host {})", peer, host));
}

Session& FakeChannel::session(Rank peer) {
  auto& slot = sessions_[peer];
  if (!slot) {
    auto it = hosts_.find(peer);
    auto host = it != hosts_.end() ? it->second : fmt::format("host-{}", peer);
    slot = std::make_unique<Session>(shared_, peer, fmt::format("rank {} (host {})", peer, host));
  }
  return *slot;
}

Session* FakeChannel::use(Rank peer, uint64_t cookie, bool has_cookie) {
  shared_.now = network_.now();
  if (peer < 0 || peer >= size_ || peer == rank_) {
    if (has_cookie) {
      shared_.events.completions.push_back(
          {cookie,
           0,
           {Code::kInvalidArgument, fmt::format("rank {} is no peer of rank {}", peer, rank_)}});
    }
    return nullptr;
  }
  dirty_.insert(peer);
  return &session(peer);
}

void FakeChannel::send(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
                       uint64_t cookie) {
  if (Session* s = use(peer, cookie, true)) s->send(tag, digest, data, cookie);
}

void FakeChannel::receive(Rank peer, Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) {
  if (Session* s = use(peer, cookie, true)) s->receive(tag, digest, inbox, cookie);
}

void FakeChannel::post_note(Rank peer, std::span<const std::byte> bytes) {
  if (Session* s = use(peer, 0, false)) s->note(bytes);
}

void FakeChannel::take(Arrival& arrival) {
  Session& s = session(arrival.from);
  dirty_.insert(arrival.from);
  if (arrival.is_reset) {
    s.lose({Code::kPeerLost, fmt::format("{} is gone: its port refuses connections", s.name())},
           true);
    return;
  }
  auto refuse = [&] { ++network_.counts_.refused; };
  const auto& bytes = arrival.bytes;
  shared_.counters.wire_received += bytes.size();
  if (bytes.size() < kFrameHeader) return refuse();
  auto frame = decode_frame(std::span<const std::byte, kFrameHeader>(bytes.data(), kFrameHeader));
  if (!frame.is_ok() || bytes.size() != kFrameHeader + frame->length) return refuse();
  std::span<const std::byte> payload(bytes.data() + kFrameHeader, frame->length);
  if (frame->has_sum && crc32c(payload) != frame->sum) return refuse();

  Status ok;
  if (frame->type == FrameType::kPiece) {
    Placement to = s.place(*frame);
    if (to.kind == Placement::Kind::kBuffer) std::memcpy(to.at, payload.data(), payload.size());
    ok = s.placed(*frame, payload);
  } else {
    ok = s.take_control(*frame, payload);
  }
  // The packet was whole: a peer that runs this code has sent what this code does not take.
  if (!ok.is_ok()) {
    s.lose({ok.code(), fmt::format("{} sent what is no message: {}", s.name(), ok.message())},
           true);
  }
}

void FakeChannel::flush(Session& s) {
  std::vector<std::byte> packet;
  while (s.pull_control(packet)) {
    shared_.counters.wire_sent += packet.size();
    network_.transmit(rank_, s.peer(), std::exchange(packet, {}));
  }
  Piece piece;
  while (s.pull_piece(0, piece)) {
    packet.resize(kFrameHeader + piece.frame.length);
    encode_frame(piece.frame, std::span<std::byte, kFrameHeader>(packet.data(), kFrameHeader));
    std::memcpy(packet.data() + kFrameHeader, piece.data, piece.frame.length);
    s.piece_written(piece);
    shared_.counters.wire_sent += packet.size();
    network_.transmit(rank_, s.peer(), std::exchange(packet, {}));
  }
}

bool FakeChannel::progress(Time now, Events& events) {
  shared_.now = now;
  auto arrivals = std::exchange(arrivals_, {});
  for (auto& arrival : arrivals) take(arrival);
  if (now >= timer_) {
    for (auto& [peer, s] : sessions_) {
      if (s->next_timer() > now) continue;
      Status alive = s->on_timer();
      if (!alive.is_ok()) s->lose(alive, true);
      dirty_.insert(peer);
    }
  }
  for (Rank peer : std::exchange(dirty_, {})) flush(*sessions_.at(peer));
  timer_ = kNever;
  for (auto& [peer, s] : sessions_) timer_ = std::min(timer_, s->next_timer());
  bool any = !arrivals.empty() || !shared_.events.empty();
  auto append = [](auto& from, auto& to) {
    std::move(from.begin(), from.end(), std::back_inserter(to));
    from.clear();
  };
  append(shared_.events.completions, events.completions);
  append(shared_.events.notes, events.notes);
  append(shared_.events.losses, events.losses);
  return any;
}

Time FakeChannel::next_timer() const {
  bool is_due = !dirty_.empty() || !arrivals_.empty() || !shared_.events.empty();
  return is_due ? 0 : timer_;
}

bool FakeChannel::prepare_wait() { return next_timer() != 0; }

void FakeChannel::drop_peer(Rank peer, const Status& why) {
  if (peer < 0 || peer >= size_ || peer == rank_) return;
  session(peer).lose(why, false);
}

void FakeChannel::abort(const Status& why) {
  if (!shared_.aborted.is_ok()) return;
  shared_.aborted = why;
  for (auto& [peer, s] : sessions_) {
    s->cancel_all(why);
    dirty_.insert(peer);
  }
}

}  // namespace paceline::wire
