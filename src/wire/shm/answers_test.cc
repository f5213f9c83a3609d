// What the receiver of a message writes back into its sender's memory, or into the slots that bring it private memory: at
// once where it can, never after the sender has taken its buffer back.

#include <algorithm>
#include <random>

#include "wire/shm/testing.h"

namespace paceline::wire::shm::testing {
namespace {

constexpr std::size_t kLong = 3 * 1024 * 1024 + 192;

std::byte turned(std::byte b) { return static_cast<std::byte>(static_cast<int>(b) * 5 + 3); }

std::vector<std::byte> turned(std::vector<std::byte> data) {
  for (auto& b : data) b = turned(b);
  return data;
}

/// Turns every byte; answers the first `most` pieces, where it is asked.
class Turner final : public Sink {
 public:
  explicit Turner(std::size_t bytes, int most = 1 << 30, bool slow = false)
      : data(bytes), left_(most), slow_(slow) {}
  void consume(uint64_t offset, std::span<const std::byte> piece) override {
    ASSERT_LE(offset + piece.size(), data.size());
    std::transform(piece.begin(), piece.end(), data.begin() + static_cast<std::ptrdiff_t>(offset),
                   [](std::byte b) { return turned(b); });
  }
  bool consume_and_answer(uint64_t offset, std::span<const std::byte> piece,
                          std::byte* place) override {
    consume(offset, piece);
    if (left_-- <= 0) return false;
    if (slow_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::copy_n(data.begin() + static_cast<std::ptrdiff_t>(offset), piece.size(), place);
    return true;
  }
  std::vector<std::byte> data;

 private:
  int left_;
  bool slow_;  ///< as if the system ran something else in the middle
};

struct Case {
  const char* name;
  bool arena;      ///< the sender's buffer
  bool in_place;   ///< the answer comes to where the question lies
  bool elsewhere;  ///< its receive names another place in the end
  int pieces;      ///< that the sink answers
  bool at_once;    ///< so this is expected
};
class Answers : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Each, Answers,
                         ::testing::Values(Case{"in_place", true, true, false, 100, true},
                                           Case{"beside", true, false, false, 100, true},
                                           Case{"elsewhere", true, true, true, 100, true},
                                           Case{"half_answered", true, true, false, 5, false},
                                           Case{"private", false, true, false, 100, true},
                                           Case{"private_beside", false, false, false, 100, true},
                                           Case{"private_elsewhere", false, true, true, 100, true},
                                           Case{"private_half_answered", false, true, false, 5,
                                                false}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Answers, AreThereWhenTheLaterMessageComes) {
  run_ranks(2, [](Node& node) {
    const Case& c = GetParam();
    talk(node, 1 - node.rank, 1000);
    if (node.rank == 0) {
      Turner sink(kLong, c.pieces);
      node.channel->receive(1, 1, 7, {nullptr, &sink, kLong}, 1);
      const Completion taken = node.wait(1);
      ASSERT_TRUE(taken.status.is_ok());
      EXPECT_EQ(taken.answered != 0, c.at_once);
      node.meet();
      Answer answer;
      answer.given = taken.answered;
      node.channel->send_with_answer(1, 2, 7, sink.data, 2, answer);
      EXPECT_TRUE(node.wait(2).status.is_ok());
    } else {
      const auto make = [&] {
        return c.arena ? static_cast<std::byte*>(node.channel->allocator()->allocate(kLong))
                       : static_cast<std::byte*>(std::malloc(kLong));
      };
      const auto original = pattern(kLong, 3);
      const auto expected = turned(original);
      std::byte* question = make();
      std::byte* place = c.in_place ? question : make();
      std::copy(original.begin(), original.end(), question);
      if (!c.in_place) std::memset(place, 0, kLong);
      Answer answer;
      answer.place = place;
      node.channel->send_with_answer(0, 1, 7, {question, kLong}, 1, answer);
      EXPECT_TRUE(node.wait(1).status.is_ok());
      const bool there = std::equal(expected.begin(), expected.end(), place);
      EXPECT_EQ(there, c.at_once);
      node.meet();
      std::vector<std::byte> other(kLong);
      std::byte* to = c.elsewhere ? other.data() : place;
      // Not a byte is moved any more where the answer is: what is written here meanwhile stays.
      if (c.at_once && !c.elsewhere) place[77] = std::byte{0x77};
      node.channel->receive(0, 2, 7, {to, nullptr, kLong}, 2);
      const Completion come = node.wait(2);
      EXPECT_TRUE(come.status.is_ok());
      EXPECT_EQ(come.bytes, kLong);
      if (c.at_once && !c.elsewhere) {
        EXPECT_EQ(place[77], std::byte{0x77});
        place[77] = expected[77];
      }
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), to));
      EXPECT_EQ(node.channel->counters().payload_received, node.channel->counters().payload_sent);
    }
    node.meet();
  });
}

