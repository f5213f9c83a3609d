// The key-value client before whatever answers on the server's port, over a real connection: it believes nothing before the
// server has proven that it knows the secret, hands out only what was said for a key that was asked for, says nothing but
// proofs before, and what ends it, it names and stays with.
//
// Input: one byte what happens, and what that takes. The server answers with frames that are right, nearly right, or raw.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/testing/fuzz_input.h"
#include "bootstrap/kv_frame.h"
#include "bootstrap/kv_tcp.h"

namespace {

using namespace paceline;             // NOLINT: a fuzzer has no headers to leak into
using namespace paceline::bootstrap;  // NOLINT
using paceline::testing::FuzzInput;
using paceline::testing::require;

/// One for all inputs; the kernel chooses its port.
class Listener {
 public:
  Listener() {
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof at;
    require(::bind(fd_, reinterpret_cast<sockaddr*>(&at), length) == 0 && ::listen(fd_, 16) == 0);
    require(::getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &length) == 0);
    port_ = ntohs(at.sin_port);
  }
  [[nodiscard]] uint16_t port() const { return port_; }
  [[nodiscard]] int accept() const {
    const int fd = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    require(fd >= 0);
    // Thousands of connections a second must not leave their ports waiting.
    const linger at_once{1, 0};
    ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    return fd;
  }

 private:
  int fd_ = -1;
  uint16_t port_ = 0;
};

class Play {
 public:
  Play(const Listener& listener, std::span<const uint8_t> input) : in_{input} {
    client_ = TcpKeyValue::open("127.0.0.1", listener.port(), secret_, nullptr).value();
    require(client_->poll(0).is_ok());  // the connection is under way
    fd_ = listener.accept();
    challenge_.fill(std::byte{0x21});
  }
  Play(const Play&) = delete;
  Play& operator=(const Play&) = delete;
  ~Play() {
    client_.reset();  // first, so that its end waits for nothing
    ::close(fd_);
  }

  void run() {
    while (!in_.rest.empty()) {
      const uint8_t what = in_.byte();
      act(what % 8);
      if (what / 8 % 4 == 3) continue;  // more in one go
      deliver();
      if (ended_) return;
    }
    deliver();
  }

 private:
  void act(int what) {
    switch (what) {
      case 0: {
        const std::size_t n = std::min<std::size_t>(in_.byte() % 64, in_.rest.size());
        const auto raw = std::as_bytes(in_.rest.first(n));
        says_.insert(says_.end(), raw.begin(), raw.end());
        in_.rest = in_.rest.subspan(n);
        break;
      }
      case 1:
        append_frame({.kind = FrameKind::kChallenge, .nonce = challenge_}, says_);
        break;
      case 2:
        say_welcome(in_.byte());
        break;
      case 3:
      case 4: {
        const std::string of = key();
        const uint8_t size = in_.byte();
        append_frame({.kind = FrameKind::kValue, .key = of, .value = std::string(size, 'v')},
                     says_);
        break;
      }
      case 5:
        append_frame({.kind = static_cast<FrameKind>(1 + in_.byte() % 7), .value = "no"}, says_);
        break;
      case 6: {
        const std::string put = key();
        if (client_->put(put, std::string(in_.byte(), 'p')).is_ok()) put_.insert(put);
        break;
      }
      default: {
        const std::string of = key();
        const bool is_new = asked_.insert(of).second;
        const auto got = client_->get(of);
        if (got && *got) require(!is_new && is_welcome_ && said_[of].contains(**got));
      }
    }
  }

  std::string key() { return std::string(1 + in_.byte() % 4, 'k'); }

  /// Of the last proof, which this end has to have read.
  void say_welcome(int how) {
    hear();
    KvFrame welcome{.kind = FrameKind::kWelcome,
                    .mac = server_proof(secret_, challenge_, proof_.value_or(Nonce{}))};
    if (how % 4 == 1) welcome.mac[31] ^= std::byte{1};
    if (how % 4 == 2) welcome.mac = client_proof(secret_, challenge_, proof_.value_or(Nonce{}));
    append_frame(welcome, says_);
  }

  void deliver() {
    // As the client will read them: what it may believe.
    expected_.insert(expected_.end(), says_.begin(), says_.end());
    while (true) {
      const auto frame = take_frame(expected_);
      if (!frame || !*frame) break;
      if ((*frame)->kind == FrameKind::kWelcome && proof_ &&
          (*frame)->mac == server_proof(secret_, challenge_, *proof_))
        is_welcome_ = true;
      if ((*frame)->kind == FrameKind::kValue) said_[(*frame)->key].insert((*frame)->value);
    }
    std::size_t sent = 0;
    while (sent < says_.size()) {
      const ssize_t n = ::send(fd_, says_.data() + sent, says_.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) break;
      sent += static_cast<std::size_t>(n);
      if (poll_client()) return;
    }
    says_.clear();
    poll_client();
    if (!ended_) hear();
  }

  /// True: it has come to its end, which it names, now and later.
  bool poll_client() {
    const Status status = client_->poll(0);
    if (status.is_ok()) return false;
    require(!status.message().empty());
    require(client_->poll(1).message() == status.message());
    require(client_->get("k").status().message() == status.message());
    return ended_ = true;
  }

  /// What the client says: a proof for each challenge, and its own only once it is welcome.
  void hear() {
    std::byte buffer[4096];
    while (true) {
      const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
      if (n <= 0) break;
      hears_.insert(hears_.end(), buffer, buffer + n);
    }
    while (true) {
      const auto frame = take_frame(hears_);
      require(frame.is_ok());
      if (!*frame) break;
      const KvFrame& f = **frame;
      if (f.kind == FrameKind::kProof) {
        proof_ = f.nonce;
      } else if (f.kind == FrameKind::kPut) {
        require(is_welcome_ && put_.contains(f.key));
      } else {
        require(f.kind == FrameKind::kGet && is_welcome_ && asked_.contains(f.key));
      }
    }
  }

  FuzzInput in_;
  const std::vector<std::byte> secret_ = std::vector<std::byte>(16, std::byte{0x5C});
  std::unique_ptr<TcpKeyValue> client_;
  int fd_ = -1;
  Nonce challenge_{};
  std::optional<Nonce> proof_;
  bool is_welcome_ = false, ended_ = false;
  std::vector<std::byte> says_, hears_, expected_;
  std::map<std::string, std::set<std::string>> said_;
  std::set<std::string> put_, asked_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static const Listener listener;
  Play(listener, std::span(data, size)).run();
  return 0;
}
