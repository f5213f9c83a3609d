// Messages that their receiver reads where they lie, later: their sends end with that, and nothing is read once the sender
// has taken them back.
#include <atomic>

#include "wire/shm/testing.h"

namespace paceline::wire::shm::testing {
namespace {

constexpr std::size_t kLong = 1024 * 1024 + 192;

/// Counts what it is given.
class Counter final : public Sink {
 public:
  void consume(uint64_t, std::span<const std::byte> piece) override { bytes += piece.size(); }
  std::size_t bytes = 0;
};

std::byte* shared(Node& node, std::size_t bytes, unsigned seed) {
  auto* data = static_cast<std::byte*>(node.channel->allocator()->allocate(bytes));
  const auto values = pattern(bytes, seed);
  std::copy(values.begin(), values.end(), data);
  return data;
}

void receive(Node& node, Tag tag, Sink& sink, uint64_t cookie) {
  Inbox inbox{nullptr, &sink, kLong};
  inbox.hold = true;
  node.channel->receive(1, tag, 7, inbox, cookie);
}

/// Messages 1 and 2, held both.
std::pair<Completion, Completion> hold_two(Node& node, Sink& sink) {
  receive(node, 1, sink, 1);
  receive(node, 2, sink, 2);
  const Completion first = node.wait(1);
  return {first, node.wait(2)};
}

TEST(Held, EndWhenTheirReceiverHasReadThem) {
  run_ranks(2, [](Node& node) {
    talk(node, 1 - node.rank, 1000);
    if (node.rank == 1) {
      std::byte* first = shared(node, kLong, 3);
      std::byte* second = shared(node, kLong, 4);
      node.channel->send(0, 1, 7, {first, kLong}, 1);
      node.channel->send(0, 2, 7, {second, kLong}, 2);
      node.meet();
      node.step();
      EXPECT_TRUE(node.done.empty()) << "a send ended before its message was read";
      node.meet();
      EXPECT_TRUE(node.wait(1).status.is_ok());
      EXPECT_TRUE(node.wait(2).status.is_ok());
      EXPECT_EQ(node.channel->counters().held, 0U);
    } else {
      Counter sink;
      const auto [first, second] = hold_two(node, sink);
      EXPECT_EQ(first.bytes, kLong);
      ASSERT_NE(first.held, 0U);
      ASSERT_NE(second.held, 0U);
      EXPECT_EQ(sink.bytes, 0U);
      node.meet();
      node.meet();  // the sender has looked
      const auto a = node.channel->open_held(1, first.held);
      const auto b = node.channel->open_held(1, second.held);
      EXPECT_TRUE(std::ranges::equal(a, pattern(kLong, 3)));
      EXPECT_TRUE(node.channel->close_held(1, first.held));
      EXPECT_TRUE(std::ranges::equal(b, pattern(kLong, 4))) << "the other one is still open";
      EXPECT_TRUE(node.channel->close_held(1, second.held));
      EXPECT_FALSE(node.channel->close_held(1, second.held)) << "it was closed";
      EXPECT_EQ(node.channel->counters().held, 2 * kLong);
    }
    node.meet();
    EXPECT_EQ(node.channel->counters().payload_received, node.channel->counters().payload_sent +
                                                             (node.rank == 0 ? 2 * kLong : 0) -
                                                             (node.rank == 1 ? 2 * kLong : 0));
  });
}

TEST(Held, MayBeClosedUnread) {
  run_ranks(2, [](Node& node) {
    talk(node, 1 - node.rank, 1000);
    if (node.rank == 1) {
      node.channel->send(0, 1, 7, {shared(node, kLong, 3), kLong}, 1);
      EXPECT_TRUE(node.wait(1).status.is_ok());
    } else {
      Counter sink;
      receive(node, 1, sink, 1);
      EXPECT_TRUE(node.channel->close_held(1, node.wait(1).held));
    }
    node.meet();
  });
}

TEST(Held, NotWhatTheReceiverCantSee) {
  run_ranks(2, [](Node& node) {
    talk(node, 1 - node.rank, 1000);
    if (node.rank == 1) {
      const auto own = pattern(kLong, 5);
      node.channel->send(0, 1, 7, own, 1);                          // private memory
      node.channel->send(0, 2, 7, {shared(node, 4096, 6), 64}, 2);  // goes through the ring
      EXPECT_TRUE(node.wait(1).status.is_ok());
      EXPECT_TRUE(node.wait(2).status.is_ok());
    } else {
      Counter sink;
      receive(node, 1, sink, 1);
      receive(node, 2, sink, 2);
      EXPECT_EQ(node.wait(1).held, 0U);
      EXPECT_EQ(node.wait(2).held, 0U);
      EXPECT_EQ(sink.bytes, kLong + 64);
      EXPECT_EQ(node.channel->counters().held, 0U);
      EXPECT_TRUE(node.channel->open_held(1, 1).empty()) << "nothing is held";
      EXPECT_FALSE(node.channel->close_held(1, 1));
    }
    node.meet();
  });
}

TEST(Held, AreNotReadOnceTheirSenderHasTakenThemBack) {
  run_ranks(2, [](Node& node) {
    talk(node, 1 - node.rank, 1000);
    if (node.rank == 1) {
      node.channel->send(0, 1, 7, {shared(node, kLong, 3), kLong}, 1);
      node.meet();
      node.channel->abort(Status(Code::kAborted, "test"));
      EXPECT_EQ(node.wait(1).status.code(), Code::kAborted);
      node.meet();
    } else {
      Counter sink;
      receive(node, 1, sink, 1);
      const Completion held = node.wait(1);
      node.meet();
      node.meet();
      EXPECT_TRUE(node.channel->open_held(1, held.held).empty());
      EXPECT_FALSE(node.channel->close_held(1, held.held));
    }
    node.meet();
  });
}

/// flags: 0 the receiver reads, 1 the sender gives up now, 2 the receiver has read all, 3 and was in time to say so.
TEST(Held, ASenderThatGivesUpWaitsForWhoReads) {
  run_ranks(2, [](Node& node) {
    auto& flags = node.board.flags;
    talk(node, 1 - node.rank, 1000);
    const auto expected = pattern(kLong, 3);
    node.sleepy = false;
    if (node.rank == 1) {
      std::byte* data = shared(node, kLong, 3);
      node.channel->send(0, 1, 7, {data, kLong}, 1);
      node.channel->send(0, 2, 7, {shared(node, kLong, 4), kLong}, 2);
      ASSERT_TRUE(node.until([&] { return flags[0].load() != 0; }));
      EXPECT_TRUE(node.wait(2).status.is_ok()) << "this one has been read";
      flags[1].store(1);
      node.channel->abort(Status(Code::kAborted, "test"));
      EXPECT_EQ(flags[2].load(), 1U);
      const Completion end = node.wait(1);
      std::memset(data, 0, kLong);
      node.meet();
      if (flags[3].load() == 0) {
        EXPECT_EQ(end.status.code(), Code::kAborted);
      }
    } else {
      Counter sink;
      const auto [held, other] = hold_two(node, sink);
      const auto data = node.channel->open_held(1, held.held);
      EXPECT_FALSE(node.channel->open_held(1, other.held).empty());
      EXPECT_TRUE(node.channel->close_held(1, other.held));
      flags[0].store(1);
      while (flags[1].load() == 0) std::this_thread::yield();
      std::this_thread::sleep_for(
          std::chrono::milliseconds(20));  // a sender that doesn't wait goes on meanwhile
      EXPECT_TRUE(std::ranges::equal(data, expected));
      flags[2].store(1);
      flags[3].store(node.channel->close_held(1, held.held) ? 1 : 0);
      node.meet();
    }
    node.meet();
  });
}

TEST(Held, AreGoneWithTheirSender) {
  run_ranks(2,
            [](Node& node) {
              talk(node, 1 - node.rank, 1000);
              if (node.rank == 1) {
                node.channel->send(0, 1, 7, {shared(node, kLong, 3), kLong}, 1);
                node.sleepy = false;
                (void)node.until([&] { return node.board.flags[0].load() != 0; });
                ::raise(SIGKILL);
              }
              Counter sink;
              receive(node, 1, sink, 1);
              const Completion held = node.wait(1);
              node.board.flags[0].store(1);
              ASSERT_TRUE(node.until([&] { return !node.losses.empty(); }));
              EXPECT_TRUE(node.channel->open_held(1, held.held).empty());
              EXPECT_FALSE(node.channel->close_held(1, held.held));
            },
            {}, {1});
}

}  // namespace
}  // namespace paceline::wire::shm::testing