class InMemory : public ::testing::TestWithParam<bool> {
 protected:
  /// Of the arena, or private.
  static std::byte* make(Node& node, std::size_t bytes) {
    return GetParam() ? static_cast<std::byte*>(node.channel->allocator()->allocate(bytes))
                      : static_cast<std::byte*>(std::malloc(bytes));
  }
};
INSTANTIATE_TEST_SUITE_P(Each, InMemory, ::testing::Values(true, false), [](const auto& info) {
  return std::string(info.param ? "arena" : "private");
});

/// The sender aborts at any moment and uses its buffer for something else: nothing is written there.
TEST_P(InMemory, AnswersAreNotWrittenAfterAnAbort) {
  const unsigned seed = std::random_device{}();
  for (unsigned round = 0; round < 20; ++round) {
    run_ranks(2, [&](Node& node) {
      constexpr std::size_t kBytes = 2 * 1024 * 1024;
      talk(node, 1 - node.rank, 9);
      if (node.rank == 1) {
        auto* data = make(node, kBytes);
        std::memset(data, 0x5a, kBytes);
        Answer answer;
        answer.place = data;
        node.channel->send_with_answer(0, 1, 0, {data, kBytes}, 1, answer);
        node.meet();
        std::mt19937 random(seed + round);
        const Time until = node.clock.now() + static_cast<Time>(random() % 8000) * kMicrosecond;
        while (node.clock.now() < until) node.step();
        node.channel->abort(Status(Code::kAborted, "test"));
        node.step();
        ASSERT_TRUE(node.done.contains(1));
        std::memset(data, 0xa5, kBytes);
        node.meet();
        EXPECT_EQ(std::count(data, data + kBytes, std::byte{0xa5}), static_cast<long>(kBytes))
            << "seed " << seed << ", round " << round;
      } else {
        Turner sink(kBytes, 1 << 30, true);
        node.meet();
        node.channel->receive(1, 1, 0, {nullptr, &sink, kBytes}, 1);
        (void)node.wait(1);
        node.meet();
      }
      node.meet();
    });
  }
}

/// Stands still, or dies, in the middle of an answer.
class Sudden final : public Sink {
 public:
  explicit Sudden(int signal) : signal_(signal) {}
  void consume(uint64_t /*offset*/, std::span<const std::byte> /*data*/) override {}
  bool consume_and_answer(uint64_t /*offset*/, std::span<const std::byte> /*data*/,
                          std::byte* place) override {
    ::raise(signal_);
    *place = std::byte{0x11};
    return true;
  }

 private:
  int signal_;
};

class SuddenEnd : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Each, SuddenEnd, ::testing::Values(SIGSTOP, SIGKILL),
                         [](const auto& info) {
                           return std::string(info.param == SIGSTOP ? "stopped" : "killed");
                         });

