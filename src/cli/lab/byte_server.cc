#include "cli/lab/byte_server.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cli/descriptors.h"

namespace paceline::lab {
namespace {

constexpr int kPauseMs = 100;

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} is too long for a socket; set TMPDIR to a short path", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

void send_all(int fd, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    auto n = send(fd, text.data() + at, text.size() - at, MSG_NOSIGNAL);
    if (n <= 0) return;  // the reader has gone: nobody to tell
    at += static_cast<std::size_t>(n);
  }
}

}  // namespace

Result<std::unique_ptr<ByteServer>> ByteServer::start(Counters& counters, const std::string& path) {
  PACELINE_ASSIGN(auto address, address_of(path));
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener, 128) != 0) {
    const int why = errno;
    if (listener >= 0) close(listener);
    if (cli::lacks_descriptors(why)) return cli::out_of_descriptors();
    return Status(Code::kUnavailable,
                  fmt::format("can't listen on {}: {}", path, std::strerror(why)));
  }
  const int wake = eventfd(0, EFD_CLOEXEC);
  if (wake < 0) {  // nothing else ends the thread
    close(listener);
    return cli::out_of_descriptors();
  }
  std::unique_ptr<ByteServer> server(new ByteServer(counters, listener, wake));
  server->thread_ = std::thread([raw = server.get()] { raw->serve(); });
  return server;
}

ByteServer::~ByteServer() {
  eventfd_write(wake_, 1);
  if (thread_.joinable()) thread_.join();
  close(listener_);
  close(wake_);
}

Result<std::vector<LinkTraffic>> ByteServer::read() {
  std::lock_guard lock(mutex_);
  return counters_.read();
}

void ByteServer::serve() {
  for (;;) {
    pollfd fds[2] = {{listener_, POLLIN, 0}, {wake_, POLLIN, 0}};
    if (poll(fds, 2, -1) < 0 && errno != EINTR) return;
    if (fds[1].revents != 0) return;
    int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) {
      // Without a descriptor for it the call stays, and the listener readable.
      pollfd wake{wake_, POLLIN, 0};
      if (errno != EINTR && errno != ECONNABORTED && poll(&wake, 1, kPauseMs) > 0) return;
      continue;
    }
    auto links = read();
    send_all(client, links.is_ok()
                         ? traffic_json(links.value())
                         : fmt::format("{{\"error\": \"{}\"}}\n", links.status().message()));
    close(client);
  }
}

Result<std::string> ask_bytes(const std::string& path) {
  PACELINE_ASSIGN(auto address, address_of(path));
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    auto why = std::strerror(errno);
    if (fd >= 0) close(fd);
    return Status(Code::kUnavailable, fmt::format("no lab answers at {}: {}", path, why));
  }
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = recv(fd, buffer, sizeof buffer, 0)) > 0;)
    text.append(buffer, static_cast<std::size_t>(n));
  close(fd);
  return text;
}

}  // namespace paceline::lab
