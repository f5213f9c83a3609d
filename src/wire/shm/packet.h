// Packets with descriptors over a unix socket, and where the sockets live.
//
// SOCK_SEQPACKET keeps the bounds of packets, so that a descriptor belongs to exactly one of them,
// and its end of file is the news that the peer's process has ended.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/status.h"

namespace paceline::wire::shm {

inline constexpr std::size_t kPacketLimit = 1024;
inline constexpr std::size_t kPacketFds = 4;

struct Packet {
  std::vector<std::byte> bytes;
  std::vector<Fd> fds;
};

enum class PacketState { kOk, kAgain, kClosed };

/// kAgain: the socket's buffer is full.
PacketState send_packet(int socket, std::span<const std::byte> bytes, std::span<const int> fds);
/// kAgain: nothing is there. A packet above kPacketLimit comes as an empty one, which is no message; of descriptors those
/// are missing for which this process has no room.
PacketState receive_packet(int socket, Packet& packet);

/// A listening socket. `directory` empty: an abstract name (it lives and dies with the process,
/// needs no file system, and reaches every container of the network namespace); else a socket file
/// in it.
class Listener {
 public:
  static Result<Listener> open(const std::string& directory);
  Listener(Listener&&) noexcept = default;
  Listener& operator=(Listener&&) noexcept = default;
  ~Listener();

  [[nodiscard]] int fd() const { return fd_.get(); }
  /// "@paceline-1f…" (abstract) or a path.
  [[nodiscard]] const std::string& name() const { return name_; }
  /// The next connection, if one waits.
  [[nodiscard]] Fd accept() const;

 private:
  Listener(Fd fd, std::string name) : fd_(std::move(fd)), name_(std::move(name)) {}
  Fd fd_;
  std::string name_;
};

/// kUnavailable: the peer's queue is full, try again; kPeerLost: nobody listens there.
Result<Fd> connect_to(const std::string& name);

}  // namespace paceline::wire::shm