TEST_P(SuddenEnd, OfAWriterHoldsNobodyUp) {
  run_ranks(2,
            [](Node& node) {
              talk(node, 1 - node.rank, 9);
              auto& arena = *node.channel->allocator();
              if (node.rank == 0) {
                node.board.flags[0].store(static_cast<uint64_t>(::getpid()));
                Sudden sink(GetParam());
                node.meet();
                node.channel->receive(1, 1, 0, {nullptr, &sink, kLong}, 1);
                (void)node.wait(1);  // the other one ends this process
                return;
              }
              auto* data = static_cast<std::byte*>(arena.allocate(kLong));
              Answer answer;
              answer.place = data;
              node.channel->send_with_answer(0, 1, 0, {data, kLong}, 1, answer);
              node.meet();
              const auto other = static_cast<pid_t>(node.board.flags[0].load());
              const Time began = node.clock.now();
              node.sleepy = false;
              if (GetParam() == SIGKILL) {
                EXPECT_EQ(node.wait(1).status.code(), Code::kPeerLost);
                EXPECT_LT(node.clock.now() - began, 2 * kSecond);
                EXPECT_TRUE(arena.free(data));
                return;
              }
              ASSERT_TRUE(node.until([&] { return is_stopped(other); }));
              const Time stopped = node.clock.now();
              node.channel->abort(Status(Code::kTimeout, "rank 0 is silent"));
              node.step();
              EXPECT_LT(node.clock.now() - stopped, 3 * kSecond);
              EXPECT_EQ(node.wait(1).status.message(), "rank 0 is silent");
              // What it may still write to is nobody's any more.
              EXPECT_TRUE(arena.free(data));
              auto* next = static_cast<std::byte*>(arena.allocate(kLong));
              EXPECT_TRUE(next != data);
              ::kill(other, SIGKILL);
            },
            {}, {0});
}

/// Stands still in the middle of its first answer, and writes it when it continues.
class Late final : public Sink {
 public:
  explicit Late(std::atomic<uint64_t>& written) : written_(written) {}
  void consume(uint64_t /*offset*/, std::span<const std::byte> /*data*/) override {}
  bool consume_and_answer(uint64_t /*offset*/, std::span<const std::byte> data,
                          std::byte* place) override {
    ::raise(SIGSTOP);
    std::fill_n(place, data.size(), std::byte{0x11});
    written_.store(1);
    return true;
  }

 private:
  std::atomic<uint64_t>& written_;
};

/// Rank 0: stands still as it answers, and hears later that rank 1 has given up.
void answer_late(Node& node) {
  node.board.flags[0].store(static_cast<uint64_t>(::getpid()));
  Late sink(node.board.flags[1]);
  node.channel->receive(1, 1, 0, {nullptr, &sink, kLong}, 1);
  EXPECT_EQ(node.wait(1).status.code(), Code::kAborted);
  EXPECT_EQ(node.board.flags[1].load(), 1U) << "it was not asked for an answer";
}

/// Rank 1: gives up when rank 0 stands still.
void give_up(Node& node, pid_t& other) {
  node.sleepy = false;
  ASSERT_TRUE(node.until([&] { return node.board.flags[0].load() != 0; }));
  other = static_cast<pid_t>(node.board.flags[0].load());
  ASSERT_TRUE(node.until([&] { return is_stopped(other); }));
  node.channel->abort(Status(Code::kTimeout, "rank 0 is silent"));
  node.step();
  EXPECT_EQ(node.wait(1).status.message(), "rank 0 is silent");
}

class LateAnswer : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Each, LateAnswer, ::testing::Values(false, true), [](const auto& info) {
  return std::string(info.param ? "exchanged" : "allocated");
});

/// The owner has been told of a failure, and uses its buffer again: no answer appears there.
TEST_P(LateAnswer, DoesNotAppearInItsOwnersMemory) {
  run_ranks(2, [](Node& node) {
    talk(node, 1 - node.rank, 9);
    if (node.rank == 0) {
      answer_late(node);
      node.meet();
      return;
    }
    // A part of the buffer, which begins and ends within pages.
    constexpr std::size_t kBefore = 100'000;
    constexpr std::size_t kAll = kLong + 2 * kBefore;
    auto& arena = *node.channel->allocator();
    const auto original = pattern(kAll, 5);
    auto memory = original;
    auto* all = memory.data();
    if (GetParam()) {
      ASSERT_TRUE(arena.share(all, kAll).is_ok());
    } else {
      all = static_cast<std::byte*>(arena.allocate(kAll));
      std::copy(original.begin(), original.end(), all);
    }
    std::byte* const part = all + kBefore;
    Answer answer;
    answer.place = part;
    node.channel->send_with_answer(0, 1, 0, {part, kLong}, 1, answer);
    pid_t other = 0;
    ASSERT_NO_FATAL_FAILURE(give_up(node, other));
    EXPECT_TRUE(std::equal(original.begin(), original.end(), all));
    EXPECT_FALSE(arena.offset_of(part, kLong).has_value());
    std::memset(all, 0xa5, kAll);
    ::kill(other, SIGCONT);
    EXPECT_TRUE(node.until([&] { return node.board.flags[1].load() != 0; }));
    EXPECT_EQ(std::count(all, all + kAll, std::byte{0xa5}), static_cast<long>(kAll));
    EXPECT_TRUE(GetParam() ? arena.unshare(all).is_ok() : arena.free(all));
    EXPECT_TRUE(!GetParam() || memory == std::vector<std::byte>(kAll, std::byte{0xa5}));
    node.meet();
  });
}

