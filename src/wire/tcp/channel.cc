#include <fmt/format.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "base/log.h"
#include "wire/address.h"
#include "wire/tcp/channel_impl.h"

namespace paceline::wire {
namespace {

constexpr int kEventsAtOnce = 64;
// Per peer and progress(), then others are read; and of all that comes, before what has ended is handed out.
constexpr std::size_t kSendBudget = 1024 * 1024;
constexpr uint64_t kReceiveBudget = 2 * 1024 * 1024;

// What is through earlier may use all of a link that others use too; at 25 Gb/s one and a half megabytes.
constexpr Time kSustained = kMillisecond / 2;
constexpr Time kCountEvery = kMillisecond / 4;
// For how long a peer counts whose flows have taken all there was.
constexpr Time kLately = 2 * kMillisecond;
// For how long a peer counts among those that share the flows: longer, as a flow that rested begins slowly.
constexpr Time kRecently = 100 * kMillisecond;
// Of several peers now the one has more to get, now the other.
constexpr double kUneven = 1.5;

// How long the end of a peer or of the channel waits for lent memory to leave the sockets. A peer that
// reads needs far less; one that does not has its connections reset.
constexpr Time kRecallPatience = 10 * kMillisecond;

/// True when the peer's kernel has everything that was written; waits for that until `give_up`.
bool sends_all(int socket, Time give_up) {
  SteadyClock clock;
  while (true) {
    int waiting = 0;
    if (::ioctl(socket, SIOCOUTQ, &waiting) != 0 || waiting == 0) return true;
    if (clock.now() >= give_up) return false;
    ::poll(nullptr, 0, 1);
  }
}

Status invalid(std::string text) { return {Code::kInvalidArgument, std::move(text)}; }

Status check(const TcpOptions& o) {
  if (o.size < 1 || o.rank < 0 || o.rank >= o.size)
    return invalid(fmt::format("rank {} of {}", o.rank, o.size));
  if (o.flows < 1 || o.flows > 16)
    return invalid(fmt::format("{} flows: 1 to 16 are possible", o.flows));
  const auto& p = o.protocol;
  if (p.piece_bytes % kPieceAlign != 0 || p.piece_bytes == 0 || p.piece_bytes > kMaxPiece) {
    return invalid(fmt::format("pieces of {} bytes: a multiple of {} up to {} is possible",
                               p.piece_bytes, kPieceAlign, kMaxPiece));
  }
  if (p.eager_limit > kMaxEager)
    return invalid(fmt::format("eager limit {}: at most {}", p.eager_limit, kMaxEager));
  if (o.job_id.size() > 128 || o.build.size() > 64)
    return invalid("job id or build version too long");
  if (p.peer_timeout <= 0 || o.handshake_timeout <= 0)
    return invalid("a time-out must be positive");
  return Status::ok();
}

}  // namespace

Result<std::unique_ptr<TcpChannel>> TcpChannel::listen(TcpOptions options) {
  PACELINE_RETURN_IF_ERROR(check(options));
  PACELINE_ASSIGN(auto at, choose_address(options.interface, options.bind_address));
  at.set_port(options.port);
  PACELINE_ASSIGN(auto listener, listen_on(at));
  PACELINE_ASSIGN(auto local, local_endpoint(listener.get()));
  Descriptor epoll(::epoll_create1(EPOLL_CLOEXEC));
  Descriptor waker(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!epoll.valid() || !waker.valid()) {
    return Status(Code::kResourceExhausted, fmt::format("no descriptor: {}", std::strerror(errno)));
  }
  while (options.incarnation == 0)
    random_bytes(std::as_writable_bytes(std::span(&options.incarnation, 1)));
  return std::unique_ptr<TcpChannel>(std::make_unique<TcpChannelImpl>(
      std::move(options), local, std::move(listener), std::move(epoll), std::move(waker)));
}

TcpChannelImpl::TcpChannelImpl(TcpOptions options, Endpoint local, Descriptor listener,
                               Descriptor epoll, Descriptor waker)
    : options_(std::move(options)),
      local_(local),
      epoll_(std::move(epoll)),
      listener_(std::move(listener)),
      waker_(std::move(waker)),
      packets_(interface_packets(local_)),
      lender_(options_.zero_copy != ZeroCopy::kNobody) {
  shared_.options = options_.protocol;
  shared_.options.lossy = false;
  shared_.now = SteadyClock().now();
  identity_.secret = options_.secret;
  identity_.job_id = options_.job_id;
  identity_.build = options_.build;
  identity_.piece_bytes = options_.protocol.piece_bytes;
  identity_.rank = options_.rank;
  identity_.incarnation = options_.incarnation;
  identity_.name = fmt::format("rank {} (host {})", options_.rank, options_.host);
  book_.resize(static_cast<std::size_t>(options_.size));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = &listener_;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event);
  event.data.ptr = &waker_;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, waker_.get(), &event);
}

