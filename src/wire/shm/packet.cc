#include "wire/shm/packet.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/hmac.h"

namespace paceline::wire::shm {
namespace {

struct Address {
  sockaddr_un un{};
  socklen_t size = 0;
};

/// "@name" is abstract: its first byte is zero and the length ends it.
Result<Address> address_of(const std::string& name) {
  Address address;
  address.un.sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof(address.un.sun_path)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("'{}' is no name for a unix socket: 1 to {} bytes", name,
                              sizeof(address.un.sun_path) - 1));
  }
  std::memcpy(address.un.sun_path, name.data(), name.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  if (name.front() == '@') {
    address.un.sun_path[0] = '\0';
  } else {
    ++address.size;
  }
  return address;
}

Fd new_socket() { return Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

std::string random_name() {
  std::array<std::byte, 16> bytes{};
  random_bytes(bytes);
  std::string name = "paceline-";
  for (auto b : bytes) name += fmt::format("{:02x}", static_cast<unsigned>(b));
  return name;
}

}  // namespace

PacketState send_packet(int socket, std::span<const std::byte> bytes, std::span<const int> fds) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kPacketFds * sizeof(int))> control{};
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  for (;;) {
    if (::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return PacketState::kOk;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == ENOBUFS ? PacketState::kAgain : PacketState::kClosed;
  }
}

PacketState receive_packet(int socket, Packet& packet) {
  packet.fds.clear();
  packet.bytes.resize(kPacketLimit);
  iovec part{packet.bytes.data(), packet.bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kPacketFds * sizeof(int))> control{};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t n = 0;
  do {
    n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0) return errno == EAGAIN ? PacketState::kAgain : PacketState::kClosed;
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
      packet.fds.emplace_back(fd);
    }
  }
  // MSG_CTRUNC: no descriptor was free here for some of them, or there were too many; who expects them counts them.
  if (n == 0) return PacketState::kClosed;
  packet.bytes.resize((message.msg_flags & MSG_TRUNC) != 0 ? 0 : static_cast<std::size_t>(n));
  return PacketState::kOk;
}

Result<Listener> Listener::open(const std::string& directory) {
  std::string name = directory.empty() ? "@" + random_name() : directory + "/" + random_name();
  PACELINE_ASSIGN(Address address, address_of(name));
  Fd fd = new_socket();
  if (!fd || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address.un), address.size) != 0 ||
      ::listen(fd.get(), 128) != 0) {
    return Status(Code::kUnavailable, fmt::format("no unix socket '{}' for ranks of this node: {}",
                                                  name, std::strerror(errno)));
  }
  return Listener(std::move(fd), std::move(name));
}

Listener::~Listener() {
  if (fd_ && name_.front() != '@') ::unlink(name_.c_str());
}

Fd Listener::accept() const {
  for (;;) {
    Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd || errno != EINTR) return fd;
  }
}

Result<Fd> connect_to(const std::string& name) {
  PACELINE_ASSIGN(Address address, address_of(name));
  Fd fd = new_socket();
  if (!fd) {
    return Status(Code::kResourceExhausted,
                  fmt::format("no socket: {} (ulimit -n)", std::strerror(errno)));
  }
  int result = 0;
  do {
    result = ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address.un), address.size);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return fd;
  if (errno == EAGAIN) return Status(Code::kUnavailable, "the peer's queue of connections is full");
  return Status(Code::kPeerLost, fmt::format("unix socket '{}': {}", name, std::strerror(errno)));
}

}  // namespace paceline::wire::shm
