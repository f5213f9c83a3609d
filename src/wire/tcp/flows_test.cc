// Several flows to one peer, of which the network favours one.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "wire/tcp/relay.h"
#include "wire/tcp/testing.h"

namespace paceline::wire {
namespace {

using testing::Job;
using testing::random_data;
using testing::Relay;

/// One of the data connections gets a byte through for every sixteen of the others, until the gate is opened.
class Throttle : public Relay {
 public:
  explicit Throttle(const std::string& address) : Relay(address) { start(); }
  ~Throttle() override { stop(); }
  Throttle(const Throttle&) = delete;
  Throttle& operator=(const Throttle&) = delete;
  void open() { is_open_ = true; }
  /// Of all connections, once the relay has stopped.
  [[nodiscard]] uint64_t carried() const {
    uint64_t sum = 0;
    for (const auto& way : ways()) sum += way.is_forward ? way.passed : 0;
    return sum;
  }
  [[nodiscard]] uint64_t slow_carried() const { return ways()[slow_].passed; }

 private:
  static constexpr uint64_t kFree = 64 * 1024;  // no control connection comes so far
  static constexpr uint64_t kShare = 16;

  bool may_pass(const Way& way) override {
    if (slow_ == kNone && way.is_forward && way.passed > kFree)
      slow_ = static_cast<std::size_t>(&way - ways().data());
    if (slow_ == kNone || &way != &ways()[slow_] || is_open_) return true;
    return way.passed <= kFree + (carried() - way.passed) / kShare;
  }
  static constexpr std::size_t kNone = SIZE_MAX;
  std::size_t slow_ = kNone;
  std::atomic<bool> is_open_ = false;
};

TEST(TcpFlows, PiecesLeaveByTheFlowThatTakesThem) {
  std::mt19937_64 random(std::random_device{}());
  const auto data = random_data(random, 48 << 20);
  Job job(2, [](TcpOptions& o) { o.flows = 2; });
  Throttle throttle(job.at(1)->address());
  ASSERT_TRUE(job.at(0)->set_peer(1, throttle.address(), "host-1").is_ok());
  std::vector<std::byte> into(data.size());
  job.at(1)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
  job.at(0)->send(1, 1, 0, data, 1);
  // Once each piece has its flow nothing is to be chosen any more.
  EXPECT_TRUE(job.run_until([&] { return job.at(0)->counters().payload_sent == data.size(); }))
      << "the slow flow holds up the other: " << job.at(0)->counters().payload_sent
      << " bytes left";
  throttle.open();
  ASSERT_TRUE(job.complete(1, 2));
  ASSERT_TRUE(job.complete(0, 1));
  EXPECT_EQ(into, data);
  throttle.stop();
  EXPECT_GE(throttle.carried(), data.size());
  EXPECT_LT(throttle.slow_carried(), data.size() / 4);
}

/// Counts what its connections carry. Until it is opened, no more than any control connection does.
class Counting : public Relay {
 public:
  explicit Counting(const std::string& address) : Relay(address) { start(); }
  ~Counting() override { stop(); }
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;
  /// The busiest connection's part of what two data connections carried, once the relay has stopped.
  [[nodiscard]] double busiest() const {
    std::vector<uint64_t> sums;
    for (const auto& way : ways())
      if (way.is_forward) sums.push_back(way.passed);
    std::ranges::sort(sums, std::greater<>());
    sums.resize(2);
    return static_cast<double>(sums[0]) / static_cast<double>(sums[0] + sums[1]);
  }

  void open() { is_open_ = true; }
  [[nodiscard]] bool has_begun() const { return has_begun_; }

 private:
  static constexpr uint64_t kFree = 64 * 1024;

  bool may_pass(const Way& way) override {
    if (way.is_forward && way.passed > kFree) has_begun_ = true;
    return is_open_ || way.passed <= kFree;
  }
  std::atomic<bool> is_open_ = false, has_begun_ = false;
};

// One peer has all flows; of several at a time each has its part of them, or one.
TEST(TcpFlows, PeersThatAreSentToAtATimeShareTheFlows) {
  std::mt19937_64 random(std::random_device{}());
  const auto data = random_data(random, 16 << 20);
  for (const int peers : {1, 3}) {
    Job job(4, [](TcpOptions& o) { o.flows = 2; });
    std::vector<std::unique_ptr<Counting>> relays;
    std::vector<std::vector<std::byte>> into(static_cast<size_t>(peers));
    for (Rank p = 1; p <= peers; ++p) {
      relays.push_back(std::make_unique<Counting>(job.at(p)->address()));
      ASSERT_TRUE(
          job.at(0)->set_peer(p, relays.back()->address(), fmt::format("host-{}", p)).is_ok());
      auto& to = into[static_cast<size_t>(p - 1)];
      to.resize(data.size());
      job.at(p)->receive(0, 1, 0, {to.data(), nullptr, to.size()}, 2);
      job.at(0)->send(p, 1, 0, data, uint64_t{10} + static_cast<uint64_t>(p));
    }
    ASSERT_TRUE(job.run_until([&] {
      return std::ranges::all_of(relays, [](const auto& relay) { return relay->has_begun(); });
    }));
    for (const auto& relay : relays) relay->open();
    for (Rank p = 1; p <= peers; ++p) {
      ASSERT_TRUE(job.complete(p, 2));
      ASSERT_TRUE(job.complete(0, uint64_t{10} + static_cast<uint64_t>(p)));
      EXPECT_EQ(into[static_cast<size_t>(p - 1)], data);
      auto& relay = *relays[static_cast<size_t>(p - 1)];
      relay.stop();
      if (peers == 1)
        EXPECT_LT(relay.busiest(), 0.95);
      else
        EXPECT_GT(relay.busiest(), 0.8) << "peer " << p;
    }
  }
}

// Of all that a rank knows by address; what is short goes by the control connection, opened by whoever needs it first.
TEST(TcpFlows, ConnectionsOpenOnlyToPeersThatAreTalkedTo) {
  std::mt19937_64 random(std::random_device{}());
  Job job(4);
  const auto connected = [&](Rank a, Rank b, int flow) {
    const bool here = job.at(a)->break_flow(b, flow);
    return job.at(b)->break_flow(a, flow) || here;
  };
  const auto talk = [&](std::size_t size, uint64_t cookie) {
    const auto data = random_data(random, size);
    std::vector<std::byte> into(size);
    job.at(1)->receive(0, cookie, 0, {into.data(), nullptr, size}, cookie);
    job.at(0)->send(1, cookie, 0, data, cookie);
    ASSERT_TRUE(job.complete(1, cookie) && job.complete(0, cookie));
    EXPECT_EQ(into, data);
  };
  talk(100, 1);
  EXPECT_FALSE(connected(0, 1, 0)) << "nothing long has been sent";
  talk(4 << 20, 2);
  EXPECT_TRUE(connected(0, 1, -1));
  EXPECT_TRUE(connected(0, 1, 0));
  for (Rank a = 0; a < 4; ++a) {
    for (Rank b = 2; b < 4; ++b) {
      if (a == b) continue;
      EXPECT_FALSE(connected(a, b, -1) || connected(a, b, 0)) << a << " and " << b;
    }
  }
}

}  // namespace
}  // namespace paceline::wire
