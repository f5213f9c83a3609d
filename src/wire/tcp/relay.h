// For this folder's tests: a network between a rank and those that call it, which the test bends to its needs.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "wire/tcp/socket.h"

namespace paceline::wire::testing {

/// Takes connections in the place of `address` ("tcp=…") and hands on what comes, both ways, in a thread.
class Relay {
 public:
  explicit Relay(const std::string& address) : target_(address.substr(4)) {
    auto listener = listen_on(*parse_endpoint("127.0.0.1:0"));
    EXPECT_TRUE(listener.is_ok());
    listener_ = std::move(listener).value();
    // What stands in sockets has passed for its sender: little.
    const int bytes = 64 * 1024;
    ::setsockopt(listener_.get(), SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  }
  virtual ~Relay() { stop(); }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  [[nodiscard]] std::string address() const {
    return "tcp=" + local_endpoint(listener_.get())->text();
  }
  /// The constructor and the destructor of what is derived call these.
  void start() {
    thread_ = std::thread([this] { serve(); });
  }
  void stop() {
    end_ = true;
    if (thread_.joinable()) thread_.join();
  }

 protected:
  /// One direction of one connection.
  struct Way {
    Descriptor from, to;
    bool is_forward;  ///< from the caller
    uint64_t passed = 0;
  };
  /// In the relay's thread, with what comes next; may change it.
  virtual void look_at(const Way& /*way*/, std::span<std::byte> /*bytes*/) {}
  /// In the relay's thread; false leaves in the socket what comes.
  virtual bool may_pass(const Way& /*way*/) { return true; }
  /// In the relay's thread, or once it has stopped.
  [[nodiscard]] const std::vector<Way>& ways() const { return ways_; }

 private:
  void serve() {
    std::vector<std::byte> buffer(1 << 16);
    while (!end_) {
      std::vector<pollfd> fds{{listener_.get(), POLLIN, 0}};
      for (auto& w : ways_)
        fds.push_back({w.from.get(), static_cast<short>(may_pass(w) ? POLLIN : 0), 0});
      ::poll(fds.data(), fds.size(), 20);
      for (std::size_t i = 1; i < fds.size(); ++i) {
        if (fds[i].revents == 0) continue;
        auto& w = ways_[i - 1];
        const ssize_t n = ::recv(w.from.get(), buffer.data(), buffer.size(), 0);
        if (n <= 0) {
          ::shutdown(w.to.get(), SHUT_RDWR);
          w.from = Descriptor(::eventfd(0, EFD_CLOEXEC));  // never readable
          continue;
        }
        const auto bytes = static_cast<uint64_t>(n);
        look_at(w, {buffer.data(), bytes});
        w.passed += bytes;
        ::send(w.to.get(), buffer.data(), bytes, MSG_NOSIGNAL);
      }
      if (fds[0].revents == 0) continue;
      Descriptor in(::accept(listener_.get(), nullptr, nullptr));
      auto to = parse_endpoint(target_);
      Descriptor out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      EXPECT_EQ(::connect(out.get(), to->get(), to->length), 0);
      Descriptor in2(::dup(in.get()));
      Descriptor out2(::dup(out.get()));
      ways_.push_back({std::move(in), std::move(out), true});
      ways_.push_back({std::move(out2), std::move(in2), false});
    }
  }
  std::string target_;
  Descriptor listener_;
  std::vector<Way> ways_;
  std::atomic<bool> end_ = false;
  std::thread thread_;
};

}  // namespace paceline::wire::testing
