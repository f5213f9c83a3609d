// Dialing, accepting, handshakes, and what follows when a connection breaks.
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "wire/tcp/channel_impl.h"

namespace paceline::wire {
namespace {

constexpr int kAcceptsAtOnce = 64;
constexpr int kMaxViolations = 3;
constexpr std::size_t kMaxIncomingFlows = 32;  // of one peer
constexpr Time kFirstBackoff = 20 * kMillisecond;
constexpr Time kLongestBackoff = 500 * kMillisecond;
constexpr Time kHigherRankWaits = 30 * kMillisecond;  // after a break the lower rank dials first
constexpr Time kSilentFailing = 1 * kSecond;  // then the log names why no data connection opens
constexpr Time kListenerPause = 100 * kMillisecond;
constexpr unsigned kUnsentPieces = 1;  // per data flow, beyond what the congestion window lets out

}  // namespace

unsigned TcpChannelImpl::user_timeout_ms() const {
  Time deadline = after(shared_.options.peer_timeout, 2 * kSecond) / kMillisecond;
  return static_cast<unsigned>(std::min<Time>(deadline, 1 << 30));
}

Connection* TcpChannelImpl::add(Descriptor fd, Connection::Role role, uint32_t interest) {
  auto owned = std::make_unique<Connection>();
  Connection* c = owned.get();
  c->fd = std::move(fd);
  c->role = role;
  c->deadline = after(shared_.now, options_.handshake_timeout);
  epoll_event event{};
  event.events = interest;
  event.data.ptr = c;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, c->fd.get(), &event);
  connections_.emplace(c, std::move(owned));
  handshake_check_at_ = std::min(handshake_check_at_, c->deadline);
  return c;
}

void TcpChannelImpl::close(Connection& c) {
  if (!c.is_open()) return;
  // Closing is not enough where somebody else holds the descriptor too: `c` would be told of events after its end.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, c.fd.get(), nullptr);
  c.fd.reset();
  std::erase(half_open_, &c);
  auto node = connections_.extract(&c);
  // Events of this round may still point to it.
  graveyard_.push_back(std::move(node.mapped()));
}

void TcpChannelImpl::ask_for_write(Connection& c, bool want) {
  if (c.wants_write == want) return;
  c.wants_write = want;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (want ? static_cast<uint32_t>(EPOLLOUT) : 0U);
  event.data.ptr = &c;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, c.fd.get(), &event);
}

void TcpChannelImpl::accept_some() {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    Descriptor fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        if (log::first("tcp accept")) {
          log::warning("no descriptor or memory for an incoming connection ({}): raise 'ulimit -n'",
                       std::strerror(errno));
        }
        // The listener stays readable: without a pause the caller would spin.
        epoll_event event{};
        event.data.ptr = &listener_;
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
        listener_paused_ = true;
        listener_resume_at_ = after(shared_.now, kListenerPause);
      }
      return;
    }
    tune(fd.get(), user_timeout_ms(), 0);
    if (half_open_.size() >= options_.half_open_limit) evict_half_open();
    Connection* c = add(std::move(fd), Connection::Role::kAccepting, EPOLLIN | EPOLLRDHUP);
    c->is_connected = true;
    c->handshake.emplace(Handshake::acceptor(identity_));
    half_open_.push_back(c);
  }
}

void TcpChannelImpl::evict_half_open() {
  if (log::first("tcp half-open")) {
    log::warning(
        "more than {} connections have not proven themselves: closing the oldest ones (a port "
        "scan?)",
        options_.half_open_limit);
  }
  close(*half_open_.front());
}

void TcpChannelImpl::expire_handshakes() {
  if (shared_.now < handshake_check_at_) return;
  handshake_check_at_ = kNever;
  std::vector<Connection*> late;
  for (auto& [c, owned] : connections_) {
    if (!c->handshake && c->role != Connection::Role::kClosing) continue;
    if (shared_.now >= c->deadline) {
      late.push_back(c);
    } else {
      handshake_check_at_ = std::min(handshake_check_at_, c->deadline);
    }
  }
  for (Connection* c : late) {
    if (!c->is_open()) continue;  // its peer was lost with the one before
    if (c->role == Connection::Role::kDialing) {
      dial_failed(*c, {Code::kTimeout, "the connection was not answered in time"}, false);
    } else {
      if (c->role == Connection::Role::kAccepting && log::first("tcp handshake time")) {
        log::warning("a connection did not prove itself within {:.1f} s: closed",
                     static_cast<double>(options_.handshake_timeout) / kSecond);
      }
      close(*c);
    }
  }
}

