// The Channel over kernel TCP.
//
// One listener per channel, bound to the chosen interface's address only. To each peer that is
// talked to: one control connection (whoever needs it first opens it; of two opened at once the
// lower rank's stays) and, from the first long message on, `flows` data connections in each
// direction that carries long messages, opened by the sender. Pieces take whichever flow can take
// bytes. Nothing is connected before it is needed.
//
// A flow that breaks is opened again at once and what it carried leaves again on the others; a peer
// that refuses the connection, or another process in its place, is lost at once; a peer that stays
// silent is lost after `protocol.peer_timeout`.
//
// Usage:
//   TcpOptions o;
//   o.rank = 0; o.size = 2; o.secret = …; o.interface = "eth0";
//   PACELINE_ASSIGN(auto channel, TcpChannel::listen(o));
//   publish(channel->address());                        // "tcp=10.0.0.1:40321"
//   channel->set_peer(1, address_of_rank_1, "host-b");  // before the first use of that peer
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/version.h"
#include "wire/channel.h"
#include "wire/handshake.h"
#include "wire/protocol.h"

namespace paceline::wire {

/// To whom long pieces leave straight from the caller's pages (page_lender.h).
enum class ZeroCopy { kNobody, kOtherMachines, kEverybody };

struct TcpOptions {
  Rank rank = 0;
  Rank size = 1;
  std::string host = "localhost";  ///< this host's name, for messages
  std::vector<std::byte>
      secret;  ///< the job's; both sides of every connection prove that they hold it
  std::string job_id = "job";    ///< at most 128 bytes
  std::string build = kVersion;  ///< version of this library, at most 64 bytes; must agree
  std::string interface;         ///< "eth0": listen on, and connect from, its first usable address
  std::string bind_address;      ///< "10.0.0.1", "fd00::1": wins over `interface`; both empty: the
                                 ///< first interface that is up and not loopback, else loopback
  uint16_t port = 0;             ///< 0: the kernel picks
  int flows = 2;                 ///< data connections per peer and direction, 1 … 16
  ZeroCopy zero_copy = ZeroCopy::kNobody;
  std::string machine;  ///< equal for what runs under one kernel; part of the address
  Time handshake_timeout = 5 * kSecond;
  Time linger = kSecond;  ///< the destructor waits at most so long for peers to have everything
  std::size_t half_open_limit =
      256;  ///< connections that have not proven themselves; then the oldest is closed
  uint64_t incarnation = 0;  ///< 0: random
  ProtocolOptions protocol;  ///< peer_timeout, heartbeat, piece_bytes …
};

class TcpChannel : public Channel {
 public:
  /// kInvalidArgument: an option out of range; kUnavailable: no such interface or address;
  /// kResourceExhausted: the port is taken.
  static Result<std::unique_ptr<TcpChannel>> listen(TcpOptions options);

  /// What this rank's Member::address has to contain.
  [[nodiscard]] virtual std::string address() const = 0;
  /// `address` is a Member::address (other fields are ignored), `host` its host for messages. Any
  /// time before the peer's first use; a later call changes only what the next connection uses.
  virtual Status set_peer(Rank peer, const std::string& address, const std::string& host) = 0;
  /// The identity that bootstrap and tests compare.
  [[nodiscard]] virtual uint64_t incarnation() const = 0;
  /// Breaks a connection as a network would (shutdown of the socket): for fault tests. flow -1:
  /// control. False when there is none.
  virtual bool break_flow(Rank peer, int flow) = 0;
};

}  // namespace paceline::wire