/// The same where the answer comes by a slot, which nobody uses again.
TEST(LateAnswer, DoesNotAppearInPrivateMemory) {
  run_ranks(2, [](Node& node) {
    talk(node, 1 - node.rank, 9);
    if (node.rank == 0) {
      answer_late(node);
      node.meet();
      node.meet();
      return;
    }
    auto data = pattern(kLong, 5);
    Answer answer;
    answer.place = data.data();
    node.channel->send_with_answer(0, 1, 0, data, 1, answer);
    pid_t other = 0;
    ASSERT_NO_FATAL_FAILURE(give_up(node, other));
    EXPECT_EQ(data, pattern(kLong, 5));
    std::fill(data.begin(), data.end(), std::byte{0xa5});
    ::kill(other, SIGCONT);
    EXPECT_TRUE(node.until([&] { return node.board.flags[1].load() != 0; }));
    node.meet();
    for (int i = 0; i < 100; ++i) node.step();  // the slot has been handed back
    EXPECT_EQ(std::count(data.begin(), data.end(), std::byte{0xa5}), static_cast<long>(kLong));
    node.meet();
  });
}

/// Who can't map the slots' memory reads the message as if no answer were wanted; so does one that has none to map.
TEST(Answers, DoNotComeWhereThereAreNoSlots) {
  for (const int without : {0, 1}) {
    run_ranks(
        2,
        [&](Node& node) {
          talk(node, 1 - node.rank, 9);
          if (node.rank == 0) {
            Turner sink(kLong);
            node.channel->receive(1, 1, 7, {nullptr, &sink, kLong}, 1);
            const Completion taken = node.wait(1);
            EXPECT_TRUE(taken.status.is_ok());
            EXPECT_EQ(taken.answered, 0U);
            EXPECT_EQ(sink.data, turned(pattern(kLong, 3)));
          } else {
            auto data = pattern(kLong, 3);
            Answer answer;
            answer.place = data.data();
            node.channel->send_with_answer(0, 1, 7, data, 1, answer);
            EXPECT_TRUE(node.wait(1).status.is_ok());
            EXPECT_EQ(data, pattern(kLong, 3));
          }
          node.meet();
        },
        [&](ShmOptions& o) { o.use_arena = o.rank != without; });
  }
}

/// Less than a page may lie in one page with others' memory, from which a late answer can't be kept away.
TEST(Answers, AreNotAskedForWhereAPageIsNotAllTheirs) {
  run_ranks(
      2,
      [](Node& node) {
        constexpr std::size_t kShort = 1000;
        talk(node, 1 - node.rank, 9);
        if (node.rank == 0) {
          Turner sink(kShort);
          node.channel->receive(1, 1, 7, {nullptr, &sink, kShort}, 1);
          const Completion taken = node.wait(1);
          EXPECT_TRUE(taken.status.is_ok());
          EXPECT_EQ(taken.answered, 0U);
        } else {
          auto* data = static_cast<std::byte*>(node.channel->allocator()->allocate(kShort));
          std::memset(data, 0x5a, kShort);
          Answer answer;
          answer.place = data;
          node.channel->send_with_answer(0, 1, 7, {data, kShort}, 1, answer);
          EXPECT_TRUE(node.wait(1).status.is_ok());
          EXPECT_EQ(std::count(data, data + kShort, std::byte{0x5a}), static_cast<long>(kShort));
        }
        node.meet();
      },
      [](ShmOptions& o) { o.eager_limit = 0; });
}

}  // namespace
}  // namespace paceline::wire::shm::testing
