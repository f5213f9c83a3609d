#include "wire/shm/connector.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace paceline::wire::shm {
namespace {

constexpr std::size_t kIncomingLimit = 256;
constexpr Time kIncomingPatience = 30 * kSecond;
constexpr Time kRetry = 2 * kMillisecond;
constexpr Time kListenerPause = 100 * kMillisecond;
constexpr Time kAwait = 20 * kMillisecond;  // for the other connection of a pair

pid_t peer_pid(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return 0;
  return credentials.pid;
}

}  // namespace

Connector::Connector(const ShmOptions& options, Listener listener, int bell, int epoll,
                     uint64_t epoll_key)
    : options_(options),
      listener_(std::move(listener)),
      bell_(bell),
      epoll_(epoll),
      epoll_key_(epoll_key),
      pidfd_(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0))),
      candidates_(static_cast<std::size_t>(options.size)) {
  random_bytes(token_);
  if (options_.use_vm_read && options_.relax_yama) allow_vm_read_by_all();
  watch(listener_.fd());
}

void Connector::watch(int fd) const {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = epoll_key_;
  (void)::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

void Connector::set_address(Rank rank, std::string name) { of(rank).address = std::move(name); }

void Connector::connect(Rank rank) {
  auto& candidate = of(rank);
  if (candidate.state != State::kNone) return;
  candidate.state = State::kConnecting;
  candidate.outgoing = std::make_unique<Outgoing>();
  ++outgoing_count_;
  active_.push_back(rank);
}

void Connector::forget(Rank rank) {
  drop_outgoing(rank);
  of(rank).state = State::kGone;
}

void Connector::drop_outgoing(Rank rank) {
  auto& candidate = of(rank);
  if (candidate.outgoing == nullptr) return;
  candidate.outgoing.reset();
  --outgoing_count_;
  std::erase(active_, rank);
}

void Connector::fail(Rank rank, Status why, std::vector<Outcome>& outcomes) {
  forget(rank);
  outcomes.push_back({rank, nullptr, std::move(why)});
}

void Connector::progress(Time now, std::vector<Outcome>& outcomes) {
  accept_all(now);
  for (auto& in : incoming_) step_incoming(in, now, outcomes);
  incoming_.remove_if([](const Incoming& in) { return in.done; });
  const auto active = active_;
  for (Rank rank : active) step_outgoing(rank, now, outcomes);
}

Time Connector::next_timer() const {
  Time next = listen_again_at_;
  for (const auto& in : incoming_) next = std::min(next, in.deadline);
  for (Rank rank : active_) {
    const auto& out = *candidates_[static_cast<std::size_t>(rank)].outgoing;
    if (!out.socket) next = std::min(next, out.retry_at);
  }
  return next;
}

// ---- accepting

void Connector::listen_for(uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = epoll_key_;
  (void)::epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_.fd(), &event);
}

/// The listener stays readable while calls wait: who polls would spin.
void Connector::stop_listening(Time now) {
  listen_for(0);
  listen_again_at_ = after(now, kListenerPause);
}

void Connector::accept_all(Time now) {
  if (now < listen_again_at_ && listen_again_at_ != kNever) return;
  if (std::exchange(listen_again_at_, kNever) != kNever) listen_for(EPOLLIN);
  for (;;) {
    if (incoming_.size() >= kIncomingLimit) return stop_listening(now);
    Fd socket = listener_.accept();
    if (!socket) {
      if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
      if (log::first("shm-accept")) {
        log::warning(
            "no descriptor or memory for the call of a rank of this node ({}): raise 'ulimit -n'",
            std::strerror(errno));
      }
      return stop_listening(now);
    }
    watch(socket.get());
    Incoming in;
    in.socket = std::move(socket);
    in.deadline = after(now, kIncomingPatience);
    random_bytes(in.nonce);
    incoming_.push_back(std::move(in));
  }
}

