#include "bootstrap/kv_server.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "bootstrap/host_address.h"
#include "bootstrap/identity.h"

namespace paceline::bootstrap {
namespace {

constexpr int kEventsAtOnce = 64;

Status cant_listen(const KvServerOptions& options, const std::string& at, int why) {
  if (why == EADDRINUSE) {
    return {Code::kResourceExhausted,
            fmt::format(
                "port {} of {} is taken by another program: choose a free one by {} on all ranks",
                options.port, options.address, options.port_setting)};
  }
  std::string fix = fmt::format("choose another port by {} on all ranks", options.port_setting);
  if (why == EADDRNOTAVAIL) {
    fix = fmt::format(
        "rank 0 runs on this host ({}), which has no such address: give one that it has by {} on "
        "all "
        "ranks, or start rank 0 there",
        host_name(), options.address_setting);
  } else if (why == EACCES) {
    fix = fmt::format(
        "this user may not take so low a port: choose one from 1024 on by {} on all ranks",
        options.port_setting);
  }
  return {Code::kUnavailable,
          fmt::format("can't listen on {}: {}; {}", at, std::strerror(why), fix)};
}

}  // namespace

Result<std::unique_ptr<KvServer>> KvServer::start(KvServerOptions options) {
  PACELINE_ASSIGN(auto at, numeric_address(options.address, options.port));
  std::unique_ptr<KvServer> server(new KvServer(std::move(options)));
  server->epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (server->epoll_ >= 0)
    server->listener_ = ::socket(at.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (server->listener_ < 0) {
    const int why = errno;
    return Status(
        Code::kResourceExhausted,
        fmt::format("can't make a socket to listen on {}: {}{}", at.text(), std::strerror(why),
                    why == EMFILE ? "; allow the process more open files (ulimit -n)" : ""));
  }
  int on = 1;
  ::setsockopt(server->listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(server->listener_, at.get(), at.length) != 0 ||
      ::listen(server->listener_, 1024) != 0) {
    return cant_listen(server->options_, at.text(), errno);
  }
  PACELINE_ASSIGN(auto bound, local_address(server->listener_));
  server->port_ = bound.port();
  epoll_event event{.events = EPOLLIN, .data = {.fd = server->listener_}};
  ::epoll_ctl(server->epoll_, EPOLL_CTL_ADD, server->listener_, &event);
  return server;
}

KvServer::~KvServer() {
  for (auto& [fd, client] : clients_) ::close(fd);
  if (listener_ >= 0) ::close(listener_);
  if (epoll_ >= 0) ::close(epoll_);
}

void KvServer::serve(Time now) {
  epoll_event ready[kEventsAtOnce];
  int count = 0;
  do {
    count = ::epoll_wait(epoll_, ready, kEventsAtOnce, 0);
    for (int i = 0; i < count; ++i) {
      if (ready[i].data.fd == listener_) {
        accept_some(now);
        continue;
      }
      auto found = clients_.find(ready[i].data.fd);
      if (found == clients_.end()) continue;
      auto& client = *found->second;
      if ((ready[i].events & EPOLLOUT) != 0) flush(client);
      if ((ready[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) read(client);
    }
  } while (count == kEventsAtOnce);
  expire(now);
}

void KvServer::accept_some(Time now) {
  for (int i = 0; i < kEventsAtOnce; ++i) {
    HostAddress from;
    from.length = sizeof(from.storage);
    int fd = ::accept4(listener_, reinterpret_cast<sockaddr*>(&from.storage), &from.length,
                       SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE) {
        // The connection stays in the queue; epoll would report it without end.
        epoll_event none{.events = 0, .data = {.fd = listener_}};
        ::epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_, &none);
        paused_ = true;
        resume_at_ = after(now, 100 * kMillisecond);
        if (log::first("kv-descriptors")) {
          log::warning("the key-value server is out of file descriptors: raise `ulimit -n`");
        }
      }
      return;
    }
    if (clients_.size() >= options_.connection_limit + options_.stranger_limit) {
      ::close(fd);
      continue;
    }
    int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    auto client = std::make_unique<Client>();
    client->fd = fd;
    client->from = from.text();
    client->since = now;
    Nonce challenge{};
    random_bytes(challenge);
    space_.enter(fd, challenge);
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
    auto& stored = *(clients_[fd] = std::move(client));
    flush(stored);
  }
}

void KvServer::read(Client& client) {
  std::byte buffer[16384];
  int fd = client.fd;
  auto n = ::recv(fd, buffer, sizeof(buffer), 0);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
    // A rank that dies may leave half a frame, too: the job hears of that otherwise.
    const bool is_cut = !space_.is_proven(fd) && space_.is_within_a_frame(fd);
    return is_cut ? refuse(client, {Code::kCorrupted, "its bytes end within a frame"}) : close(fd);
  }
  if (n < 0) return;
  const Status status = space_.take(fd, std::span(buffer).first(static_cast<std::size_t>(n)));
  flush_told();
  if (!status.is_ok()) return refuse(client, status);
  flush(client);
}

void KvServer::flush_told() {
  for (const int fd : space_.told()) {
    flush(*clients_.at(fd));
    if (space_.is_deaf(fd)) ::shutdown(fd, SHUT_RDWR);  // reading finds the end, in its turn
  }
}

void KvServer::flush(Client& client) {
  auto& out = space_.output(client.fd);
  while (!out.empty()) {
    auto n = ::send(client.fd, out.data(), out.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;  // a broken connection is found by reading
    out.erase(out.begin(), out.begin() + n);
  }
  bool want = !out.empty();
  if (want == client.wants_write) return;
  client.wants_write = want;
  epoll_event event{.events = EPOLLIN | (want ? EPOLLOUT : 0U), .data = {.fd = client.fd}};
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, client.fd, &event);
}

void KvServer::refuse(Client& client, const Status& why) {
  ++refused_;
  auto host = client.from.substr(0, client.from.rfind(':'));
  if (log::first("kv-refused-" + host)) {
    log::warning("key-value server: refused a connection from {}: {}; the job goes on", client.from,
                 why.message());
  }
  // Strangers learn nothing but that the secret is wrong; a rank with another secret needs that
  // sentence.
  if (why.code() != Code::kCorrupted) {
    append_frame({.kind = FrameKind::kRefused, .value = why.message()}, space_.output(client.fd));
    flush(client);
  }
  close(client.fd);
}

void KvServer::close(int fd) {
  auto found = clients_.find(fd);
  if (found == clients_.end()) return;
  space_.leave(fd);
  ::close(fd);
  clients_.erase(found);
}

void KvServer::expire(Time now) {
  if (paused_ && now >= resume_at_) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = listener_}};
    ::epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_, &event);
    paused_ = false;
  }
  std::vector<Client*> strangers;
  for (auto& [fd, client] : clients_) {
    if (!space_.is_proven(fd)) strangers.push_back(client.get());
  }
  std::sort(strangers.begin(), strangers.end(),
            [](auto* a, auto* b) { return a->since < b->since; });
  std::size_t surplus =
      strangers.size() > options_.stranger_limit ? strangers.size() - options_.stranger_limit : 0;
  for (auto* client : strangers) {
    bool late = now - client->since > options_.proof_timeout;
    if (!late && surplus == 0) continue;
    if (surplus > 0) --surplus;
    refuse(*client, {Code::kCorrupted, "no proof of the secret in time"});
  }
}

}  // namespace paceline::bootstrap
