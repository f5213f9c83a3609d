#include "bootstrap/kv_tcp.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "bootstrap/kv_server.h"

namespace paceline::bootstrap {
namespace {

constexpr Time kFirstPause = 10 * kMillisecond;
constexpr Time kLongestPause = kSecond;
/// For an address to answer. One of a host's may lead nowhere, and the kernel would ask there for two minutes.
constexpr Time kPatience = 5 * kSecond;

}  // namespace

Result<std::unique_ptr<TcpKeyValue>> TcpKeyValue::open(const std::string& host, uint16_t port,
                                                       std::vector<std::byte> secret,
                                                       std::shared_ptr<KvServer> server) {
  std::unique_ptr<TcpKeyValue> space(new TcpKeyValue);
  space->name_ = fmt::format("tcp://{}:{}",
                             host.find(':') == std::string::npos ? host : "[" + host + "]", port);
  PACELINE_ASSIGN(space->addresses_, resolve(host, port));
  space->secret_ = std::move(secret);
  space->server_ = std::move(server);
  space->pause_ = kFirstPause;
  space->trouble_ = Status(Code::kUnavailable, fmt::format("{} was not asked yet", space->name_));
  return space;
}

TcpKeyValue::~TcpKeyValue() {
  if (fd_ >= 0) ::close(fd_);
}

void TcpKeyValue::connect(Time now) {
  const auto& to = addresses_[next_address_ % addresses_.size()];
  give_up_at_ = after(now, kPatience);
  fd_ = ::socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd_ < 0) return disconnected(now, std::strerror(errno));
  int on = 1;
  ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (::connect(fd_, to.get(), to.length) != 0 && errno != EINPROGRESS) {
    disconnected(now, std::strerror(errno));
  }
}

void TcpKeyValue::disconnected(Time now, const std::string& why) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  connected_ = ready_ = false;
  in_.clear();
  out_.clear();
  ++next_address_;
  const char* reason = was_there_ ? "which served it, has ended: see what it printed"
                                  : "which serves it, has not come, or a firewall is in the way";
  trouble_ = Status(Code::kUnavailable,
                    fmt::format("{} {}: {}. Rank 0 or `paceline run`, {}", name_,
                                was_there_ ? "is gone" : "can't be reached", why, reason));
  retry_at_ = after(now, pause_);
  pause_ = std::min(2 * pause_, kLongestPause);
}

Status TcpKeyValue::put(const std::string& key, const std::string& value) {
  if (key.size() > kKeyLimit || value.size() > kValueLimit) {
    return {Code::kInternal,
            fmt::format("key '{}' or its value of {} bytes is too long", key, value.size())};
  }
  put_[key] = value;
  if (ready_) append_frame({.kind = FrameKind::kPut, .key = key, .value = value}, out_);
  write();
  return fatal_;
}

void TcpKeyValue::ask(const std::string& key) {
  append_frame({.kind = FrameKind::kGet, .key = key}, out_);
}

Result<std::optional<std::string>> TcpKeyValue::get(const std::string& key) {
  if (!fatal_.is_ok()) return fatal_;
  auto found = values_.find(key);
  if (found != values_.end()) return std::optional<std::string>(found->second);
  if (asked_.insert(key).second && ready_) {
    ask(key);
    write();
  }
  return std::optional<std::string>();
}

void TcpKeyValue::write() {
  while (ready_ && !out_.empty()) {
    auto n = ::send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // full, or broken: read() finds out
    out_.erase(out_.begin(), out_.begin() + n);
  }
}

Status TcpKeyValue::poll(Time now) {
  if (server_) server_->serve(now);
  if (!fatal_.is_ok()) return fatal_;
  if (fd_ < 0 && now >= retry_at_) connect(now);
  if (fd_ >= 0 && !connected_) {
    pollfd waiting{fd_, POLLOUT, 0};
    if (::poll(&waiting, 1, 0) <= 0) {
      if (now >= give_up_at_)
        disconnected(now, fmt::format("no answer within {} s", kPatience / kSecond));
      return {};
    }
    int error = 0;
    socklen_t length = sizeof(error);
    ::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      disconnected(now, std::strerror(error));
      return {};
    }
    connected_ = true;
  }
  if (fd_ >= 0) {
    if (auto status = read(now); !status.is_ok()) fatal_ = status;
    write();
  }
  return fatal_;
}

Status TcpKeyValue::read(Time now) {
  std::byte buffer[16384];
  while (fd_ >= 0) {
    auto n = ::recv(fd_, buffer, sizeof(buffer), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return {};
    if (n <= 0) {
      disconnected(now, n == 0 ? "the server closed the connection" : std::strerror(errno));
      return {};
    }
    in_.insert(in_.end(), buffer, buffer + n);
    while (true) {
      PACELINE_ASSIGN(auto frame, take_frame(in_));
      if (!frame) break;
      PACELINE_RETURN_IF_ERROR(handle(*frame));
    }
  }
  return {};
}

Status TcpKeyValue::handle(const KvFrame& frame) {
  switch (frame.kind) {
    case FrameKind::kChallenge: {
      server_nonce_ = frame.nonce;
      random_bytes(nonce_);
      std::vector<std::byte> proof;
      append_frame({.kind = FrameKind::kProof,
                    .nonce = nonce_,
                    .mac = client_proof(secret_, server_nonce_, nonce_)},
                   proof);
      // A fresh connection's buffer takes so few bytes at once.
      if (::send(fd_, proof.data(), proof.size(), MSG_NOSIGNAL) !=
          static_cast<ssize_t>(proof.size())) {
        return {};
      }
      return {};
    }
    case FrameKind::kWelcome:
      if (!equal_secret(frame.mac, server_proof(secret_, server_nonce_, nonce_))) {
        return {Code::kUnauthenticated, fmt::format("{} is not this job's server: it does not know "
                                                    "the secret (two jobs on one port? set "
                                                    "PACELINE_PORT)",
                                                    name_)};
      }
      ready_ = was_there_ = true;
      trouble_ = {};
      pause_ = kFirstPause;
      for (const auto& [key, value] : put_) {
        append_frame({.kind = FrameKind::kPut, .key = key, .value = value}, out_);
      }
      for (const auto& key : asked_) ask(key);
      return {};
    case FrameKind::kValue:
      // Once for each question: so what is kept is bounded by what was asked.
      if (!ready_ || asked_.erase(frame.key) == 0) break;
      values_[frame.key] = frame.value;
      return {};
    case FrameKind::kRefused:
      return {Code::kUnauthenticated,
              fmt::format("{} refused this rank: {}. All ranks need the same PACELINE_SECRET",
                          name_, frame.value)};
    default:
      break;
  }
  return {Code::kCorrupted,
          fmt::format("{} is no Paceline server (another program on that port? set PACELINE_PORT)",
                      name_)};
}

std::optional<HostAddress> TcpKeyValue::local() const {
  if (!connected_) return std::nullopt;
  auto address = local_address(fd_);
  if (!address) return std::nullopt;
  return *address;
}

}  // namespace paceline::bootstrap