void Connector::step_incoming(Incoming& in, Time now, std::vector<Outcome>& outcomes) {
  Packet packet;
  while (!in.done) {
    switch (receive_packet(in.socket.get(), packet)) {
      case PacketState::kAgain:
        in.done = now >= in.deadline;
        return;
      case PacketState::kClosed:
        in.done = true;
        return;
      case PacketState::kOk:
        break;
    }
    auto message = decode(packet.bytes);
    if (message.is_ok() && !in.hello && std::holds_alternative<Hello>(*message)) {
      take_hello(in, std::get<Hello>(*message));
    } else if (message.is_ok() && in.hello && std::holds_alternative<Proof>(*message)) {
      take_proof(in, std::get<Proof>(*message), packet, outcomes);
    } else {
      in.done = true;
      if (log::first("shm-bad-packet")) {
        log::warning("a local process sent something else than a handshake to {}: refused",
                     address());
      }
    }
  }
}

void Connector::refuse(Incoming& in, RefusalReason reason, const std::string& text) {
  (void)send_packet(in.socket.get(), encode(Refusal{reason, text}), {});
  in.done = true;
  // Once for each kind of complaint, before the secret was asked for and after: what a stranger says it is may be
  // another each time.
  if (reason != RefusalReason::kDuplicate &&
      log::first(fmt::format("shm-refused {} {}", static_cast<int>(reason), in.hello ? 1 : 0))) {
    log::warning("refused a connection of a local process (pid {}): {}", peer_pid(in.socket.get()),
                 text);
  }
}

void Connector::take_hello(Incoming& in, const Hello& hello) {
  if (hello.size != options_.size || hello.to != options_.rank || hello.from < 0 ||
      hello.from >= options_.size || hello.from == options_.rank) {
    return refuse(in, RefusalReason::kMember,
                  fmt::format("rank {} of {} asked for rank {}, this is rank {} of {}", hello.from,
                              hello.size, hello.to, options_.rank, options_.size));
  }
  in.hello = hello;
  Challenge challenge;
  challenge.nonce = in.nonce;
  challenge.mac = prove(options_.secret, ProofBy::kAccepting, hello, in.nonce);
  if (send_packet(in.socket.get(), encode(challenge), {}) != PacketState::kOk) in.done = true;
}

void Connector::take_proof(Incoming& in, const Proof& proof, Packet& packet,
                           std::vector<Outcome>& outcomes) {
  const Hello& hello = *in.hello;
  if (!equal_secret(proof.mac, prove(options_.secret, ProofBy::kConnecting, hello, in.nonce))) {
    return refuse(in, RefusalReason::kSecret,
                  fmt::format("rank {} does not know this job's secret", hello.from));
  }
  if (hello.version != options_.version.substr(0, kVersionLimit)) {
    return refuse(
        in, RefusalReason::kVersion,
        fmt::format("rank {} runs '{}', rank {} runs '{}'; install the same build and settings "
                    "on all ranks",
                    hello.from, hello.version, options_.rank, options_.version));
  }
  auto& candidate = of(hello.from);
  const pid_t pid = peer_pid(in.socket.get());
  // Two that call each other at once: the lower rank's call counts, or this rank's own was answered already.
  const bool calling = candidate.state == State::kConnecting && options_.rank < hello.from;
  const bool answered = candidate.state == State::kReady && pid != 0 && pid == candidate.pid;
  if (calling || answered)
    return refuse(in, RefusalReason::kDuplicate, "the other connection of the pair is used");
  if (candidate.state == State::kReady || candidate.state == State::kGone) {
    return refuse(in, RefusalReason::kMember,
                  fmt::format("rank {} is already connected, or gone", hello.from));
  }
  if (packet.fds.size() != (proof.has_pidfd ? 3U : 2U)) {
    return refuse(in, RefusalReason::kMemory, "descriptors are missing (ulimit -n?)");
  }
  auto memory =
      SharedMemory::adopt(std::move(packet.fds[0]), segment_bytes(proof.ring_bytes), true);
  if (!memory.is_ok()) return refuse(in, RefusalReason::kMemory, memory.status().message());

  LinkParts parts;
  parts.memory = std::move(memory).value();
  parts.memory.close_fd();
  parts.bell = std::move(packet.fds[1]);
  if (proof.has_pidfd) parts.pidfd = std::move(packet.fds[2]);
  parts.ring_bytes = proof.ring_bytes;
  parts.side = 1;
  parts.pid = pid;
  parts.no_vm_read = vm_reason(parts.pid, proof.probe);
  Welcome welcome{static_cast<bool>(pidfd_), {reinterpret_cast<uintptr_t>(token_.data()), token_}};
  const int fds[2] = {bell_, pidfd_.get()};
  in.done = true;
  if (send_packet(in.socket.get(), encode(welcome), std::span(fds, pidfd_ ? 2 : 1)) !=
      PacketState::kOk) {
    return;  // gone already, or a full buffer right after connecting: it will try again or is lost
  }
  parts.socket = std::move(in.socket);
  drop_outgoing(hello.from);
  candidate.state = State::kReady;
  candidate.pid = pid;
  auto link = std::make_unique<Link>(std::move(parts));
  outcomes.push_back({hello.from, std::move(link), Status::ok()});
}

