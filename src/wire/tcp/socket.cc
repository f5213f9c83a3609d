#include "wire/tcp/socket.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/close_in_children.h"

namespace paceline::wire {
namespace {

std::string error_text(int error) { return std::strerror(error); }

bool is_link_local(const sockaddr* a) {
  return a->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr);
}

Endpoint endpoint_of(const sockaddr* a) {
  Endpoint e;
  e.length = a->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::memcpy(&e.storage, a, e.length);
  e.set_port(0);
  return e;
}

bool is_same_host(const sockaddr* a, const sockaddr* b) {
  if (a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET)
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
  return a->sa_family == AF_INET6 &&
         IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                            &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr);
}

/// How much an interface address is liked; 0: not at all.
int preference(const ifaddrs& i, const std::string& interface) {
  if (i.ifa_addr == nullptr || (i.ifa_flags & IFF_UP) == 0) return 0;
  int family = i.ifa_addr->sa_family;
  if (family != AF_INET && family != AF_INET6) return 0;
  if (!interface.empty() && interface != i.ifa_name) return 0;
  bool is_loopback = (i.ifa_flags & IFF_LOOPBACK) != 0;
  if (is_link_local(i.ifa_addr)) return interface.empty() ? 0 : 1;
  return (is_loopback ? 2 : 4) + (family == AF_INET ? 1 : 0);
}

}  // namespace

uint16_t Endpoint::port() const {
  return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                                    : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

void Endpoint::set_port(uint16_t port) {
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  }
}

std::string Endpoint::text() const {
  char host[NI_MAXHOST] = "?";
  ::getnameinfo(get(), length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return family() == AF_INET6 ? fmt::format("[{}]:{}", host, port())
                              : fmt::format("{}:{}", host, port());
}

Descriptor::Descriptor(int fd) : fd_(fd) {
  if (fd_ >= 0) close_in_children(fd_);
}

void Descriptor::reset(int fd) {
  if (fd_ >= 0) {
    keep_in_children(fd_);
    ::close(fd_);
  }
  fd_ = fd;
  if (fd_ >= 0) close_in_children(fd_);
}

Result<Endpoint> parse_endpoint(const std::string& text) {
  auto colon = text.rfind(':');
  if (colon == std::string::npos) {
    return Status(Code::kInvalidArgument, fmt::format("'{}' is no address with a port", text));
  }
  auto host = text.substr(0, colon);
  auto port = text.substr(colon + 1);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) {
    return Status(Code::kInvalidArgument,
                  fmt::format("'{}' is no numeric address with a port", text));
  }
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(found, &::freeaddrinfo);
  Endpoint e;
  e.length = found->ai_addrlen;
  std::memcpy(&e.storage, found->ai_addr, found->ai_addrlen);
  return e;
}

Result<Endpoint> choose_address(const std::string& interface, const std::string& address) {
  if (!address.empty()) {
    auto e = parse_endpoint(address.find(':') == std::string::npos ? address + ":0"
                                                                   : "[" + address + "]:0");
    if (!e.is_ok())
      return Status(Code::kInvalidArgument,
                    fmt::format("'{}' is no IPv4 or IPv6 address", address));
    return e;
  }
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0)
    return Status(Code::kUnavailable, "the interfaces can't be listed: " + error_text(errno));
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, &::freeifaddrs);
  const ifaddrs* best = nullptr;
  int best_preference = 0;
  std::string names;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr != nullptr && i->ifa_addr->sa_family == AF_PACKET)
      names += fmt::format(" {}", i->ifa_name);
    int p = preference(*i, interface);
    if (p > best_preference) {
      best = i;
      best_preference = p;
    }
  }
  if (best != nullptr) return endpoint_of(best->ifa_addr);
  if (interface.empty()) return parse_endpoint("127.0.0.1:0");
  return Status(Code::kUnavailable,
                fmt::format("interface '{}' is missing, down or without an address; there are:{}",
                            interface, names));
}

Result<Descriptor> listen_on(const Endpoint& at) {
  Descriptor fd(::socket(at.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return Status(Code::kResourceExhausted, "no socket: " + error_text(errno));
  int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (at.family() == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (::bind(fd.get(), at.get(), at.length) != 0 || ::listen(fd.get(), 1024) != 0) {
    int error = errno;
    if (error == EADDRINUSE) {
      return Status(Code::kResourceExhausted,
                    fmt::format("port {} is taken: choose another or 0 (any free one)", at.text()));
    }
    return Status(Code::kUnavailable,
                  fmt::format("can't listen on {}: {}", at.text(), error_text(error)));
  }
  return fd;
}

Result<Endpoint> local_endpoint(int fd) {
  Endpoint e;
  e.length = sizeof e.storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&e.storage), &e.length) != 0) {
    return Status(Code::kInternal, "getsockname: " + error_text(errno));
  }
  return e;
}

Result<Descriptor> start_connect(const Endpoint& to, const Endpoint& from) {
  Descriptor fd(::socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return Status(Code::kResourceExhausted, "no socket: " + error_text(errno));
  if (from.family() == to.family()) {
    int on = 1;
    ::setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    Endpoint any_port = from;
    any_port.set_port(0);
    (void)::bind(fd.get(), any_port.get(),
                 any_port.length);  // a hint: without it the route decides
  }
  if (::connect(fd.get(), to.get(), to.length) != 0 && errno != EINPROGRESS) {
    int error = errno;
    return Status(error == ECONNREFUSED ? Code::kPeerLost : Code::kUnavailable,
                  fmt::format("can't connect to {}: {}", to.text(), error_text(error)));
  }
  return fd;
}

void tune(int fd, unsigned deadline_ms, unsigned unsent_limit) {
  int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &deadline_ms, sizeof deadline_ms);
  if (unsent_limit > 0)
    ::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent_limit, sizeof unsent_limit);
}

void limit_rate(int fd, uint64_t bytes_per_second) {
  const unsigned long rate =
      bytes_per_second == 0 ? ~0UL : bytes_per_second;  // an int ends at 17 Gb/s
  ::setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
}

uint64_t rate_limit(int fd) {
  unsigned long rate = 0;
  socklen_t length = sizeof rate;
  if (::getsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, &length) != 0) return 0;
  return rate == ~0UL || rate == ~0U ? 0 : rate;
}

Packets interface_packets(const Endpoint& local) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, &::freeifaddrs);
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || !is_same_host(i->ifa_addr, local.get())) continue;
    ifreq request{};
    std::strncpy(request.ifr_name, i->ifa_name, IFNAMSIZ - 1);
    Descriptor any(::socket(local.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!any.valid() || ::ioctl(any.get(), SIOCGIFMTU, &request) != 0) return {};
    return Packets::of_mtu(request.ifr_mtu, local.family() == AF_INET6);
  }
  return {};
}

Packets connection_packets(int fd, const Packets& otherwise) {
  tcp_info info{};
  socklen_t length = sizeof info;
  const auto local = local_endpoint(fd);
  if (!local.is_ok() || ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
      info.tcpi_snd_mss == 0)
    return otherwise;
  return {info.tcpi_snd_mss,
          Packets::kEthernet + (local->family() == AF_INET6 ? Packets::kIpv6 : Packets::kIpv4) +
              Packets::kTcp +
              ((info.tcpi_options & TCPI_OPT_TIMESTAMPS) != 0 ? Packets::kTimestamps : 0)};
}

void reset_on_close(int fd) {
  linger none{1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
}

int socket_error(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

}  // namespace paceline::wire