TcpChannelImpl::~TcpChannelImpl() { leave(); }

std::string TcpChannelImpl::describe() const {
  return fmt::format("tcp, {} flow{}", options_.flows, options_.flows == 1 ? "" : "s");
}

std::string TcpChannelImpl::address() const {
  auto text = "tcp=" + local_.text();
  return options_.machine.empty() ? text : join_addresses(text, "machine=" + options_.machine);
}

Status TcpChannelImpl::set_peer(Rank peer, const std::string& address, const std::string& host) {
  if (peer < 0 || peer >= options_.size)
    return invalid(fmt::format("rank {} of {}", peer, options_.size));
  auto field = address_field(address, "tcp");
  if (!field)
    return invalid(fmt::format("rank {} (host {}) gave no TCP address: '{}'", peer, host, address));
  PACELINE_RETURN_IF_ERROR(parse_endpoint(*field).status());
  // Who does not say where it runs may run here.
  const auto machine = address_field(address, "machine").value_or(options_.machine);
  const bool lends = options_.zero_copy == ZeroCopy::kEverybody ||
                     (options_.zero_copy == ZeroCopy::kOtherMachines && !options_.machine.empty() &&
                      machine != options_.machine);
  book_[static_cast<std::size_t>(peer)] = {*field, host, lends};
  // Who called before its host was known.
  if (auto known = peers_.find(peer); known != peers_.end()) {
    known->second->name = peer_name(peer);
    known->second->session->rename(known->second->name);
  }
  return Status::ok();
}

std::string TcpChannelImpl::peer_name(Rank rank) const {
  const auto& host = book_[static_cast<std::size_t>(rank)].host;
  return host.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} (host {})", rank, host);
}

TcpPeer& TcpChannelImpl::peer_state(Rank rank) {
  auto& slot = peers_[rank];
  if (!slot) {
    slot = std::make_unique<TcpPeer>();
    slot->rank = rank;
    slot->name = peer_name(rank);
    slot->session = std::make_unique<Session>(shared_, rank, slot->name);
    slot->out.resize(static_cast<std::size_t>(options_.flows));
    slot->flow_redial_at.resize(static_cast<std::size_t>(options_.flows), 0);
    schedule(*slot);
  }
  return *slot;
}

TcpPeer* TcpChannelImpl::use_peer(Rank rank, uint64_t cookie, bool has_cookie) {
  Status bad;
  if (rank < 0 || rank >= options_.size || rank == options_.rank) {
    bad = invalid(fmt::format("rank {} is no peer of {}", rank, identity_.name));
  } else if (!peers_.contains(rank) && book_[static_cast<std::size_t>(rank)].address.empty()) {
    bad = {Code::kUnavailable, fmt::format("the address of rank {} is not known yet", rank)};
  }
  if (!bad.is_ok()) {
    if (has_cookie) shared_.events.completions.push_back({cookie, 0, bad});
    return nullptr;
  }
  TcpPeer& peer = peer_state(rank);
  if (peer.control == nullptr && peer.dialing == nullptr && peer.redial_at == kNever &&
      peer.session->lost().is_ok() && !peer.session->departed()) {
    peer.redial_at = shared_.now;
  }
  mark(peer);
  return &peer;
}

