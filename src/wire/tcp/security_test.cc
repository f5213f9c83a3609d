// Strangers at the door: wrong secrets, versions and settings, random, truncated and over-long bytes, floods.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/testing/no_descriptors.h"
#include "base/testing/said.h"
#include "wire/tcp/socket.h"
#include "wire/tcp/testing.h"

namespace paceline::wire {
namespace {

using paceline::testing::NoDescriptors;
using paceline::testing::Said;
using paceline::testing::times;
using testing::Job;

/// A plain socket to a channel.
struct Stranger {
  Descriptor fd;
  Stranger() : fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  explicit Stranger(const std::string& address) : Stranger() { call(address); }
  void call(const std::string& address) {
    auto to = parse_endpoint(address.substr(4));
    EXPECT_TRUE(to.is_ok());
    EXPECT_EQ(::connect(fd.get(), to->get(), to->length), 0);
  }
  void say(std::span<const std::byte> bytes) {
    EXPECT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  bool is_closed() {
    std::byte b[4096];
    while (true) {
      ssize_t n = ::recv(fd.get(), b, sizeof b, MSG_DONTWAIT);
      if (n == 0) return true;
      if (n < 0) return errno != EAGAIN;
    }
  }
};

bool job_works(Job& job, Tag tag) {
  std::vector<std::byte> data(100000, std::byte{6});
  std::vector<std::byte> into(data.size());
  job.at(1)->receive(0, tag, 0, {into.data(), nullptr, into.size()}, 1000 + tag);
  job.at(0)->send(1, tag, 0, data, 2000 + tag);
  return job.complete(1, 1000 + tag) && job.complete(0, 2000 + tag) && into == data &&
         job.completion(1, 1000 + tag)->status.is_ok();
}

TEST(TcpSecurity, WrongSecretIsRefusedAndNamed) {
  Job job(3, [](TcpOptions& o) {
    if (o.rank == 2) o.secret = testing::bytes_of("another secret");
  });
  std::vector<std::byte> into(10);
  job.at(2)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 1);
  ASSERT_TRUE(job.complete(2, 1));
  EXPECT_EQ(job.completion(2, 1)->status.code(), Code::kUnauthenticated);
  EXPECT_NE(job.completion(2, 1)->status.message().find("rank 0 (host host-0)"), std::string::npos);
  EXPECT_NE(job.completion(2, 1)->status.message().find("PACELINE_SECRET"), std::string::npos);
  EXPECT_TRUE(job.events(0).losses.empty());
  EXPECT_TRUE(job_works(job, 5));
}

TEST(TcpSecurity, DifferentVersionsAndSettingsAreNamed) {
  struct Case {
    std::function<void(TcpOptions&)> change;
    std::vector<std::string> words;
    Code code;
  };
  const Case cases[] = {
      {[](TcpOptions& o) { o.build = "0.9.9"; }, {"0.1.0", "0.9.9", "rank 1"}, Code::kMismatch},
      {[](TcpOptions& o) { o.protocol.piece_bytes = 4096; }, {"settings", "4096"}, Code::kMismatch},
      {[](TcpOptions& o) { o.job_id = "other"; }, {"another job"}, Code::kUnauthenticated},
  };
  for (const auto& c : cases) {
    Job job(2, [&](TcpOptions& o) {
      if (o.rank == 1) c.change(o);
    });
    std::vector<std::byte> into(10);
    job.at(0)->receive(1, 1, 0, {into.data(), nullptr, into.size()}, 1);
    ASSERT_TRUE(job.complete(0, 1));
    EXPECT_EQ(job.completion(0, 1)->status.code(), c.code);
    for (const auto& word : c.words) {
      EXPECT_NE(job.completion(0, 1)->status.message().find(word), std::string::npos)
          << word << " in: " << job.completion(0, 1)->status.message();
    }
  }
}

TEST(TcpSecurity, AnotherProcessInAPeersPlaceIsNotThatPeer) {
  Job job(2);
  ASSERT_TRUE(job_works(job, 1));
  // Rank 1 dies without a word; a new rank 1 of the same job takes its port.
  auto address = job.at(1)->address();
  job.at(0)->break_flow(1, -1);
  TcpOptions o = testing::options_for(1, 2);
  o.port = static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  job.at(1).reset();
  job.at(1) = testing::listen_or_die(o);
  std::vector<std::byte> into(10);
  job.at(0)->receive(1, 9, 0, {into.data(), nullptr, into.size()}, 1);
  ASSERT_TRUE(job.complete(0, 1));
  EXPECT_EQ(job.completion(0, 1)->status.code(), Code::kPeerLost);
}

TEST(TcpSecurity, RandomTruncatedAndOverlongBytesAreShutOut) {
  const Said said;
  std::mt19937_64 random(31);
  Job job(2, [](TcpOptions& o) { o.handshake_timeout = 300 * kMillisecond; });
  std::vector<std::unique_ptr<Stranger>> strangers;
  auto meet = [&](std::vector<std::byte> bytes) {
    strangers.push_back(std::make_unique<Stranger>(job.at(0)->address()));
    strangers.back()->say(bytes);
  };
  Identity self;
  self.rank = 1;
  self.incarnation = 5;
  self.build = "0.1.0";
  self.job_id = "job";
  self.piece_bytes = job.size() > 0 ? ProtocolOptions{}.piece_bytes : 0;
  std::vector<std::byte> hello;
  Handshake::connector(self, 0, 0, "rank 0", {}, hello);
  for (int i = 0; i < 20; ++i) meet(testing::random_data(random, 1 + random() % 5000));
  meet(testing::bytes_of("GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
  for (std::size_t cut : {1UL, 7UL, 8UL, 20UL, hello.size() - 1})
    meet({hello.begin(), hello.begin() + static_cast<std::ptrdiff_t>(cut)});
  auto overlong = hello;
  overlong[6] = overlong[7] = std::byte{0xFF};
  meet(overlong);
  auto padded = hello;
  padded.insert(padded.end(), 100000, std::byte{0});
  meet(padded);
  meet({});                                    // says nothing at all
  for (std::size_t cut : {5UL, 30UL, 31UL}) {  // ends in the middle
    meet({hello.begin(), hello.begin() + static_cast<std::ptrdiff_t>(cut)});
    ::shutdown(strangers.back()->fd.get(), SHUT_WR);
  }
  auto out_of_turn = hello;
  out_of_turn[4] = std::byte{3};  // a proof before a hello
  meet(out_of_turn);
  auto wrong_proof = hello;
  auto proof = testing::bytes_of("PCLN");
  proof.insert(proof.end(), {std::byte{3}, std::byte{0}, std::byte{32}, std::byte{0}});
  proof.resize(proof.size() + 32);
  wrong_proof.insert(wrong_proof.end(), proof.begin(), proof.end());
  meet(wrong_proof);
  for (int i = 0; i < 100; ++i) {  // any one byte of a hello changed
    auto bent = hello;
    bent[random() % bent.size()] ^= static_cast<std::byte>(1 + random() % 255);
    meet(bent);
  }
  ASSERT_TRUE(job_works(job, 1));
  ASSERT_TRUE(job.run_until([&] {
    return std::all_of(strangers.begin(), strangers.end(), [](auto& s) { return s->is_closed(); });
  }));
  ASSERT_TRUE(job_works(job, 2));
  EXPECT_TRUE(job.events(0).losses.empty());
  EXPECT_TRUE(job.events(0).notes.empty());
  // Each kind of complaint is logged once, whoever calls and whatever it says it is.
  const auto text = said.text();
  for (const char* sentence :
       {"does not speak paceline's protocol", "a connection ended during its handshake",
        "a connection did not prove itself within 0.3 s", "sent an unexpected handshake message",
        "sent a malformed hello", "of another job called", " looked for rank ",
        "install the same version everywhere", "run with different settings",
        "does not hold the secret"})
    EXPECT_EQ(times(sentence, text), 1U) << sentence << " in:\n" << text;
  EXPECT_EQ(times("\n", text), 10U) << text;
}

TEST(TcpSecurity, FloodOfHalfOpenConnectionsShutsNobodyOut) {
  Job job(2, [](TcpOptions& o) { o.half_open_limit = 16; });
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 100; ++i) {
    strangers.push_back(std::make_unique<Stranger>(job.at(0)->address()));
    if (i % 10 == 0) job.step();
  }
  job.at(1)->post_note(0, std::vector<std::byte>(1));
  ASSERT_TRUE(job.run_until([&] { return !job.events(0).notes.empty(); }));
  ASSERT_TRUE(job.run_until([&] {
    auto open =
        std::count_if(strangers.begin(), strangers.end(), [](auto& s) { return !s->is_closed(); });
    return open <= 16;
  }));
  EXPECT_TRUE(job_works(job, 3));
}

TEST(TcpSecurity, WithoutDescriptorsCallersWaitAndNobodySpins) {
  Job job(2);
  Stranger early;
  {
    const NoDescriptors none;
    early.call(job.at(0)->address());                    // nobody can take it in
    job.at(1)->post_note(0, std::vector<std::byte>(1));  // nor can this one call
    const Time end = job.clock_.now() + 300 * kMillisecond;
    int looks = 0;
    for (; job.clock_.now() < end; ++looks) {
      if (!job.step()) job.wait();
    }
    EXPECT_LT(looks, 100) << "the listener is readable all the time";
    EXPECT_TRUE(job.events(0).notes.empty());
  }
  ASSERT_TRUE(job.run_until([&] { return !job.events(0).notes.empty(); }));
  EXPECT_TRUE(job.events(0).losses.empty() && job.events(1).losses.empty());
  early.say(std::vector<std::byte>(64));
  ASSERT_TRUE(job.run_until([&] { return early.is_closed(); })) << "it was never taken in";
  ASSERT_TRUE(job_works(job, 4));
}

// An authenticated peer that then sends nonsense is lost by name, after its connection was tried again.
TEST(TcpSecurity, NonsenseAfterTheHandshakeIsNamed) {
  auto channel = testing::listen_or_die(testing::options_for(0, 2));
  std::mt19937_64 random(32);
  SteadyClock clock;
  Events events;
  Identity self;
  self.rank = 1;
  self.incarnation = 5;
  self.build = "0.1.0";
  self.job_id = "job";
  self.name = "rank 1 (host b)";
  self.secret = testing::bytes_of("a secret of this test");
  self.piece_bytes = ProtocolOptions{}.piece_bytes;
  for (uint32_t round = 0; round < 5 && events.losses.empty(); ++round) {
    Stranger s(channel->address());
    std::vector<std::byte> out;
    auto h = Handshake::connector(self, 0, 0, "rank 0", {true, 0, round}, out);
    while (h.state() == Handshake::State::kRunning) {
      if (!out.empty()) s.say(out);
      out.clear();
      channel->progress(clock.now(), events);
      std::byte in[512];
      ssize_t n = ::recv(s.fd.get(), in, sizeof in, MSG_DONTWAIT);
      if (n > 0) h.feed({in, static_cast<std::size_t>(n)}, out);
    }
    ASSERT_EQ(h.state(), Handshake::State::kDone) << h.status().to_string();
    s.say(testing::random_data(random, 500));
    Time end = clock.now() + 5 * kSecond;
    while (!s.is_closed() && clock.now() < end) channel->progress(clock.now(), events);
  }
  ASSERT_EQ(events.losses.size(), 1U);
  EXPECT_EQ(events.losses[0].peer, 1);
  EXPECT_EQ(events.losses[0].status.code(), Code::kCorrupted);
}

}  // namespace
}  // namespace paceline::wire
