// Broken flows, killed processes, silent peers, aborts: over real sockets and real processes.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/testing/no_descriptors.h"
#include "wire/tcp/relay.h"
#include "wire/tcp/socket.h"
#include "wire/tcp/testing.h"

namespace paceline::wire {
namespace {

using paceline::testing::NoDescriptors;
using testing::Job;
using testing::random_data;
using testing::Relay;

TEST(TcpFaults, DataFlowBrokenMidTransferLosesNothing) {
  std::mt19937_64 random(21);
  auto data = random_data(random, 48 << 20);
  for (int flows : {1, 3}) {
    Job job(2, [&](TcpOptions& o) { o.flows = flows; });
    std::vector<std::byte> into(data.size());
    job.at(1)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
    job.at(0)->send(1, 1, 0, data, 1);
    int breaks = 0;
    uint64_t next_break = 1 << 20;
    ASSERT_TRUE(job.run_until([&] {
      if (breaks < 5 && job.at(1)->counters().wire_received > next_break) {
        next_break += 6 << 20;
        breaks += job.at(0)->break_flow(1, breaks % flows) ? 1 : 0;
      }
      return job.completion(1, 2) != nullptr && job.completion(0, 1) != nullptr;
    }));
    EXPECT_GE(breaks, 3);
    EXPECT_GT(job.at(0)->counters().repeats, 0U);
    EXPECT_TRUE(job.completion(1, 2)->status.is_ok()) << job.completion(1, 2)->status.to_string();
    EXPECT_TRUE(job.completion(0, 1)->status.is_ok());
    EXPECT_EQ(into, data);
    EXPECT_TRUE(job.events(0).losses.empty());
    EXPECT_TRUE(job.events(1).losses.empty());
  }
}

TEST(TcpFaults, ControlConnectionBrokenKeepsNotesAndMessages) {
  std::mt19937_64 random(22);
  for (Rank who : {0, 1}) {
    Job job(2);
    std::vector<std::vector<std::byte>> data;
    std::vector<std::vector<std::byte>> into;
    for (std::size_t i = 0; i < 200; ++i) {
      data.push_back(random_data(random, i % 10 == 0 ? 300000 : 500));
      into.emplace_back(data.back().size());
    }
    std::size_t posted = 0;
    ASSERT_TRUE(job.run_until([&] {
      if (posted < data.size()) {
        auto n = static_cast<int>(posted);
        job.at(0)->send(1, posted, 0, data[posted], posted);
        job.at(1)->receive(0, posted, 0, {into[posted].data(), nullptr, into[posted].size()},
                           posted);
        job.at(0)->post_note(1, std::as_bytes(std::span(&n, 1)));
        if (posted % 40 == 20) job.at(who)->break_flow(1 - who, -1);
        ++posted;
      }
      return job.events(0).completions.size() == data.size() &&
             job.events(1).completions.size() == data.size() &&
             job.events(1).notes.size() == data.size();
    }));
    EXPECT_EQ(into, data);
    for (int i = 0; i < 200; ++i) {
      int n = -1;
      std::memcpy(&n, job.events(1).notes[static_cast<std::size_t>(i)].bytes.data(), sizeof n);
      EXPECT_EQ(n, i);
    }
    for (Rank r : {0, 1}) {
      EXPECT_TRUE(job.events(r).losses.empty());
      for (auto& c : job.events(r).completions)
        EXPECT_TRUE(c.status.is_ok()) << c.status.to_string();
    }
  }
}

/// Rank 1 in a process of its own, driven for ever; its address comes over a pipe.
struct Child {
  pid_t pid = -1;
  std::string address;