void TcpChannelImpl::send(Rank rank, Tag tag, uint32_t digest, std::span<const std::byte> data,
                          uint64_t cookie) {
  if (TcpPeer* peer = use_peer(rank, cookie, true)) peer->session->send(tag, digest, data, cookie);
}

void TcpChannelImpl::receive(Rank rank, Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) {
  if (TcpPeer* peer = use_peer(rank, cookie, true))
    peer->session->receive(tag, digest, inbox, cookie);
}

void TcpChannelImpl::post_note(Rank rank, std::span<const std::byte> bytes) {
  if (TcpPeer* peer = use_peer(rank, 0, false)) peer->session->note(bytes);
}

// Any sequenced frame counts: they leave in order, and after an abort notes are nearly all of them.
bool TcpChannelImpl::notes_waiting() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
    const TcpPeer& peer = *entry.second;
    if (!peer.session->lost().is_ok() || peer.session->departed()) return false;
    return !peer.session->all_control_pulled() ||
           (peer.control != nullptr && peer.control->out_begin < peer.control->out.size());
  });
}

void TcpChannelImpl::mark(TcpPeer& peer) {
  if (peer.dirty) return;
  peer.dirty = true;
  dirty_.push_back(&peer);
}

bool TcpChannelImpl::prepare_wait() { return dirty_.empty() && shared_.events.empty(); }

void TcpChannelImpl::wake() {
  uint64_t one = 1;
  // Fails only when the counter is full: then the descriptor is readable already.
  [[maybe_unused]] auto n = ::write(waker_.get(), &one, sizeof one);
}

bool TcpChannelImpl::progress(Time now, Events& events) {
  // Peers must not pay for a time in which this process itself did not run.
  Time beat = std::max<Time>(shared_.options.peer_timeout / 8, kMillisecond);
  if (now - shared_.now > 2 * beat) shared_.grace = now;
  shared_.now = now;
  flush_dirty();
  epoll_event ready[kEventsAtOnce];
  int count = ::epoll_wait(epoll_.get(), ready, kEventsAtOnce, 0);
  const uint64_t enough = shared_.counters.wire_received + kReceiveBudget;
  for (int i = 0; i < count; ++i) {
    void* who = ready[i].data.ptr;
    if (who == &waker_) {
      uint64_t drained;
      [[maybe_unused]] auto n = ::read(waker_.get(), &drained, sizeof drained);
    } else if (who == &listener_) {
      accept_some();
    } else if (auto* c = static_cast<Connection*>(who); c->is_open()) {
      // What is left in a socket is reported again.
      if (c->role == Connection::Role::kDataIn && shared_.counters.wire_received > enough) continue;
      handle_event(*c, ready[i].events);
    }
  }
  run_timers();
  flush_dirty();
  limit_flows();
  graveyard_.clear();
  bool any = !shared_.events.empty();
  collect(events);
  return any || count > 0;
}

void TcpChannelImpl::collect(Events& events) {
  auto move_all = [](auto& from, auto& to) {
    if (to.empty()) {
      std::swap(from, to);
    } else {
      std::move(from.begin(), from.end(), std::back_inserter(to));
      from.clear();
    }
  };
  move_all(shared_.events.completions, events.completions);
  move_all(shared_.events.notes, events.notes);
  move_all(shared_.events.losses, events.losses);
}

