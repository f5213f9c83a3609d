#include "bootstrap/host_address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <set>

namespace paceline::bootstrap {
namespace {

Result<std::vector<HostAddress>> look_up(const std::string& host, uint16_t port, int flags,
                                         int& error) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) return Status(Code::kUnavailable, ::gai_strerror(error));
  std::vector<HostAddress> addresses;
  for (auto* entry = found; entry != nullptr; entry = entry->ai_next) {
    HostAddress address;
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.length = entry->ai_addrlen;
    addresses.push_back(address);
  }
  ::freeaddrinfo(found);
  return addresses;
}

bool matches(const std::string& name, std::string_view patterns, bool exact) {
  while (true) {
    auto comma = patterns.find(',');
    auto pattern = patterns.substr(0, comma);
    if (!pattern.empty() && (exact ? name == pattern : name.starts_with(pattern))) return true;
    if (comma == std::string_view::npos) return false;
    patterns.remove_prefix(comma + 1);
  }
}

}  // namespace

uint16_t HostAddress::port() const {
  if (family() == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::string HostAddress::host() const {
  char text[NI_MAXHOST] = {};
  if (::getnameinfo(get(), length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) return "?";
  return text;
}

std::string HostAddress::text() const {
  return family() == AF_INET6 ? fmt::format("[{}]:{}", host(), port())
                              : fmt::format("{}:{}", host(), port());
}

bool HostAddress::is_loopback() const {
  if (family() == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr);
  }
  return (ntohl(reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr) >> 24) == 127;
}

Result<HostAddress> numeric_address(const std::string& address, uint16_t port) {
  int error = 0;
  auto found = look_up(address, port, AI_NUMERICHOST, error);
  if (!found)
    return Status(Code::kInvalidArgument, fmt::format("'{}' is no numeric address", address));
  return found->front();
}

Result<std::vector<HostAddress>> resolve(const std::string& host, uint16_t port) {
  int error = 0;
  auto found = look_up(host, port, 0, error);
  if (!found) {
    return Status(
        Code::kUnavailable,
        fmt::format("host '{}' can't be resolved ({}): check its name, /etc/hosts and DNS", host,
                    found.status().message()));
  }
  return found;
}

Result<HostAddress> local_address(int socket) {
  HostAddress address;
  address.length = sizeof(address.storage);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) {
    return Status(Code::kUnavailable, std::strerror(errno));
  }
  return address;
}

Result<HostAddress> route_source(const HostAddress& to) {
  // Connecting a datagram socket sends nothing; the kernel only looks up the route.
  int fd = ::socket(to.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0);
  auto target = to;
  if (to.port() == 0) {  // any port will do, 0 is refused by some kernels
    if (to.family() == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&target.storage)->sin6_port = htons(9);
    } else {
      reinterpret_cast<sockaddr_in*>(&target.storage)->sin_port = htons(9);
    }
  }
  Result<HostAddress> source = Status(Code::kUnavailable, fmt::format("no route to {}", to.host()));
  if (fd >= 0 && ::connect(fd, target.get(), target.length) == 0) source = local_address(fd);
  if (fd >= 0) ::close(fd);
  return source;
}

Result<HostPort> parse_host_port(const std::string& text, const std::string& what) {
  auto colon = text.rfind(':');
  auto bad = [&] {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}='{}': expected host:port or [IPv6]:port", what, text));
  };
  if (colon == std::string::npos || colon == 0) return bad();
  HostPort result;
  result.host = text.substr(0, colon);
  if (result.host.front() == '[' && result.host.back() == ']') {
    result.host = result.host.substr(1, result.host.size() - 2);
  } else if (result.host.find(':') != std::string::npos) {
    return bad();
  }
  auto [end, error] =
      std::from_chars(text.data() + colon + 1, text.data() + text.size(), result.port);
  if (error != std::errc() || end != text.data() + text.size() || result.port == 0 ||
      result.host.empty()) {
    return bad();
  }
  return result;
}

std::vector<InterfaceAddress> interfaces() {
  std::vector<InterfaceAddress> all;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return all;
  for (auto* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    HostAddress address;
    address.length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    std::memcpy(&address.storage, entry->ifa_addr, address.length);
    // A link-local address says nothing without its link and is no good to most peers.
    if (family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(
            &reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr)) {
      continue;
    }
    all.push_back({entry->ifa_name, address});
  }
  ::freeifaddrs(list);
  return all;
}

Result<HostAddress> choose_interface(const std::string& pattern,
                                     const std::vector<InterfaceAddress>& all, bool prefer_v6,
                                     const std::string& variable) {
  std::string_view rest = pattern;
  bool exclude = rest.starts_with('^');
  if (exclude) rest.remove_prefix(1);
  bool exact = rest.starts_with('=');
  if (exact) rest.remove_prefix(1);
  std::string chosen;
  const HostAddress* best = nullptr;
  std::set<std::string> names;
  for (const auto& candidate : all) {
    names.insert(candidate.name);
    // Excluding some still means a network: loopback has to be asked for by name.
    if (exclude && candidate.address.is_loopback()) continue;
    if (matches(candidate.name, rest, exact) == exclude) continue;
    if (chosen.empty()) chosen = candidate.name;
    if (candidate.name != chosen) continue;
    bool preferred = (candidate.address.family() == AF_INET6) == prefer_v6;
    if (best == nullptr || (preferred && (best->family() == AF_INET6) != prefer_v6))
      best = &candidate.address;
  }
  if (best != nullptr) return *best;
  std::string existing;
  for (const auto& name : names) existing += (existing.empty() ? "" : ", ") + name;
  return Status(
      Code::kUnavailable,
      fmt::format("{}='{}': no such interface that is up and has an address; there are: {}",
                  variable, pattern, existing.empty() ? "none" : existing));
}

}  // namespace paceline::bootstrap