// ---- connecting

Result<SharedMemory> Connector::make_rings(uint64_t& ring_bytes) const {
  ring_bytes = std::clamp(options_.ring_bytes, kRingLeast, kRingMost);
  for (;;) {
    auto made = SharedMemory::create(segment_bytes(ring_bytes), SharedMemory::Pages::kReserve,
                                     options_.sources);
    if (made.is_ok() || ring_bytes / 2 < kRingLeast) return made;
    ring_bytes = ring_bytes / 2 / 4096 * 4096;
    if (log::first("shm-short")) {
      log::warning("little shared memory: {}; going on with smaller rings",
                   made.status().message());
    }
  }
}

std::string Connector::vm_reason(pid_t pid, const Probe& probe) const {
  if (!options_.use_vm_read) return "switched off";
  return probe_vm_read(pid, probe.address, probe.token);
}

void Connector::begin(Rank rank, Time now, std::vector<Outcome>& outcomes) {
  auto& out = *of(rank).outgoing;
  if (now < out.retry_at) return;
  auto socket = connect_to(of(rank).address);
  if (!socket.is_ok()) {
    if (socket.status().code() != Code::kUnavailable) return fail(rank, socket.status(), outcomes);
    out.retry_at = after(now, kRetry);
    return;
  }
  out.socket = std::move(socket).value();
  watch(out.socket.get());
  out.hello = {options_.rank, rank, options_.size, options_.version.substr(0, kVersionLimit), {}};
  random_bytes(out.hello.nonce);
  if (send_packet(out.socket.get(), encode(out.hello), {}) != PacketState::kOk) {
    fail(rank, {Code::kPeerLost, "it closed the connection"}, outcomes);
  }
}

void Connector::step_outgoing(Rank rank, Time now, std::vector<Outcome>& outcomes) {
  if (of(rank).outgoing != nullptr && !of(rank).outgoing->socket) begin(rank, now, outcomes);
  Packet packet;
  while (of(rank).outgoing != nullptr && of(rank).outgoing->socket) {
    auto& out = *of(rank).outgoing;
    switch (receive_packet(out.socket.get(), packet)) {
      case PacketState::kAgain:
        return;
      case PacketState::kClosed:
        return fail(rank, {Code::kPeerLost, "it closed the connection during the handshake"},
                    outcomes);
      case PacketState::kOk:
        break;
    }
    auto message = decode(packet.bytes);
    if (message.is_ok() && !out.proved && std::holds_alternative<Challenge>(*message)) {
      auto status = take_challenge(rank, std::get<Challenge>(*message));
      if (!status.is_ok()) return fail(rank, std::move(status), outcomes);
    } else if (message.is_ok() && out.proved && std::holds_alternative<Welcome>(*message)) {
      return take_welcome(rank, std::get<Welcome>(*message), packet, outcomes);
    } else if (message.is_ok() && std::holds_alternative<Refusal>(*message)) {
      return take_refusal(rank, std::get<Refusal>(*message), now, outcomes);
    } else {
      return fail(rank, {Code::kCorrupted, "it answered with something else than a handshake"},
                  outcomes);
    }
  }
}