void TcpChannelImpl::flush_dirty() {
  // What follows may mark a peer again (more to send than the budget): that is for the next round.
  std::vector<TcpPeer*> now_dirty;
  now_dirty.swap(dirty_);
  // All peers' control before any peer's data: they share this host's link, and its queue holds milliseconds of data. A
  // receive announced behind that keeps its sender, and with it a ring, idle for as long.
  for (TcpPeer* peer : now_dirty) {
    peer->dirty = false;
    flush_control(*peer);
  }
  for (TcpPeer* peer : now_dirty) flush_data(*peer);
  if (dirty_.empty()) {
    now_dirty.clear();
    dirty_.swap(now_dirty);  // keeps the capacity
  }
}

void TcpChannelImpl::flush_control(TcpPeer& peer) {
  run_connection_timers(peer);
  if (peer.control == nullptr || peer.control->wants_write) return;
  Connection& c = *peer.control;
  IoResult r = pump_control(c, *peer.session, shared_.counters);
  if (r.end == IoEnd::kBroken) {
    broken(c, r);
  } else if (r.end == IoEnd::kBlocked) {
    ask_for_write(c, true);
  }
}

void TcpChannelImpl::flush_data(TcpPeer& peer) {
  feed_flows(peer);
  note_backlog(peer);
  schedule(peer);
}

void TcpChannelImpl::note_backlog(TcpPeer& peer) {
  const bool waits = peer.session->lost().is_ok() && peer.session->has_pieces();
  if (waits != peer.is_waiting) waiting_ += waits ? 1 : -1;
  if (waits || peer.is_waiting) peer.waited_at = shared_.now;
  peer.is_waiting = waits;
}

void TcpChannelImpl::feed_flows(TcpPeer& peer) {
  std::size_t sent = 0;
  bool any = true;
  const bool lends = book_[static_cast<std::size_t>(peer.rank)].lends;
  // One piece a flow and round: whichever flow can take bytes takes the next piece.
  while (any && sent < kSendBudget) {
    any = false;
    int taking = 0;
    for (std::size_t i = 0; i < peer.out.size(); ++i) {
      Connection* c = peer.out[i];
      if (c == nullptr || c->role != Connection::Role::kDataOut) continue;
      const bool takes = ++taking <= flows_in_use_;
      if (!c->is_writable) continue;
      if (!c->has_piece && (!takes || !peer.session->has_pieces())) continue;
      IoResult r = pump_piece(*c, *peer.session, lends ? &lender_ : nullptr, shared_);
      if (r.end == IoEnd::kBroken) {
        broken(*c, r);
      } else if (r.end == IoEnd::kBudget) {
        any = true;
        sent += shared_.options.piece_bytes;
      }
    }
  }
  if (any) mark(peer);
}

/// How many peers the limit is dealt to: those with more than leaves, now or lately, for that changes by the message. They
/// share the flows, too: where three nodes send into a link by two flows each, every flow's window is a few packets, and one
/// that loses a packet stops until that is missed. All together have as many as one alone, or one each.
void TcpChannelImpl::count_waiting() {
  if (shared_.now - counted_at_ < kCountEvery) return;
  counted_at_ = shared_.now;
  sharing_ = 0;
  int share_flows = 0;
  for (const auto& [rank, peer] : peers_) {
    sharing_ += peer->is_waiting || shared_.now - peer->waited_at < kLately ? 1 : 0;
    share_flows += peer->is_waiting || shared_.now - peer->waited_at < kRecently ? 1 : 0;
  }
  share_flows = std::max(share_flows, 1);  // one that waited may be gone
  flows_in_use_ = (options_.flows + share_flows - 1) / share_flows;
}

