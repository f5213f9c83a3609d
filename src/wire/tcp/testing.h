// Helpers of this folder's tests: several channels of one job in one process, driven by one thread.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "wire/tcp/tcp_channel.h"

namespace paceline::wire::testing {

inline std::vector<std::byte> bytes_of(std::string_view text) {
  auto s = std::as_bytes(std::span(text));
  return {s.begin(), s.end()};
}

inline std::vector<std::byte> random_data(std::mt19937_64& random, std::size_t size) {
  std::vector<std::byte> data(size);
  for (std::size_t i = 0; i < size; i += 8) {
    uint64_t word = random();
    std::memcpy(data.data() + i, &word, std::min<std::size_t>(8, size - i));
  }
  return data;
}

inline TcpOptions options_for(Rank rank, Rank size) {
  TcpOptions o;
  o.rank = rank;
  o.size = size;
  o.host = "host-" + std::to_string(rank);
  o.bind_address = "127.0.0.1";
  o.secret = bytes_of("a secret of this test");
  o.linger = 0;
  o.protocol.peer_timeout = 20 * kSecond;
  return o;
}

inline std::unique_ptr<TcpChannel> listen_or_die(TcpOptions o) {
  auto channel = TcpChannel::listen(std::move(o));
  EXPECT_TRUE(channel.is_ok()) << channel.status().to_string();
  return std::move(channel).value();
}

/// Channels 0 … n-1 that know each other, and what they have reported.
class Job {
 public:
  explicit Job(Rank size, const std::function<void(TcpOptions&)>& change = {}) {
    for (Rank r = 0; r < size; ++r) {
      TcpOptions o = options_for(r, size);
      if (change) change(o);
      channels_.push_back(listen_or_die(o));
    }
    events_.resize(channels_.size());
    introduce();
  }
  void introduce() {
    for (Rank r = 0; r < size(); ++r) {
      for (Rank p = 0; p < size(); ++p) {
        if (p == r || !at(p) || !at(r)) continue;
        EXPECT_TRUE(at(r)->set_peer(p, at(p)->address(), "host-" + std::to_string(p)).is_ok());
      }
    }
  }
  [[nodiscard]] Rank size() const { return static_cast<Rank>(channels_.size()); }
  std::unique_ptr<TcpChannel>& at(Rank r) { return channels_[static_cast<std::size_t>(r)]; }
  Events& events(Rank r) { return events_[static_cast<std::size_t>(r)]; }

  bool step() {
    bool any = false;
    for (Rank r = 0; r < size(); ++r) {
      if (at(r)) any |= at(r)->progress(clock_.now(), events(r));
    }
    return any;
  }
  /// Drives all channels until `done` or the time is over.
  bool run_until(const std::function<bool()>& done, Time limit = 20 * kSecond) {
    Time end = clock_.now() + limit;
    while (true) {
      bool any = step();
      if (done()) return true;
      if (clock_.now() > end) return false;
      if (!any) wait();
    }
  }
  void wait() {
    std::vector<pollfd> fds;
    Time until = clock_.now() + 100 * kMillisecond;
    for (auto& c : channels_) {
      if (!c) continue;
      if (!c->prepare_wait()) return;
      fds.push_back({c->poll_fd(), POLLIN, 0});
      until = std::min(until, c->next_timer());
    }
    Time left = std::max<Time>(0, until - clock_.now());
    ::poll(fds.data(), fds.size(), static_cast<int>((left + kMillisecond - 1) / kMillisecond));
  }
  /// The completion with `cookie` of rank r, or nullptr.
  const Completion* completion(Rank r, uint64_t cookie) {
    for (const auto& c : events(r).completions) {
      if (c.cookie == cookie) return &c;
    }
    return nullptr;
  }
  bool complete(Rank r, uint64_t cookie) {
    return run_until([&] { return completion(r, cookie) != nullptr; });
  }
  SteadyClock clock_;

 private:
  std::vector<std::unique_ptr<TcpChannel>> channels_;
  std::vector<Events> events_;
};

}  // namespace paceline::wire::testing