  explicit Child(const std::string& parent_address, const TcpOptions& options) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    pid = ::fork();
    if (pid == 0) {
      ::alarm(60);
      auto channel = TcpChannel::listen(options);
      if (!channel.is_ok() || !(*channel)->set_peer(0, parent_address, "host-0").is_ok())
        ::_exit(1);
      // Before the parent hears of it: filling this takes an instrumented build longer than some time-outs.
      std::vector<std::byte> big(200 << 20, std::byte{1});
      std::string text = (*channel)->address() + "\n";
      if (::write(ends[1], text.data(), text.size()) < 0) ::_exit(1);
      SteadyClock clock;
      Events events;
      (*channel)->post_note(0, std::as_bytes(std::span("here")));
      (*channel)->send(0, 1, 0, big, 1);
      while (true) {
        (*channel)->progress(clock.now(), events);
        pollfd p{(*channel)->poll_fd(), POLLIN, 0};
        if ((*channel)->prepare_wait()) ::poll(&p, 1, 50);
      }
    }
    char c;
    while (::read(ends[0], &c, 1) == 1 && c != '\n') address += c;
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~Child() {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
};

struct Alone {
  std::unique_ptr<TcpChannel> channel;
  Events events;
  SteadyClock clock;
  bool run_until(const std::function<bool()>& done, Time limit) {
    Time end = clock.now() + limit;
    while (clock.now() < end) {
      channel->progress(clock.now(), events);
      if (done()) return true;
      pollfd p{channel->poll_fd(), POLLIN, 0};
      if (channel->prepare_wait()) ::poll(&p, 1, 5);
    }
    return false;
  }
};

TEST(TcpFaults, KilledProcessIsKnownAtOnce) {
  for (bool mid_transfer : {true, false}) {
    Alone alone{testing::listen_or_die(testing::options_for(0, 2)), {}, {}};
    Child child(alone.channel->address(), testing::options_for(1, 2));
    ASSERT_TRUE(alone.channel->set_peer(1, child.address, "host-1").is_ok());
    std::vector<std::byte> into(200 << 20);
    alone.channel->receive(1, mid_transfer ? 1 : 2, 0, {into.data(), nullptr, into.size()}, 7);
    uint64_t enough = mid_transfer ? 10 << 20 : 1;
    ASSERT_TRUE(alone.run_until([&] { return alone.channel->counters().wire_received >= enough; },
                                20 * kSecond));
    ::kill(child.pid, SIGKILL);
    Time killed = alone.clock.now();
    ASSERT_TRUE(alone.run_until([&] { return !alone.events.losses.empty(); }, 10 * kSecond));
    EXPECT_LT(alone.clock.now() - killed, kSecond);
    EXPECT_EQ(alone.events.losses[0].peer, 1);
    EXPECT_EQ(alone.events.losses[0].status.code(), Code::kPeerLost);
    EXPECT_NE(alone.events.losses[0].status.message().find("rank 1 (host host-1)"),
              std::string::npos);
    ASSERT_EQ(alone.events.completions.size(), 1U);
    EXPECT_EQ(alone.events.completions[0].status.code(), Code::kPeerLost);
    std::vector<std::byte> word(4);
    alone.channel->send(1, 3, 0, word, 8);
    ASSERT_TRUE(alone.run_until([&] { return alone.events.completions.size() == 2; }, kSecond));
    EXPECT_EQ(alone.events.completions[1].status.code(), Code::kPeerLost);
  }
}

TEST(TcpFaults, ACallerWhoseHostIsToldLaterIsLostWithIt) {
  Alone alone{testing::listen_or_die(testing::options_for(0, 2)), {}, {}};
  Child child(alone.channel->address(), testing::options_for(1, 2));
  ASSERT_TRUE(alone.run_until([&] { return !alone.events.notes.empty(); }, 20 * kSecond));
  ASSERT_TRUE(alone.channel->set_peer(1, child.address, "host-1").is_ok());
  ::kill(child.pid, SIGKILL);
  ASSERT_TRUE(alone.run_until([&] { return !alone.events.losses.empty(); }, 10 * kSecond));
  EXPECT_NE(alone.events.losses[0].status.message().find("rank 1 (host host-1)"), std::string::npos)
      << alone.events.losses[0].status.message();
}

TEST(TcpFaults, SilentPeerIsLostAfterTheTimeoutAndNotBefore) {
  TcpOptions o = testing::options_for(0, 2);
  o.protocol.peer_timeout = 1200 * kMillisecond;
  Alone alone{testing::listen_or_die(o), {}, {}};
  o.rank = 1;
  Child child(alone.channel->address(), o);
  ASSERT_TRUE(alone.channel->set_peer(1, child.address, "host-1").is_ok());
  std::vector<std::byte> into(10);
  alone.channel->receive(1, 99, 0, {into.data(), nullptr, into.size()}, 7);
  alone.run_until([] { return false; },
                  1500 * kMillisecond);  // idle, but alive: heartbeats keep it
  ASSERT_TRUE(alone.events.losses.empty());
  ::kill(child.pid, SIGSTOP);
  Time stopped = alone.clock.now();
  ASSERT_TRUE(alone.run_until([&] { return !alone.events.losses.empty(); }, 10 * kSecond));
  EXPECT_GT(alone.clock.now() - stopped, 800 * kMillisecond);
  EXPECT_LT(alone.clock.now() - stopped, 4 * kSecond);
  EXPECT_NE(alone.events.losses[0].status.message().find("rank 1 (host host-1)"),
            std::string::npos);
}

TEST(TcpFaults, ShortStopSurvives) {
  TcpOptions o = testing::options_for(0, 2);
  o.protocol.peer_timeout = 5 * kSecond;
  Alone alone{testing::listen_or_die(o), {}, {}};
  o.rank = 1;
  Child child(alone.channel->address(), o);
  ASSERT_TRUE(alone.channel->set_peer(1, child.address, "host-1").is_ok());
  std::vector<std::byte> into(200 << 20);
  alone.channel->receive(1, 1, 0, {into.data(), nullptr, into.size()}, 7);
  ASSERT_TRUE(alone.run_until([&] { return alone.channel->counters().wire_received > 1 << 20; },
                              20 * kSecond));
  ::kill(child.pid, SIGSTOP);
  alone.run_until([] { return false; }, kSecond);
  ::kill(child.pid, SIGCONT);
  ASSERT_TRUE(alone.run_until([&] { return !alone.events.completions.empty(); }, 30 * kSecond));
  EXPECT_TRUE(alone.events.completions[0].status.is_ok())
      << alone.events.completions[0].status.to_string();
  EXPECT_EQ(into[into.size() - 1], std::byte{1});
}

TEST(TcpFaults, PeerThatNeverAnswersIsNamed) {
  // A listener whose owner never accepts.
  auto at = choose_address("", "127.0.0.1");
  ASSERT_TRUE(at.is_ok());
  auto mute = listen_on(*at);
  ASSERT_TRUE(mute.is_ok());
  TcpOptions o = testing::options_for(0, 2);
  o.protocol.peer_timeout = 700 * kMillisecond;
  Alone alone{testing::listen_or_die(o), {}, {}};
  ASSERT_TRUE(
      alone.channel->set_peer(1, "tcp=" + local_endpoint(mute->get())->text(), "host-1").is_ok());
  std::vector<std::byte> into(10);
  alone.channel->receive(1, 1, 0, {into.data(), nullptr, into.size()}, 7);
  ASSERT_TRUE(alone.run_until([&] { return !alone.events.losses.empty(); }, 10 * kSecond));
  EXPECT_NE(alone.events.losses[0].status.message().find("rank 1 (host host-1) has not answered"),
            std::string::npos)
      << alone.events.losses[0].status.message();
}

TEST(TcpFaults, AbortLeavesBuffersAlone) {
  std::mt19937_64 random(23);
  auto data = random_data(random, 64 << 20);
  for (Rank who : {0, 1}) {
    Job job(2);
    std::vector<std::byte> mine = data;
    std::vector<std::byte> into(data.size());
    job.at(1)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
    job.at(0)->send(1, 1, 0, mine, 1);
    ASSERT_TRUE(job.run_until([&] { return job.at(1)->counters().wire_received > 4 << 20; }));
    ASSERT_EQ(job.completion(1, 2), nullptr);
    job.at(who)->abort({Code::kAborted, "rank 5 (host x) died"});
    job.at(who)->progress(job.clock_.now(), job.events(who));
    auto cookie = static_cast<uint64_t>(who + 1);
    ASSERT_NE(job.completion(who, cookie), nullptr);
    EXPECT_EQ(job.completion(who, cookie)->status.code(), Code::kAborted);
    EXPECT_NE(job.completion(who, cookie)->status.message().find("rank 5 (host x)"),
              std::string::npos);
    // From here on the aborting side's buffer is its own again.
    auto& buffer = who == 0 ? mine : into;
    std::memset(buffer.data(), 0x33, buffer.size());
    job.at(who)->post_note(1 - who, std::vector<std::byte>(3));
    ASSERT_TRUE(job.run_until([&] {
      return !job.events(1 - who).notes.empty() &&
             job.completion(1 - who, 2 - static_cast<uint64_t>(who)) != nullptr;
    }));
    EXPECT_EQ(job.completion(1 - who, 2 - static_cast<uint64_t>(who))->status.code(),
              Code::kAborted);
    for (auto b : buffer) ASSERT_EQ(b, std::byte{0x33});
    if (who ==
        0) {  // and what the receiver has got is the message or nothing, never the new content
      for (std::size_t i = 0; i < into.size(); ++i)
        ASSERT_TRUE(into[i] == data[i] || into[i] == std::byte{0});
    }
    job.at(who)->send(1 - who, 50, 0, data, 60);
    job.at(who)->progress(job.clock_.now(), job.events(who));
    ASSERT_NE(job.completion(who, 60), nullptr);
    EXPECT_EQ(job.completion(who, 60)->status.code(), Code::kAborted);
  }
}

/// Turns one bit of what goes over data connections.
class Changer : public Relay {
 public:
  Changer(const std::string& address, uint64_t at) : Relay(address), at_(at) { start(); }
  ~Changer() override { stop(); }
  Changer(const Changer&) = delete;
  Changer& operator=(const Changer&) = delete;
  std::atomic<bool> changed = false;

