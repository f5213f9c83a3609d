// Messages over real sockets: matching, sizes, orders, sinks, flows.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <set>
#include <thread>

#include "wire/tcp/testing.h"

namespace paceline::wire {
namespace {

using testing::Job;
using testing::random_data;

TEST(TcpMessages, ShortAndLongBothOrdersOfPosting) {
  std::mt19937_64 random(7);
  for (bool receive_first : {true, false}) {
    for (std::size_t size : {0UL, 1UL, 63UL, 32768UL, 32769UL, 262144UL, 262145UL, 3000001UL}) {
      Job job(2);
      auto data = random_data(random, size);
      std::vector<std::byte> into(size + 5, std::byte{0x5A});
      auto send = [&] { job.at(0)->send(1, 42, 9, data, 1); };
      auto receive = [&] { job.at(1)->receive(0, 42, 9, {into.data(), nullptr, size}, 2); };
      if (receive_first) receive();
      if (!receive_first) send();
      for (int i = 0; i < 20; ++i) job.step();
      if (receive_first) send();
      if (!receive_first) receive();
      ASSERT_TRUE(job.complete(1, 2)) << size;
      ASSERT_TRUE(job.complete(0, 1)) << size;
      EXPECT_TRUE(job.completion(1, 2)->status.is_ok());
      EXPECT_EQ(job.completion(1, 2)->bytes, size);
      EXPECT_EQ(job.completion(0, 1)->bytes, size);
      EXPECT_TRUE(std::equal(data.begin(), data.end(), into.begin()));
      for (std::size_t i = size; i < into.size(); ++i) EXPECT_EQ(into[i], std::byte{0x5A});
    }
  }
}

int mtu_of_loopback() {
  std::ifstream file("/sys/class/net/lo/mtu");
  int mtu = 0;
  file >> mtu;
  return mtu;
}

// For predictions: at first the interface's packets, then what a connection's ends have agreed on.
TEST(TcpMessages, PacketsAreTheInterfacesAndThenTheConnections) {
  for (const char* at : {"127.0.0.1", "::1"}) {
    const bool is_ipv6 = std::string(at) == "::1";
    Job job(2, [&](TcpOptions& o) { o.bind_address = at; });
    const Packets interface = Packets::of_mtu(mtu_of_loopback(), is_ipv6);
    EXPECT_EQ(job.at(0)->packets(), interface);
    std::vector<std::byte> data(100), into(100);
    job.at(0)->send(1, 42, 9, data, 1);
    job.at(1)->receive(0, 42, 9, {into.data(), nullptr, into.size()}, 2);
    ASSERT_TRUE(job.complete(1, 2));
    for (Rank r = 0; r < 2; ++r) {
      // Not more than half a window: where an MTU is as large as loopback's that is less than a packet.
      EXPECT_LT(job.at(r)->packets().payload, interface.payload);
      EXPECT_GT(job.at(r)->packets().payload, 16'000U);
      EXPECT_EQ(job.at(r)->packets().headers, is_ipv6 ? 86U : 66U);
    }
  }
}

struct CheckingSink : Sink {
  std::vector<std::byte> data;
  std::vector<int> times;
  explicit CheckingSink(std::size_t size) : data(size), times(size / kPieceAlign + 1) {}
  void consume(uint64_t offset, std::span<const std::byte> piece) override {
    EXPECT_EQ(offset % kPieceAlign, 0U);
    ASSERT_LE(offset + piece.size(), data.size());
    EXPECT_TRUE(piece.size() % kPieceAlign == 0 || offset + piece.size() == data.size());
    std::memcpy(data.data() + offset, piece.data(), piece.size());
    for (uint64_t i = offset / kPieceAlign; i * kPieceAlign < offset + piece.size(); ++i)
      ++times[i];
  }
};

TEST(TcpMessages, SinkGetsEveryByteOnce) {
  std::mt19937_64 random(8);
  for (std::size_t size : {100UL, 40000UL, 5000123UL}) {
    Job job(2, [](TcpOptions& o) { o.flows = 4; });
    auto data = random_data(random, size);
    CheckingSink sink(size);
    job.at(1)->receive(0, 1, 0, {nullptr, &sink, size}, 2);
    job.at(0)->send(1, 1, 0, data, 1);
    ASSERT_TRUE(job.complete(1, 2));
    ASSERT_TRUE(job.complete(0, 1));
    EXPECT_EQ(sink.data, data);
    for (std::size_t i = 0; i * kPieceAlign < size; ++i) EXPECT_EQ(sink.times[i], 1);
  }
}

// Bytes that left rank 0 without a copy, of one long message to rank 1.
uint64_t lent_bytes(ZeroCopy asked, const std::string& machine0, const std::string& machine1) {
  std::mt19937_64 random(11);
  Job job(2, [&](TcpOptions& o) {
    o.zero_copy = asked;
    o.machine = o.rank == 0 ? machine0 : machine1;
  });
  auto data = random_data(random, 3U << 20);
  std::vector<std::byte> into(data.size());
  job.at(1)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
  job.at(0)->send(1, 1, 0, data, 1);
  EXPECT_TRUE(job.complete(1, 2));
  EXPECT_TRUE(job.complete(0, 1));
  EXPECT_EQ(into, data);
  EXPECT_EQ(job.at(1)->counters().lent, 0U);
  return job.at(0)->counters().lent;
}

// A receiver under the same kernel would hold the sender's very pages: page_lender.h.
TEST(TcpMessages, PagesAreLentToOtherMachines) {
  // Where the kernel has no vmsplice(2) nothing is lent, to nobody.
  const bool can = lent_bytes(ZeroCopy::kEverybody, "", "") > 0;
  EXPECT_EQ(lent_bytes(ZeroCopy::kOtherMachines, "a", "b") > 0, can);
  EXPECT_EQ(lent_bytes(ZeroCopy::kEverybody, "a", "a") > 0, can);
  EXPECT_EQ(lent_bytes(ZeroCopy::kOtherMachines, "a", "a"), 0U);
  EXPECT_EQ(lent_bytes(ZeroCopy::kOtherMachines, "a", ""), 0U);
  EXPECT_EQ(lent_bytes(ZeroCopy::kOtherMachines, "", "b"), 0U);
  EXPECT_EQ(lent_bytes(ZeroCopy::kNobody, "a", "b"), 0U);
}

// A slower machine only takes longer. (After a pause the kernel sends up to twice as fast.)
TEST(TcpMessages, ALimitedChannelSendsNoFasterForLong) {
  std::mt19937_64 random(12);
  Job job(2);
  constexpr uint64_t kRate = 200'000'000;
  const auto data = random_data(random, 96U << 20);
  std::vector<std::byte> into(data.size());
  const auto seconds = [&](uint32_t tag) {
    const Time start = SteadyClock().now();
    job.at(1)->receive(0, tag, 0, {into.data(), nullptr, into.size()}, 2 * tag);
    job.at(0)->send(1, tag, 0, data, 2 * tag + 1);
    EXPECT_TRUE(job.complete(1, 2 * tag));
    EXPECT_TRUE(job.complete(0, 2 * tag + 1));
    EXPECT_EQ(into, data);
    return static_cast<double>(SteadyClock().now() - start) / kSecond;
  };
  const double least = 0.4 * static_cast<double>(data.size()) / static_cast<double>(kRate);
  job.at(0)->limit_rate(kRate);
  EXPECT_GT(seconds(1), least);
  job.at(0)->limit_rate(0);
  seconds(2);
  job.at(0)->limit_rate(kRate);
  EXPECT_GT(seconds(3), least);
}

// Several peers get no more together than a half above what one would.
TEST(TcpMessages, TheLimitIsDealtToThePeersThatWait) {
  std::mt19937_64 random(13);
  constexpr uint64_t kRate = 200'000'000;
  Job job(4);
  const auto data = random_data(random, 64U << 20);
  std::vector<std::vector<std::byte>> into(3, std::vector<std::byte>(data.size()));
  job.at(0)->limit_rate(kRate);
  const Time start = SteadyClock().now();
  for (Rank peer = 1; peer < 4; ++peer) {
    auto& to = into[static_cast<std::size_t>(peer) - 1];
    job.at(peer)->receive(0, 1, 0, {to.data(), nullptr, to.size()}, 1);
    job.at(0)->send(peer, 1, 0, data, static_cast<uint64_t>(peer));
  }
  for (Rank peer = 1; peer < 4; ++peer) {
    EXPECT_TRUE(job.complete(peer, 1));
    EXPECT_EQ(into[static_cast<std::size_t>(peer) - 1], data);
  }
  const auto seconds = static_cast<double>(SteadyClock().now() - start) / kSecond;
  EXPECT_GT(seconds, 0.7 * 3 * static_cast<double>(data.size()) / (1.5 * kRate));
}

/// Posts messages while a channel copies, as other threads do then.
class Poster final : public Interlude {
 public:
  explicit Poster(std::function<void()> post) : post_(std::move(post)) {}
  void begin() override {
    ASSERT_FALSE(open_);
    open_ = true;
    ++times;
    post_();
  }
  void end() override {
    ASSERT_TRUE(open_);
    open_ = false;
  }
  int times = 0;

 private:
  std::function<void()> post_;
  bool open_ = false;
};

TEST(TcpMessages, MessagesArePostedWhileOthersAreCopied) {
  for (const auto zero_copy : {ZeroCopy::kNobody, ZeroCopy::kEverybody}) {
    std::mt19937_64 random(14);
    Job job(3, [&](TcpOptions& o) { o.zero_copy = zero_copy; });
    const auto large = random_data(random, 8U << 20), small = random_data(random, 40'000);
    constexpr uint32_t kMost = 300;
    // Both ends post from within: to each other, and to a rank that they have not met.
    struct End {
      uint32_t sent = 0, received = 0;
      std::vector<std::vector<std::byte>> into;
    };
    End ends[2];
    std::vector<std::unique_ptr<Poster>> posters;
    for (Rank me = 0; me < 2; ++me) {
      posters.push_back(std::make_unique<Poster>([&, me] {
        End& e = ends[me];
        if (e.sent == kMost) return;
        const uint32_t tag = 10 + e.sent++;
        job.at(me)->send(1 - me, tag, 0, small, 1000 + tag);
        job.at(me)->send(2, tag, 0, small, 2000 + tag);
        e.into.emplace_back(small.size());
        job.at(me)->receive(1 - me, 10 + e.received++, 0,
                            {e.into.back().data(), nullptr, small.size()}, 3000 + tag);
      }));
      job.at(me)->set_interlude(posters.back().get());
    }
    std::vector<std::byte> into[2];
    for (int round = 0; round < 8; ++round) {
      for (Rank me = 0; me < 2; ++me) {
        into[me].assign(large.size(), std::byte{0});
        const auto cookie = static_cast<uint64_t>(round);
        job.at(me)->receive(1 - me, 1, 0, {into[me].data(), nullptr, large.size()}, 100 + cookie);
        job.at(me)->send(1 - me, 1, 0, large, 200 + cookie);
      }
      for (Rank me = 0; me < 2; ++me) {
        EXPECT_TRUE(job.complete(me, 100U + static_cast<uint64_t>(round)));
        EXPECT_TRUE(job.complete(me, 200U + static_cast<uint64_t>(round)));
        EXPECT_EQ(into[me], large);
      }
    }
    for (Rank me = 0; me < 2; ++me) {
      EXPECT_GT(posters[static_cast<std::size_t>(me)]->times, 8);
      job.at(me)->set_interlude(nullptr);
    }
    // What one end has posted more than the other is posted here.
    std::vector<std::byte> rest(small.size());
    for (Rank me = 0; me < 2; ++me) {
      while (ends[1 - me].received < ends[me].sent) {
        const uint32_t tag = 10 + ends[1 - me].received++;
        job.at(1 - me)->receive(me, tag, 0, {rest.data(), nullptr, rest.size()}, 5000 + tag);
        EXPECT_TRUE(job.complete(1 - me, 5000 + tag));
      }
      for (uint32_t tag = 10; tag < 10 + ends[me].sent; ++tag) {
        job.at(2)->receive(me, tag, 0, {rest.data(), nullptr, rest.size()},
                           static_cast<uint64_t>(me) * 10'000 + tag);
        EXPECT_TRUE(job.complete(2, static_cast<uint64_t>(me) * 10'000 + tag));
        EXPECT_EQ(rest, small);
        EXPECT_TRUE(job.complete(me, 1000 + tag));
        EXPECT_TRUE(job.complete(me, 2000 + tag));
      }
      for (const auto& got : ends[me].into) EXPECT_EQ(got, small);
    }
  }
}

// Random sizes, tags in random order, both directions, three ranks, against a reference.
TEST(TcpMessages, RandomTrafficAgainstReference) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    std::mt19937_64 random(seed);
    Job job(3, [&](TcpOptions& o) {
      o.zero_copy = seed > 6 ? ZeroCopy::kEverybody : ZeroCopy::kNobody;
      o.flows = 1 + static_cast<int>(seed % 4);
      o.protocol.piece_bytes = 64U << (seed * 2 % 13);
      o.protocol.eager_limit = static_cast<uint32_t>(seed % 3) * 3000;
      o.protocol.eager_budget = 20000;
    });
    struct Message {
      Rank from, to;
      Tag tag;
      std::vector<std::byte> data, into;
    };
    std::vector<Message> messages;
    for (int i = 0; i < 150; ++i) {
      Rank from = static_cast<Rank>(random() % 3);
      Rank to = static_cast<Rank>((from + 1 + static_cast<Rank>(random() % 2)) % 3);
      std::size_t size = random() % 3 == 0 ? random() % 100 : random() % 60000;
      auto data = random_data(random, size);
      messages.push_back({from, to, 1000 + static_cast<Tag>(i), data,
                          std::vector<std::byte>(size + random() % 2)});
    }
    std::vector<std::pair<bool, std::size_t>> posts;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      posts.emplace_back(true, i);
      posts.emplace_back(false, i);
    }
    std::shuffle(posts.begin(), posts.end(), random);
    for (auto [is_send, i] : posts) {
      Message& m = messages[i];
      if (is_send) {
        job.at(m.from)->send(m.to, m.tag, 3, m.data, 2 * i);
      } else {
        job.at(m.to)->receive(m.from, m.tag, 3, {m.into.data(), nullptr, m.into.size()}, 2 * i + 1);
      }
      if (random() % 4 == 0) job.step();
    }
    ASSERT_TRUE(job.run_until([&] {
      std::size_t n = 0;
      for (Rank r = 0; r < 3; ++r) n += job.events(r).completions.size();
      return n == posts.size();
    })) << "seed "
        << seed;
    std::set<uint64_t> cookies;
    for (Rank r = 0; r < 3; ++r) {
      for (auto& c : job.events(r).completions) {
        EXPECT_TRUE(c.status.is_ok()) << c.status.to_string();
        EXPECT_EQ(c.bytes, messages[c.cookie / 2].data.size());
        EXPECT_TRUE(cookies.insert(c.cookie).second);
      }
    }
    for (auto& m : messages) EXPECT_TRUE(std::equal(m.data.begin(), m.data.end(), m.into.begin()));
  }
}

TEST(TcpMessages, NotesComeInOrderAndCopied) {
  Job job(2);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::byte> text = testing::bytes_of("note " + std::to_string(i));
    text.resize(text.size() + static_cast<std::size_t>(i) * 50);
    job.at(1)->post_note(0, text);
  }
  ASSERT_TRUE(job.run_until([&] { return job.events(0).notes.size() == 300; }));
  for (int i = 0; i < 300; ++i) {
    const Note& n = job.events(0).notes[static_cast<std::size_t>(i)];
    EXPECT_EQ(n.peer, 1);
    std::string expected = "note " + std::to_string(i);
    ASSERT_EQ(n.bytes.size(), expected.size() + static_cast<std::size_t>(i) * 50);
    EXPECT_EQ(std::memcmp(n.bytes.data(), expected.data(), expected.size()), 0);
  }
}

TEST(TcpMessages, TagsOvertakeEachOther) {
  std::mt19937_64 random(3);
  Job job(2);
  auto big = random_data(random, 1 << 20);
  auto small = random_data(random, 1000);
  std::vector<std::byte> into_big(big.size());
  std::vector<std::byte> into_small(small.size());
  job.at(0)->send(1, 1, 0, big, 1);  // its receive is not posted: it must not hold up the next
  job.at(0)->send(1, 2, 0, small, 2);
  job.at(1)->receive(0, 2, 0, {into_small.data(), nullptr, into_small.size()}, 3);
  ASSERT_TRUE(job.complete(1, 3));
  EXPECT_EQ(into_small, small);
  EXPECT_EQ(job.completion(0, 1), nullptr);
  job.at(1)->receive(0, 1, 0, {into_big.data(), nullptr, into_big.size()}, 4);
  ASSERT_TRUE(job.complete(1, 4));
  EXPECT_EQ(into_big, big);
}

// More unexpected bytes than the budget: nothing is lost, nothing blocks, the last tag can be
// received first.
TEST(TcpMessages, EagerBudgetBoundsWhatIsKept) {
  std::mt19937_64 random(4);
  Job job(2, [](TcpOptions& o) { o.protocol.eager_budget = 50000; });
  std::vector<std::vector<std::byte>> data;
  for (int i = 0; i < 40; ++i) data.push_back(random_data(random, 10000));
  for (std::size_t i = 0; i < data.size(); ++i) job.at(0)->send(1, i, 0, data[i], i);
  for (int i = 0; i < 200; ++i) job.step();
  EXPECT_LT(job.events(0).completions.size(), 6U);
  EXPECT_LT(job.at(1)->counters().wire_received, 60000U);
  for (std::size_t i = data.size(); i-- > 0;) {
    std::vector<std::byte> into(10000);
    job.at(1)->receive(0, i, 0, {into.data(), nullptr, into.size()}, 100 + i);
    ASSERT_TRUE(job.complete(1, 100 + i)) << i;
    EXPECT_EQ(into, data[i]);
  }
  ASSERT_TRUE(job.run_until([&] { return job.events(0).completions.size() == 40; }));
}

TEST(TcpMessages, DigestMismatchEndsBothSides) {
  for (std::size_t size : {100UL, 100000UL}) {
    for (bool send_first : {true, false}) {
      Job job(2);
      std::vector<std::byte> data(size);
      std::vector<std::byte> into(size, std::byte{0x77});
      if (send_first) job.at(0)->send(1, 1, 0xA, data, 1);
      if (send_first) job.run_until([&] { return false; }, 20 * kMillisecond);
      job.at(1)->receive(0, 1, 0xB, {into.data(), nullptr, size}, 2);
      if (!send_first) job.run_until([&] { return false; }, 20 * kMillisecond);
      if (!send_first) job.at(0)->send(1, 1, 0xA, data, 1);
      ASSERT_TRUE(job.complete(1, 2));
      ASSERT_TRUE(job.complete(0, 1));
      EXPECT_EQ(job.completion(1, 2)->status.code(), Code::kMismatch);
      EXPECT_NE(job.completion(1, 2)->status.message().find("rank 0 (host host-0)"),
                std::string::npos);
      if (size > 32768) {
        EXPECT_EQ(job.completion(0, 1)->status.code(), Code::kMismatch);
      }
      EXPECT_EQ(into, std::vector<std::byte>(size, std::byte{0x77}));
    }
  }
}

TEST(TcpMessages, TooLongForTheReceiveEndsBothSides) {
  for (std::size_t capacity : {1000UL, 50000UL}) {  // below and above the eager limit
    Job job(2);
    std::vector<std::byte> data(100000);
    std::vector<std::byte> into(capacity, std::byte{0x77});
    job.at(0)->send(1, 1, 0, data, 1);
    job.at(1)->receive(0, 1, 0, {into.data(), nullptr, capacity}, 2);
    ASSERT_TRUE(job.complete(1, 2));
    ASSERT_TRUE(job.complete(0, 1));
    EXPECT_EQ(job.completion(1, 2)->status.code(), Code::kMismatch);
    EXPECT_EQ(job.completion(0, 1)->status.code(), Code::kMismatch);
    EXPECT_EQ(into, std::vector<std::byte>(capacity, std::byte{0x77}));
  }
}

TEST(TcpMessages, ShortMessageForALargeReceive) {
  Job job(2);
  std::vector<std::byte> into(1 << 20);
  for (int round = 0; round < 5;
       ++round) {  // tags may be used again after both sides have completed
    std::vector<std::byte> data(10, static_cast<std::byte>(round));
    if (round % 2 == 0) job.at(1)->receive(0, 5, 0, {into.data(), nullptr, into.size()}, 20);
    if (round % 2 == 0) job.run_until([&] { return false; }, 5 * kMillisecond);
    job.at(0)->send(1, 5, 0, data, 10);
    if (round % 2 != 0) job.at(1)->receive(0, 5, 0, {into.data(), nullptr, into.size()}, 20);
    ASSERT_TRUE(job.complete(1, 20));
    ASSERT_TRUE(job.complete(0, 10));
    EXPECT_EQ(job.completion(1, 20)->bytes, 10U);
    EXPECT_EQ(into[9], static_cast<std::byte>(round));
    job.events(0).clear();
    job.events(1).clear();
  }
}

TEST(TcpMessages, CountersTellPayloadAndWire) {
  std::mt19937_64 random(5);
  Job job(2);
  auto data = random_data(random, 10 << 20);
  std::vector<std::byte> into(data.size());
  job.at(1)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
  job.at(0)->send(1, 1, 0, data, 1);
  ASSERT_TRUE(job.complete(1, 2));
  ASSERT_TRUE(job.complete(0, 1));
  Counters sent = job.at(0)->counters();
  Counters got = job.at(1)->counters();
  EXPECT_EQ(sent.payload_sent, data.size());
  EXPECT_EQ(got.payload_received, data.size());
  EXPECT_GE(sent.wire_sent, data.size());
  EXPECT_LT(sent.wire_sent, data.size() + data.size() / 200);
  // All arrived but, perhaps, the hello of a connection that gave way to the peer's own.
  EXPECT_LE(got.wire_received, sent.wire_sent);
  EXPECT_GT(got.wire_received + 1000, sent.wire_sent);
  EXPECT_EQ(sent.repeats, 0U);
}

// wake() from another thread ends a wait on poll_fd().
TEST(TcpMessages, WakeEndsAWait) {
  auto channel = testing::listen_or_die(testing::options_for(0, 1));
  Events events;
  SteadyClock clock;
  for (int round = 0; round < 200; ++round) {
    channel->progress(clock.now(), events);
    std::thread other([&] { channel->wake(); });
    ASSERT_TRUE(channel->prepare_wait());
    pollfd p{channel->poll_fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&p, 1, 10000), 1);
    other.join();
  }
}

TEST(TcpMessages, BadArgumentsAreNamed) {
  Job job(2);
  std::vector<std::byte> data(10);
  job.at(0)->send(0, 1, 0, data, 1);
  job.at(0)->send(7, 1, 0, data, 2);
  ASSERT_TRUE(job.complete(0, 1));
  ASSERT_TRUE(job.complete(0, 2));
  EXPECT_EQ(job.completion(0, 1)->status.code(), Code::kInvalidArgument);
  EXPECT_EQ(job.completion(0, 2)->status.code(), Code::kInvalidArgument);

  TcpOptions o = testing::options_for(0, 1);
  o.flows = 0;
  EXPECT_EQ(TcpChannel::listen(o).status().code(), Code::kInvalidArgument);
  o = testing::options_for(0, 1);
  o.bind_address.clear();
  o.interface = "nosuch0";
  auto missing = TcpChannel::listen(o);
  EXPECT_EQ(missing.status().code(), Code::kUnavailable);
  EXPECT_NE(missing.status().message().find("nosuch0"), std::string::npos);
  EXPECT_NE(missing.status().message().find("lo"), std::string::npos);
  auto first = testing::listen_or_die(testing::options_for(0, 1));
  o = testing::options_for(0, 1);
  o.port =
      static_cast<uint16_t>(std::stoi(first->address().substr(first->address().rfind(':') + 1)));
  auto taken = TcpChannel::listen(o);
  EXPECT_EQ(taken.status().code(), Code::kResourceExhausted);
  EXPECT_NE(taken.status().message().find(std::to_string(o.port)), std::string::npos);
  EXPECT_EQ(first->set_peer(0, "shm=x", "h").code(), Code::kInvalidArgument);
}

TEST(TcpMessages, Ipv6AndInterface) {
  for (const char* where : {"::1", "lo"}) {
    std::string at = where;
    Job job(2, [&](TcpOptions& o) {
      o.bind_address = at == "lo" ? "" : at;
      o.interface = at == "lo" ? at : "";
      o.host = "h";
    });
    std::vector<std::byte> data(100000, std::byte{9});
    std::vector<std::byte> into(data.size());
    job.at(1)->receive(0, 1, 0, {into.data(), nullptr, into.size()}, 2);
    job.at(0)->send(1, 1, 0, data, 1);
    ASSERT_TRUE(job.complete(1, 2));
    EXPECT_EQ(into, data);
  }
}

}  // namespace
}  // namespace paceline::wire
