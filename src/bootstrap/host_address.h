// Addresses, names and interfaces of this machine and of others.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "base/status.h"

namespace paceline::bootstrap {

struct HostAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  [[nodiscard]] int family() const { return storage.ss_family; }
  [[nodiscard]] uint16_t port() const;
  /// "10.0.0.1", "fe80::1%eth0".
  [[nodiscard]] std::string host() const;
  /// "10.0.0.1:80", "[fd00::1]:80".
  [[nodiscard]] std::string text() const;
  [[nodiscard]] bool is_loopback() const;
};

/// No look-up.
Result<HostAddress> numeric_address(const std::string& address, uint16_t port);
/// kUnavailable: "host 'x' can't be resolved: …", with what to check.
Result<std::vector<HostAddress>> resolve(const std::string& host, uint16_t port);
Result<HostAddress> local_address(int socket);
/// This machine's address that packets to `to` leave from: the interface of the route.
Result<HostAddress> route_source(const HostAddress& to);

/// "host:port", "[v6]:port"; kInvalidArgument quotes what is wrong. `what` is the setting's name,
/// for messages.
struct HostPort {
  std::string host;
  uint16_t port = 0;
};
Result<HostPort> parse_host_port(const std::string& text, const std::string& what);

/// One address of one interface that is up.
struct InterfaceAddress {
  std::string name;
  HostAddress address;
};
std::vector<InterfaceAddress> interfaces();

/// Chooses by NCCL_SOCKET_IFNAME's syntax: comma-separated prefixes ("eth"), exact names ("=eth0"),
/// "^docker,lo" (all but). The first match in the system's order; IPv4 before IPv6 within one
/// interface unless `prefer_v6`. kUnavailable lists the interfaces that exist.
Result<HostAddress> choose_interface(const std::string& pattern,
                                     const std::vector<InterfaceAddress>& all, bool prefer_v6,
                                     const std::string& variable);

}  // namespace paceline::bootstrap