 private:
  void look_at(const Way& way, std::span<std::byte> bytes) override {
    if (!way.is_forward || changed || way.passed > at_ || at_ >= way.passed + bytes.size()) return;
    bytes[at_ - way.passed] ^= std::byte{0x10};
    changed = true;
  }
  uint64_t at_;
};

// PACELINE_CHECKSUM=on: what TCP's sixteen bits let through is sent again.
TEST(TcpFaults, AChangedPayloadIsSentAgain) {
  std::mt19937_64 random(24);
  const auto data = random_data(random, 8 << 20);
  for (const uint64_t at : {700'001U, 3'300'000U}) {
    Job job(2, [](TcpOptions& o) { o.protocol.payload_sum = true; });
    Changer changer(job.at(1)->address(), at);
    ASSERT_TRUE(job.at(0)->set_peer(1, changer.address(), "host-1").is_ok());
    std::vector<std::byte> into(data.size());
    job.at(1)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
    job.at(0)->send(1, 1, 0, data, 1);
    ASSERT_TRUE(job.complete(1, 2));
    ASSERT_TRUE(job.complete(0, 1));
    EXPECT_TRUE(changer.changed);
    EXPECT_EQ(into, data);
    EXPECT_GT(job.at(0)->counters().repeats, 0U);
    EXPECT_TRUE(job.events(0).losses.empty() && job.events(1).losses.empty());
  }
}

TEST(TcpFaults, DroppedPeerEndsItsRequestsOnly) {
  Job job(3);
  std::vector<std::byte> into(100000);
  std::vector<std::byte> other(100000);
  job.at(0)->receive(1, 1, 0, {into.data(), nullptr, into.size()}, 1);
  job.at(0)->receive(2, 1, 0, {other.data(), nullptr, other.size()}, 2);
  job.step();
  job.at(0)->drop_peer(1, {Code::kPeerLost, "rank 1 (host b) was killed"});
  ASSERT_TRUE(job.complete(0, 1));
  EXPECT_EQ(job.completion(0, 1)->status.message(), "rank 1 (host b) was killed");
  EXPECT_EQ(job.completion(0, 2), nullptr);
  std::vector<std::byte> data(100000, std::byte{8});
  job.at(2)->send(0, 1, 0, data, 3);
  ASSERT_TRUE(job.complete(0, 2));
  EXPECT_EQ(other, data);
}

/// Rank 0's message to rank 1, submitted where nothing but their control connection is open yet.
void send_over_a_control_connection(Job& job, std::span<const std::byte> data,
                                    std::vector<std::byte>& into) {
  job.at(0)->post_note(1, std::vector<std::byte>(1));
  ASSERT_TRUE(job.run_until([&] { return !job.events(1).notes.empty(); }));
  job.at(1)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
  job.at(0)->send(1, 1, 0, data, 1);
}

// The control connection stands and beats on, but the bytes have no way: the cause is named, within the deadline.
TEST(TcpFaults, DataConnectionsThatCannotBeOpenedAreNamed) {
  Job job(2, [](TcpOptions& o) { o.protocol.peer_timeout = 800 * kMillisecond; });
  const std::vector<std::byte> data(2 << 20, std::byte{5});
  std::vector<std::byte> into(data.size());
  send_over_a_control_connection(job, data, into);
  const Time begin = job.clock_.now();
  {
    const NoDescriptors none;
    ASSERT_TRUE(job.complete(0, 1));
  }
  EXPECT_LT(job.clock_.now() - begin, 10 * kSecond);
  const Status& why = job.completion(0, 1)->status;
  EXPECT_EQ(why.code(), Code::kPeerLost);
  EXPECT_NE(why.message().find("rank 1 (host host-1)"), std::string::npos) << why.message();
  EXPECT_NE(why.message().find("no data connection"), std::string::npos) << why.message();
  EXPECT_NE(why.message().find("Too many open files"), std::string::npos) << why.message();
  ASSERT_TRUE(job.complete(1, 2));
}

TEST(TcpFaults, AShortLackOfDescriptorsLosesNothing) {
  Job job(2);
  const std::vector<std::byte> data(2 << 20, std::byte{5});
  std::vector<std::byte> into(data.size());
  send_over_a_control_connection(job, data, into);
  {
    const NoDescriptors none;
    const Time end = job.clock_.now() + 300 * kMillisecond;
    while (job.clock_.now() < end) {
      if (!job.step()) job.wait();
    }
    EXPECT_EQ(job.completion(1, 2), nullptr);
  }
  ASSERT_TRUE(job.complete(1, 2));
  EXPECT_TRUE(job.completion(1, 2)->status.is_ok());
  EXPECT_EQ(into, data);
  EXPECT_TRUE(job.events(0).losses.empty() && job.events(1).losses.empty());
}

TEST(TcpFaults, GoodbyeIsNoFault) {
  Job job(2, [](TcpOptions& o) { o.linger = 2 * kSecond; });
  std::vector<std::byte> data(1000, std::byte{4});
  std::vector<std::byte> into(1000);
  job.at(1)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
  job.at(0)->send(1, 1, 0, data, 1);
  // The last message leaves before the channel goes, although nobody called progress() in between.
  job.run_until([&] { return job.completion(1, 2) != nullptr; });
  job.at(0)->post_note(1, data);
  std::thread peer([&] {
    SteadyClock clock;
    Time end = clock.now() + 10 * kSecond;
    while (clock.now() < end && job.events(1).notes.empty())
      job.at(1)->progress(clock.now(), job.events(1));
    for (int i = 0; i < 50; ++i) job.at(1)->progress(clock.now(), job.events(1));
  });
  job.at(0).reset();
  peer.join();
  ASSERT_EQ(job.events(1).notes.size(), 1U);
  EXPECT_TRUE(job.events(1).losses.empty());
  // Who asks something of a rank that has left hears so.
  job.at(1)->receive(0, 5, 0, {into.data(), nullptr, into.size()}, 9);
  ASSERT_TRUE(job.complete(1, 9));
  EXPECT_EQ(job.completion(1, 9)->status.code(), Code::kPeerLost);
  EXPECT_NE(job.completion(1, 9)->status.message().find("left"), std::string::npos);
}

}  // namespace
}  // namespace paceline::wire
