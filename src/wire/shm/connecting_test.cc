// Who connects with whom: all at once, and strangers, who are refused by name while the others go on.
#include <unistd.h>

#include <functional>
#include <random>
#include <vector>

#include "base/testing/said.h"
#include "wire/shm/handshake.h"
#include "wire/shm/packet.h"
#include "wire/shm/testing.h"

namespace paceline::wire::shm::testing {
namespace {

using paceline::testing::Said;
using paceline::testing::times;

TEST(Strangers, WrongSecretIsRefusedOnBothSidesAndTheOthersGoOn) {
  run_ranks(
      3,
      [](Node& node) {
        std::vector<std::byte> word(8);
        if (node.rank == 2) {
          node.channel->send(0, 1, 0, word, 1);
          Completion c = node.wait(1);
          EXPECT_EQ(c.status.code(), Code::kUnauthenticated) << c.status.to_string();
          EXPECT_NE(c.status.message().find("rank 0"), std::string::npos);
          node.meet();
          return;
        }
        talk(node, 1 - node.rank, 0);
        node.channel->send(2, 1, 0, word, 1);
        Completion c = node.wait(1);
        EXPECT_EQ(c.status.code(), Code::kUnauthenticated) << c.status.to_string();
        talk(node, 1 - node.rank, 5000);
        node.meet();
      },
      [](ShmOptions& o) {
        if (o.rank == 2) o.secret = "another secret";
      });
}

TEST(Strangers, ARankThatWasStartedTwiceIsRefusedByName) {
  run_ranks(3, [](Node& node) {
    if (node.rank < 2) talk(node, 1 - node.rank, 0);
    node.meet();
    if (node.rank == 2) {
      ShmOptions twin;
      twin.rank = 1;
      twin.size = 3;
      twin.secret = "a secret of this test";
      twin.version = "test 1";
      auto made = ShmChannel::create(std::move(twin));
      ASSERT_TRUE(made.is_ok()) << made.status().to_string();
      auto& channel = **made;
      channel.set_peer(0, node.board.address[0], "host-0");
      const std::vector<std::byte> word(8);
      channel.send(0, 1, 0, word, 1);
      Events events;
      const bool ended = node.until([&] {
        channel.progress(node.clock.now(), events);
        return !events.completions.empty();
      });
      ASSERT_TRUE(ended);
      const Status& why = events.completions[0].status;
      EXPECT_EQ(why.code(), Code::kPeerLost) << why.to_string();
      EXPECT_NE(why.message().find("rank 1 is already connected"), std::string::npos)
          << why.to_string();
    }
    node.meet();
    if (node.rank < 2) talk(node, 1 - node.rank, 5000);
  });
}

// Who sits at a rank's address without the secret gets no proof, and none of the descriptors that come with it.
TEST(Strangers, WhoCanNotProveItselfGetsNothing) {
  auto listener = Listener::open("");
  ASSERT_TRUE(listener.is_ok()) << listener.status().to_string();
  ShmOptions options;
  options.rank = 0;
  options.size = 2;
  options.secret = "a secret of this test";
  auto made = ShmChannel::create(std::move(options));
  ASSERT_TRUE(made.is_ok()) << made.status().to_string();
  auto& channel = **made;
  channel.set_peer(1, listener->name(), "host-1");
  const std::vector<std::byte> word(8);
  channel.send(1, 1, 0, word, 1);
  Events events;
  Packet packet;
  Fd socket;
  bool greeted = false;
  const SteadyClock clock;
  for (int i = 0; i < 5000 && events.completions.empty(); ++i) {
    channel.progress(clock.now(), events);
    if (!socket) socket = listener->accept();
    if (socket && !greeted && receive_packet(socket.get(), packet) == PacketState::kOk) {
      greeted = true;
      Challenge challenge;
      std::mt19937 random(std::random_device{}());
      for (auto& b : challenge.nonce) b = static_cast<std::byte>(random());
      for (auto& b : challenge.mac) b = static_cast<std::byte>(random());
      ASSERT_EQ(send_packet(socket.get(), encode(challenge), {}), PacketState::kOk);
    }
    ::usleep(1000);
  }
  ASSERT_TRUE(greeted);
  ASSERT_FALSE(events.completions.empty());
  const Status& why = events.completions[0].status;
  EXPECT_EQ(why.code(), Code::kUnauthenticated) << why.to_string();
  EXPECT_NE(why.message().find("does not know this job's secret"), std::string::npos);
  EXPECT_EQ(receive_packet(socket.get(), packet), PacketState::kClosed) << "it was told something";
}

TEST(Strangers, AnotherVersionIsRefusedByName) {
  run_ranks(
      2,
      [](Node& node) {
        std::vector<std::byte> word(8);
        node.channel->send(1 - node.rank, 1, 0, word, 1);
        Completion c = node.wait(1);
        if (c.status.code() == Code::kMismatch) {
          EXPECT_NE(c.status.message().find("build 9"), std::string::npos) << c.status.message();
          node.board.flags[0].fetch_add(1);
        }
        EXPECT_FALSE(c.status.is_ok());
        node.meet();
        EXPECT_GE(node.board.flags[0].load(), 1U);
      },
      [](ShmOptions& o) {
        if (o.rank == 1) o.version = "build 9";
      });
}

/// Calls rank 1's socket so often and says something there: the job goes on, and the first is told of.
void expect_one_complaint_of(int calls,
                             const std::function<void(int socket, int call, std::mt19937&)>& say) {
  run_ranks(2, [&](Node& node) {
    const Said said;
    if (node.rank == 0) {
      std::mt19937 random(std::random_device{}());
      for (int i = 0; i < calls; ++i) {
        auto socket = connect_to(node.board.address[1]);
        ASSERT_TRUE(socket.is_ok()) << socket.status().to_string();
        say(socket->get(), i, random);
      }
    }
    talk(node, 1 - node.rank, 0);
    EXPECT_TRUE(node.losses.empty());
    node.meet();
    const auto text = said.text();
    EXPECT_EQ(times("sent something else than a handshake", text), node.rank == 1 ? 1U : 0U)
        << text;
    EXPECT_EQ(times("\n", text), node.rank == 1 ? 1U : 0U) << text;
  });
}

TEST(Strangers, RandomBytesOnTheSocketAreRefused) {
  expect_one_complaint_of(50, [](int socket, int call, std::mt19937& random) {
    std::vector<std::byte> junk(1 + random() % 2000);
    for (auto& b : junk) b = static_cast<std::byte>(random());
    if (call % 3 == 0) {  // a true beginning with a false end
      const std::byte magic[] = {std::byte{'P'}, std::byte{'L'}, std::byte{'S'},
                                 std::byte{'H'}, std::byte{1},   {}};
      std::copy_n(magic, std::min(junk.size(), std::size(magic)), junk.begin());
    }
    const int fds[] = {0, 1, 2};
    (void)send_packet(socket, junk, std::span(fds, static_cast<std::size_t>(call % 4)));
  });
}

TEST(Strangers, WhoSaysTooMuchIsRefusedAndToldOf) {
  expect_one_complaint_of(20, [](int socket, int /*call*/, std::mt19937& random) {
    auto greeting = encode(Hello{0, 1, 2, "", {}});  // a true one, but for its length
    greeting.resize(kPacketLimit + 1 + random() % 4000);
    ASSERT_EQ(send_packet(socket, greeting, {}), PacketState::kOk);
  });
}

// Whatever a stranger says it is, it fills nobody's log.
TEST(Strangers, AComplaintIsLoggedOnceWhoeverTheyAre) {
  run_ranks(2, [](Node& node) {
    const Said said;
    std::vector<Fd> open;  // who leaves at once is not asked for its proof
    if (node.rank == 0) {
      std::mt19937 random(std::random_device{}());
      for (int i = 0; i < 40; ++i) {
        auto socket = connect_to(node.board.address[1]);
        ASSERT_TRUE(socket.is_ok()) << socket.status().to_string();
        Hello hello{0, 1, 2, "a guess " + std::to_string(random()), {}};
        if (i % 2 == 0) hello.size = static_cast<int32_t>(3 + random() % 1000);
        (void)send_packet(socket->get(), encode(hello), {});
        Proof proof;  // who has no secret can but guess
        proof.ring_bytes = kRingLeast;
        for (auto& b : proof.mac) b = static_cast<std::byte>(random());
        (void)send_packet(socket->get(), encode(proof), {});
        open.push_back(std::move(socket).value());
      }
    }
    talk(node, 1 - node.rank, 0);
    EXPECT_TRUE(node.losses.empty());
    node.meet();
    const auto text = said.text();
    const std::size_t once = node.rank == 1 ? 1 : 0;
    EXPECT_EQ(times("asked for rank 1, this is rank 1 of 2", text), once) << text;
    EXPECT_EQ(times("rank 0 does not know this job's secret", text), once) << text;
    EXPECT_EQ(times("\n", text), 2 * once) << text;
  });
}

// Two that call each other are no strangers, whichever call is answered first: nobody hears of it.
TEST(Connecting, EverybodyWithEverybodyAtOnce) {
  for (int round = 0; round < 3; ++round) {
    run_ranks(6, [](Node& node) {
      const Said said;
      std::vector<std::vector<std::byte>> in(6, std::vector<std::byte>(8));
      auto word = pattern(8, static_cast<unsigned>(node.rank));
      node.meet();
      for (Rank peer = 0; peer < 6; ++peer) {
        if (peer == node.rank) continue;
        const auto p = static_cast<uint64_t>(peer);
        node.channel->send(peer, 1, 0, word, 10 + p);
        node.channel->receive(peer, 1, 0, {in[p].data(), nullptr, 8}, 20 + p);
      }
      for (Rank peer = 0; peer < 6; ++peer) {
        if (peer == node.rank) continue;
        const auto p = static_cast<uint64_t>(peer);
        EXPECT_TRUE(node.wait(10 + p).status.is_ok());
        EXPECT_TRUE(node.wait(20 + p).status.is_ok());
        EXPECT_EQ(in[p], pattern(8, static_cast<unsigned>(peer)));
      }
      EXPECT_TRUE(node.losses.empty());
      node.meet();
      EXPECT_EQ(said.text(), "");
    });
  }
}

}  // namespace
}  // namespace paceline::wire::shm::testing