Status Connector::take_challenge(Rank rank, const Challenge& challenge) {
  auto& out = *of(rank).outgoing;
  if (!equal_secret(challenge.mac,
                    prove(options_.secret, ProofBy::kAccepting, out.hello, challenge.nonce))) {
    return {Code::kUnauthenticated, "it does not know this job's secret"};
  }
  PACELINE_ASSIGN(out.memory, make_rings(out.ring_bytes));
  Proof proof;
  proof.mac = prove(options_.secret, ProofBy::kConnecting, out.hello, challenge.nonce);
  proof.ring_bytes = out.ring_bytes;
  proof.has_pidfd = static_cast<bool>(pidfd_);
  proof.probe = {reinterpret_cast<uintptr_t>(token_.data()), token_};
  const int fds[3] = {out.memory.fd(), bell_, pidfd_.get()};
  out.proved = true;
  if (send_packet(out.socket.get(), encode(proof), std::span(fds, pidfd_ ? 3 : 2)) ==
      PacketState::kOk) {
    return Status::ok();
  }
  return {Code::kPeerLost, "it closed the connection during the handshake"};
}

void Connector::take_welcome(Rank rank, const Welcome& welcome, Packet& packet,
                             std::vector<Outcome>& outcomes) {
  auto& out = *of(rank).outgoing;
  if (packet.fds.size() != (welcome.has_pidfd ? 2U : 1U)) {
    return fail(rank, {Code::kResourceExhausted, "its descriptors did not arrive (ulimit -n?)"},
                outcomes);
  }
  LinkParts parts;
  parts.bell = std::move(packet.fds[0]);
  if (welcome.has_pidfd) parts.pidfd = std::move(packet.fds[1]);
  parts.memory = std::move(out.memory);
  parts.memory.close_fd();
  parts.ring_bytes = out.ring_bytes;
  parts.side = 0;
  parts.pid = peer_pid(out.socket.get());
  parts.no_vm_read = vm_reason(parts.pid, welcome.probe);
  parts.socket = std::move(out.socket);
  drop_outgoing(rank);
  of(rank).state = State::kReady;
  of(rank).pid = parts.pid;
  auto link = std::make_unique<Link>(std::move(parts));
  outcomes.push_back({rank, std::move(link), Status::ok()});
}

void Connector::take_refusal(Rank rank, const Refusal& refusal, Time now,
                             std::vector<Outcome>& outcomes) {
  switch (refusal.reason) {
    case RefusalReason::kDuplicate:
      *of(rank).outgoing = Outgoing{};
      of(rank).outgoing->retry_at = after(now, kAwait);
      return;
    case RefusalReason::kSecret:
      return fail(rank, {Code::kUnauthenticated, "it refused this rank: " + refusal.text},
                  outcomes);
    case RefusalReason::kVersion:
      return fail(rank, {Code::kMismatch, "it refused this rank: " + refusal.text}, outcomes);
    case RefusalReason::kMember:
      return fail(rank, {Code::kPeerLost, "it refused this rank: " + refusal.text}, outcomes);
    case RefusalReason::kMemory:
      return fail(rank, {Code::kResourceExhausted, "it refused this rank: " + refusal.text},
                  outcomes);
  }
}

}  // namespace paceline::wire::shm
