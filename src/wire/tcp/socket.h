// Thin wrappers of the socket calls that the TCP channel uses: addresses, listening, connecting.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "base/packets.h"
#include "base/status.h"

namespace paceline::wire {

/// A numeric address with its port.
struct Endpoint {
  sockaddr_storage storage{};
  socklen_t length = 0;

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  [[nodiscard]] int family() const { return storage.ss_family; }
  [[nodiscard]] uint16_t port() const;
  void set_port(uint16_t port);
  /// "10.0.0.1:40321", "[fd00::1]:40321".
  [[nodiscard]] std::string text() const;
};

/// Owns a descriptor, which children of a fork do not keep.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Descriptor() { reset(); }
  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool valid() const { return fd_ >= 0; }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

/// "10.0.0.1:40321" or "[fd00::1%eth0]:40321"; numeric only.
Result<Endpoint> parse_endpoint(const std::string& text);
/// The address to listen on: `address` if given, else the first usable one of `interface`, else of
/// the first interface that is up and not loopback, else 127.0.0.1. The port is 0.
Result<Endpoint> choose_address(const std::string& interface, const std::string& address);

/// Non-blocking, close-on-exec, listening. The status names the port when it is taken.
Result<Descriptor> listen_on(const Endpoint& at);
Result<Endpoint> local_endpoint(int fd);
/// Starts a non-blocking connection from `from`'s address. Not ok: failed at once.
Result<Descriptor> start_connect(const Endpoint& to, const Endpoint& from);
/// No Nagle; the kernel's own time-out not below `deadline_ms`; `unsent_limit` > 0: at most about
/// so many bytes wait in the socket beyond what the congestion window lets out.
void tune(int fd, unsigned deadline_ms, unsigned unsent_limit);
/// The kernel sends no more than so many bytes a second, headers included, evenly; 0: as it can.
void limit_rate(int fd, uint64_t bytes_per_second);
/// What limit_rate() has set; 0: nothing.
uint64_t rate_limit(int fd);
/// How packets leave the interface that has this address; Packets{} where none has.
Packets interface_packets(const Endpoint& local);
/// How they leave a connection, whose two ends and path have agreed on it; `otherwise` where the kernel does not tell.
Packets connection_packets(int fd, const Packets& otherwise);
/// close() drops what the peer has not got yet and resets the connection.
void reset_on_close(int fd);
/// The pending error of a socket (0: none).
int socket_error(int fd);

}  // namespace paceline::wire