/// Only while more has been waiting than leaves, for some time: a short message must not be stretched to the time that it
/// would take beside all others.
void TcpChannelImpl::limit_flows() {
  if (waiting_ == 0) waits_since_ = kNever;
  if (waiting_ > 0 && waits_since_ == kNever) waits_since_ = shared_.now;
  const bool sustained = waiting_ > 0 && shared_.now - waits_since_ >= kSustained;
  if (waiting_ > 0) count_waiting();
  const auto sharing = static_cast<int>(std::max<uint64_t>(sharing_, 1));
  const double part = sharing > 1 ? kUneven / sharing : 1.0;
  const auto limit =
      sustained ? static_cast<uint64_t>(
                      std::ceil(part * static_cast<double>(rate_limit_.load()) / flows_in_use_))
                : 0;
  if (limit == flows_limited_to_) return;
  flows_limited_to_ = limit;
  for (const auto& [rank, peer] : peers_) {
    for (const Connection* c : peer->out)
      if (c != nullptr && c->role == Connection::Role::kDataOut)
        paceline::wire::limit_rate(c->fd.get(), limit);
  }
}

Time TcpChannelImpl::peer_timer(const TcpPeer& peer) const {
  Time t = std::min(peer.session->next_timer(), peer.redial_at);
  if (peer.control != nullptr && peer.session->has_pieces()) {
    for (std::size_t i = 0; i < peer.out.size(); ++i) {
      if (peer.out[i] == nullptr) t = std::min(t, peer.flow_redial_at[i]);
    }
  }
  return t;
}

void TcpChannelImpl::schedule(TcpPeer& peer) {
  Time t = peer_timer(peer);
  if (t >= peer.timer_at) return;
  peer.timer_at = t;
  timers_.push({t, peer.rank});
}

void TcpChannelImpl::run_timers() {
  expire_handshakes();
  if (listener_paused_ && shared_.now >= listener_resume_at_) {
    listener_paused_ = false;
    listener_resume_at_ = kNever;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &listener_;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
  }
  while (!timers_.empty() && timers_.top().at <= shared_.now) {
    Timer timer = timers_.top();
    timers_.pop();
    TcpPeer& peer = *peers_.at(timer.peer);
    if (timer.at != peer.timer_at) continue;  // an earlier one has replaced it
    peer.timer_at = kNever;
    Status alive = peer.session->on_timer();
    if (!alive.is_ok()) {
      if (!peer.last_error.empty() && peer.control == nullptr) {
        alive = {alive.code(), alive.message() + " (" + peer.last_error + ")"};
      }
      lose(peer, alive);
    }
    mark(peer);
  }
}

Time TcpChannelImpl::next_timer() const {
  if (!dirty_.empty() || !shared_.events.empty()) return 0;  // posted since the last progress()
  Time t = std::min(handshake_check_at_, listener_resume_at_);
  if (!timers_.empty()) t = std::min(t, timers_.top().at);
  return t;
}

void TcpChannelImpl::handle_event(Connection& c, uint32_t what) {
  switch (c.role) {
    case Connection::Role::kAccepting:
    case Connection::Role::kDialing:
    case Connection::Role::kClosing:
      handle_handshake(c, what);
      return;
    case Connection::Role::kControl:
      handle_control(c, what);
      return;
    case Connection::Role::kDataIn:
      handle_data_in(c);
      return;
    case Connection::Role::kDataOut:
      if ((what & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) != 0) {
        broken(c, {IoEnd::kBroken, socket_error(c.fd.get()), {}});
        return;
      }
      if ((what & EPOLLOUT) != 0) {
        c.is_writable = true;
        mark(peer_state(c.peer));
      }
      return;
  }
}

void TcpChannelImpl::handle_control(Connection& c, uint32_t what) {
  TcpPeer& peer = peer_state(c.peer);
  mark(peer);
  if ((what & EPOLLOUT) != 0) ask_for_write(c, false);  // flush_control() writes
  if ((what & (EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP)) == 0) return;
  IoResult r = fill_input(c, shared_.counters);
  if (r.end == IoEnd::kBroken) {
    broken(c, r);
    return;
  }
  IoResult parsed = parse_control(c, *peer.session);
  if (parsed.end == IoEnd::kViolation) violated(c, parsed.violation);
}