void TcpChannelImpl::dial(TcpPeer& peer, Purpose purpose) {
  const auto& known = book_[static_cast<std::size_t>(peer.rank)];
  auto retry = [&](const Status& why) {
    peer.last_error = why.message();
    if (purpose.is_control) {
      redial_later(peer, 0);
    } else {
      data_call_failed(peer, purpose.flow);
    }
  };
  if (!purpose.is_control && peer.no_data_since == kNever) peer.no_data_since = shared_.now;
  if (known.address.empty()) {  // it has called us, we have no address for it yet
    retry({Code::kUnavailable, "its address is not known"});
    return;
  }
  auto to = parse_endpoint(known.address);
  auto fd = to.is_ok() ? start_connect(*to, local_) : Result<Descriptor>(to.status());
  if (!fd.is_ok()) {
    if (fd.status().code() == Code::kPeerLost) {
      lose(peer,
           {Code::kPeerLost, fmt::format("{} is gone: {}", peer.name, fd.status().message())});
    } else {
      retry(fd.status());
    }
    return;
  }
  unsigned unsent = purpose.is_control ? 0 : kUnsentPieces * shared_.options.piece_bytes;
  tune(fd->get(), user_timeout_ms(), unsent);
  Connection* c = add(std::move(*fd), Connection::Role::kDialing, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
  c->wants_write = true;
  c->peer = peer.rank;
  c->purpose = purpose;
  c->handshake.emplace(
      Handshake::connector(identity_, peer.rank, peer.incarnation, peer.name, purpose, c->out));
  if (purpose.is_control) {
    peer.dialing = c;
  } else {
    peer.out[purpose.flow] = c;
  }
}

bool TcpChannelImpl::finish_connect(Connection& c) {
  int error = socket_error(c.fd.get());
  if (error == 0) {
    c.is_connected = true;
    return true;
  }
  TcpPeer& peer = peer_state(c.peer);
  // Nobody listens there any more: the process is gone.
  bool is_gone = error == ECONNREFUSED;
  dial_failed(c,
              {is_gone ? Code::kPeerLost : Code::kUnavailable,
               is_gone ? fmt::format("{} is gone: its port refuses connections", peer.name)
                       : fmt::format("connecting: {}", std::strerror(error))},
              is_gone);
  return false;
}

bool TcpChannelImpl::is_second_call(const Handshake& h) const {
  // Two ranks that call each other at once end one of the two calls, perhaps before a word was said.
  // Who it says it is has not been proven here, but all that follows from it is a line in the log.
  if (h.is_silent()) return true;
  auto peer = peers_.find(h.peer());
  return peer != peers_.end() &&
         (peer->second->control != nullptr || peer->second->dialing != nullptr);
}

void TcpChannelImpl::handle_handshake(Connection& c, uint32_t what) {
  if (!c.is_connected) {
    if ((what & (EPOLLOUT | EPOLLERR | EPOLLHUP)) == 0) return;
    if (!finish_connect(c)) return;
  }
  IoResult r{};
  if (c.role != Connection::Role::kClosing &&
      (what & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    r = fill_input(c, shared_.counters);
    if (r.end != IoEnd::kBroken) {
      c.in_begin += c.handshake->feed({c.in.data() + c.in_begin, c.in_end - c.in_begin}, c.out);
      if (c.handshake->state() == Handshake::State::kProven) decide(c);
    }
  }
  IoResult w = flush_output(c, shared_.counters);
  if (w.end == IoEnd::kBroken) r = w;
  ask_for_write(c, w.end == IoEnd::kBlocked);
  if (c.role == Connection::Role::kClosing) {
    if (w.end != IoEnd::kBlocked) close(c);
    return;
  }
  const Handshake& h = *c.handshake;
  if (h.state() == Handshake::State::kDone) {
    established(c);
  } else if (h.state() == Handshake::State::kDuplicate) {
    TcpPeer& peer = peer_state(c.peer);
    peer.control_count = std::max(peer.control_count, h.count());
    dial_failed(c, {Code::kUnavailable, "the peer's own connection serves"}, false);
  } else if (h.state() == Handshake::State::kFailed) {
    if (c.role == Connection::Role::kDialing) {
      dial_failed(c, h.status(), h.is_final());
      return;
    }
    // A duplicate is no stranger, and a stranger is mentioned once for each kind of complaint: what it says it is may be
    // another each time.
    if (h.status().code() != Code::kUnavailable &&
        log::first(fmt::format("tcp refused {}", static_cast<int>(h.complaint())))) {
      log::warning("a connection was refused: {}", h.status().message());
    }
    if (w.end == IoEnd::kBlocked) {
      c.role = Connection::Role::kClosing;
    } else {
      close(c);
    }
  } else if (r.end == IoEnd::kBroken) {
    if (c.role == Connection::Role::kDialing) {
      dial_failed(c, {Code::kUnavailable, "the connection ended during its handshake"}, false);
    } else {
      if (!is_second_call(h) && log::first("tcp truncated handshake"))
        log::warning("a connection ended during its handshake");
      close(c);
    }
  }
}

void TcpChannelImpl::decide(Connection& c) {
  Handshake& h = *c.handshake;
  const Status duplicate(Code::kUnavailable, "another connection serves");
  if (h.peer() >= options_.size || h.peer() == options_.rank) {
    h.refuse({Code::kInvalidArgument,
              fmt::format("rank {} in a job of {} ranks", h.peer(), options_.size)},
             false, 0, c.out);
    return;
  }
  TcpPeer& peer = peer_state(h.peer());
  if (!peer.session->lost().is_ok()) {
    h.refuse(peer.session->lost(), false, 0, c.out);
    return;
  }
  if (peer.incarnation != 0 && peer.incarnation != h.incarnation()) {
    Status gone(Code::kPeerLost,
                fmt::format("{} is gone: another process has taken its place", peer.name));
    h.refuse(gone, false, 0, c.out);
    lose(peer, gone);
    return;
  }
  if (h.purpose().is_control) {
    bool is_stale = h.purpose().count < peer.control_count;
    bool ours_goes_first = peer.dialing != nullptr && options_.rank < peer.rank;
    if (is_stale || ours_goes_first) {
      h.refuse(duplicate, true, peer.control_count, c.out);
      return;
    }
  }
  peer.incarnation = h.incarnation();
  h.accept(peer.control_count + 1, c.out);
}

void TcpChannelImpl::established(Connection& c) {
  const Handshake h = std::move(*c.handshake);
  c.handshake.reset();
  std::erase(half_open_, &c);
  bool is_ours = c.role == Connection::Role::kDialing;
  c.peer = h.peer();
  c.purpose = h.purpose();
  TcpPeer& peer = peer_state(c.peer);
  peer.incarnation = h.incarnation();
  peer.session->heard();
  mark(peer);
  const Packets cut = connection_packets(c.fd.get(), packets_);
  packets_ = {std::min(packets_.payload, cut.payload), cut.headers};
  if (c.purpose.is_control) {
    c.role = Connection::Role::kControl;
    if (is_ours) {
      peer.dialing = nullptr;
      peer.control_count = std::max(peer.control_count, h.count() - 1);
    }
    establish_control(c, peer);
    IoResult parsed = parse_control(c, *peer.session);  // what came with the verdict
    if (parsed.end == IoEnd::kViolation) violated(c, parsed.violation);
    return;
  }
  epoll_event event{};
  event.data.ptr = &c;
  if (is_ours) {
    c.role = Connection::Role::kDataOut;
    peer.no_data_since = kNever;
    if (flows_limited_to_ > 0) paceline::wire::limit_rate(c.fd.get(), flows_limited_to_);
    c.in = std::vector<std::byte>();  // `= {}` would keep its memory
    c.is_writable = true;
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, c.fd.get(), &event);
    return;
  }
  c.role = Connection::Role::kDataIn;
  c.in = std::vector<std::byte>();
  if (peer.in.size() >= kMaxIncomingFlows) {
    close(*peer.in.front());
    peer.in.erase(peer.in.begin());
  }
  peer.in.push_back(&c);
}

void TcpChannelImpl::establish_control(Connection& c, TcpPeer& peer) {
  if (peer.control != nullptr) close(*std::exchange(peer.control, nullptr));
  if (peer.dialing != nullptr) close(*std::exchange(peer.dialing, nullptr));
  ++peer.control_count;
  peer.control = &c;
  peer.redial_at = kNever;
  peer.backoff = 0;
  peer.session->control_regained();
}

void TcpChannelImpl::redial_later(TcpPeer& peer, Time delay) {
  if (delay == 0) {
    peer.backoff = std::clamp(2 * peer.backoff, kFirstBackoff, kLongestBackoff);
    delay = peer.backoff;
  }
  peer.redial_at = after(shared_.now, delay);
  schedule(peer);
}

void TcpChannelImpl::dial_failed(Connection& c, const Status& why, bool is_final) {
  TcpPeer& peer = peer_state(c.peer);
  Purpose purpose = c.purpose;
  if (peer.dialing == &c) peer.dialing = nullptr;
  if (!purpose.is_control && peer.out[purpose.flow] == &c) peer.out[purpose.flow] = nullptr;
  close(c);
  peer.last_error = why.message();
  if (is_final) {
    lose(peer, why);
  } else if (!purpose.is_control) {
    data_call_failed(peer, purpose.flow);
    schedule(peer);
  } else if (peer.control == nullptr) {
    redial_later(peer, 0);
  }
}

void TcpChannelImpl::data_call_failed(TcpPeer& peer, uint32_t flow) {
  peer.flow_redial_at[flow] = after(shared_.now, kFirstBackoff);
  const bool is_served = std::any_of(peer.out.begin(), peer.out.end(), [](const Connection* c) {
    return c != nullptr && c->role == Connection::Role::kDataOut;
  });
  if (is_served) {
    peer.no_data_since = kNever;
    return;
  }
  // The control connection stands, so nothing else would end this before the operation's own time-out, which can't name
  // the cause. Time in which this process did not run does not count.
  const Time failing = shared_.now - std::max(peer.no_data_since, shared_.grace);
  const double patience = static_cast<double>(shared_.options.peer_timeout) / kSecond;
  if (failing >= shared_.options.peer_timeout) {
    lose(peer,
         {Code::kPeerLost,
          fmt::format("{} can't be reached: for {:.1f} s no data connection could be opened ({})",
                      peer.name, patience, peer.last_error)});
  } else if (failing >= kSilentFailing && log::first("tcp data " + peer.name)) {
    log::warning("no data connection to {} can be opened ({}): trying on for {:.1f} s", peer.name,
                 peer.last_error, patience);
  }
}

void TcpChannelImpl::broken(Connection& c, const IoResult& result) {
  TcpPeer& peer = peer_state(c.peer);
  Session& session = *peer.session;
  mark(peer);
  if (result.error != 0) peer.last_error = std::strerror(result.error);
  if (c.role == Connection::Role::kControl) {
    peer.control = nullptr;
    close(c);
    session.control_lost();
    if (session.departed()) {
      if (session.has_requests())
        lose(peer, {Code::kPeerLost, fmt::format("{} has left the job", peer.name)});
    } else if (!leaving_) {
      redial_later(peer, options_.rank < peer.rank ? 1 : kHigherRankWaits);
    }
  } else if (c.role == Connection::Role::kDataOut) {
    uint32_t flow = c.purpose.flow;
    peer.out[flow] = nullptr;
    peer.flow_redial_at[flow] = shared_.now;
    if (std::exchange(c.has_piece, false)) session.piece_written(c.piece);
    close(c);
    session.flow_broken(flow);
  } else {
    std::erase(peer.in, &c);
    close(c);
  }
}

void TcpChannelImpl::violated(Connection& c, const Status& what) {
  TcpPeer& peer = peer_state(c.peer);
  log::warning("{}: {}; its connection is closed", peer.name, what.message());
  if (++peer.violations > kMaxViolations) {
    lose(peer, {Code::kCorrupted,
                fmt::format("{} keeps sending what is no message: {}", peer.name, what.message())});
    return;
  }
  broken(c, {});
}

void TcpChannelImpl::run_connection_timers(TcpPeer& peer) {
  Session& session = *peer.session;
  if (!session.lost().is_ok() || leaving_) return;
  if (session.departed() && peer.control == nullptr) {
    if (session.has_requests())
      lose(peer, {Code::kPeerLost, fmt::format("{} has left the job", peer.name)});
    return;
  }
  if (peer.redial_at <= shared_.now) {
    peer.redial_at = kNever;
    if (peer.control == nullptr && peer.dialing == nullptr)
      dial(peer, {true, 0, peer.control_count});
  }
  if (peer.control == nullptr || !session.has_pieces()) {
    peer.no_data_since = kNever;
    return;
  }
  for (std::size_t i = 0; i < peer.out.size(); ++i) {
    if (peer.out[i] != nullptr || peer.flow_redial_at[i] > shared_.now) continue;
    dial(peer, {false, static_cast<uint8_t>(i), 0});
    if (!session.lost().is_ok()) return;
  }
}

}  // namespace paceline::wire