void TcpChannelImpl::handle_data_in(Connection& c) {
  TcpPeer& peer = peer_state(c.peer);
  IoResult r = read_pieces(c, *peer.session, shared_);
  mark(peer);
  if (r.end == IoEnd::kBroken) broken(c, r);
  if (r.end == IoEnd::kViolation) violated(c, r.violation);
}

void TcpChannelImpl::stop_pieces(TcpPeer& peer) {
  // A frame that was begun can't be ended without the caller's memory: its connection has to go.
  const bool is_lent = book_[static_cast<std::size_t>(peer.rank)].lends && lender_.has_lent() &&
                       peer.session->has_started_sends();
  const Time give_up = after(SteadyClock().now(), kRecallPatience);
  for (Connection*& flow : peer.out) {
    if (flow == nullptr || flow->role != Connection::Role::kDataOut) continue;
    if (!flow->has_piece && (!is_lent || sends_all(flow->fd.get(), give_up))) continue;
    Connection* c = flow;
    flow = nullptr;
    if (is_lent) reset_on_close(c->fd.get());
    if (std::exchange(c->has_piece, false)) peer.session->piece_written(c->piece);
    close(*c);
  }
}

void TcpChannelImpl::lose(TcpPeer& peer, const Status& why, bool announce) {
  if (!peer.session->lost().is_ok()) return;
  stop_pieces(peer);
  for (Connection*& c : peer.out) {
    if (c != nullptr) close(*std::exchange(c, nullptr));
  }
  for (Connection* c : peer.in) close(*c);
  peer.in.clear();
  if (peer.control != nullptr) close(*std::exchange(peer.control, nullptr));
  if (peer.dialing != nullptr) close(*std::exchange(peer.dialing, nullptr));
  peer.redial_at = kNever;
  peer.session->lose(why, announce);
  note_backlog(peer);
}

void TcpChannelImpl::drop_peer(Rank rank, const Status& why) {
  if (rank < 0 || rank >= options_.size || rank == options_.rank) return;
  lose(peer_state(rank), why, false);
}

void TcpChannelImpl::abort(const Status& why) {
  if (!shared_.aborted.is_ok()) return;
  shared_.aborted = why;
  for (auto& [rank, peer] : peers_) {
    stop_pieces(*peer);
    peer->session->cancel_all(why);
    mark(*peer);
  }
}

void TcpChannelImpl::leave() {
  // Peers get what is on its way, and learn that the end of the connection is none of a fault.
  leaving_ = true;
  for (auto& [rank, peer] : peers_) {
    stop_pieces(*peer);
    if (peer->control == nullptr) continue;
    peer->session->goodbye();
    mark(*peer);
  }
  SteadyClock clock;
  const Time begin = clock.now();
  Events ignored;
  while (true) {
    progress(clock.now(), ignored);
    ignored.clear();
    bool done = true;
    for (auto& [rank, peer] : peers_) {
      if (peer->control != nullptr && !peer->session->all_acknowledged()) done = false;
    }
    Time left = options_.linger - (clock.now() - begin);
    if (done || left <= 0) break;
    pollfd p{epoll_.get(), POLLIN, 0};
    ::poll(&p, 1, static_cast<int>(std::min<Time>(left, 20 * kMillisecond) / kMillisecond) + 1);
  }
}

bool TcpChannelImpl::break_flow(Rank rank, int flow) {
  auto it = peers_.find(rank);
  if (it == peers_.end()) return false;
  TcpPeer& peer = *it->second;
  Connection* c = nullptr;
  if (flow < 0) c = peer.control;
  if (flow >= 0 && flow < static_cast<int>(peer.out.size()))
    c = peer.out[static_cast<std::size_t>(flow)];
  if (c == nullptr) return false;
  return ::shutdown(c->fd.get(), SHUT_RDWR) == 0;
}

}  // namespace paceline::wire
