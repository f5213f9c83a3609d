// Memory of a peer that is read in place: until its owner takes it back, and not a moment longer. Pages that were given back
// show zeros here; where the system has no page left to put there, who reads them is killed.

#include "wire/shm/testing.h"

namespace paceline::wire::shm::testing {
namespace {

constexpr std::size_t kLong = 3 * 1024 * 1024 + 192;
constexpr uint64_t kChunk = 64 * 1024;

/// What is read: a message in its sender's arena, or slots there that the sender copies it into.
enum class Where { kArena, kSlots };

/// Counts the pieces and compares them, at one of them after something has happened.
class Watcher final : public Sink {
 public:
  explicit Watcher(int at = 0, std::function<void()> happens = {})
      : at_(at), happens_(std::move(happens)), expected_(pattern(kLong, 3)) {}
  void consume(uint64_t offset, std::span<const std::byte> piece) override {
    if (++calls == at_) happens_();
    intact = intact && std::equal(piece.begin(), piece.end(),
                                  expected_.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  int calls = 0;
  bool intact = true;

 private:
  int at_;
  std::function<void()> happens_;
  std::vector<std::byte> expected_;
};

/// The sender's side.
class Owner {
 public:
  Owner(Node& node, Where where) : node_(node), where_(where), private_(pattern(kLong, 3)) {
    data_ = private_.data();
    if (where == Where::kArena) {
      data_ = static_cast<std::byte*>(node.channel->allocator()->allocate(kLong));
      std::copy(private_.begin(), private_.end(), data_);
    }
    sent_before_ = node.channel->counters().wire_sent;
    node.channel->send(0, 1, 7, {data_, kLong}, 1);
  }
  /// Until the reader has begun, or each slot has been written once: it has no more then.
  bool begins() {
    const uint64_t target = sent_before_ + 4 * kChunk;
    return node_.until([&] {
      return where_ == Where::kArena ? node_.board.flags[0].load() != 0
                                     : node_.channel->counters().wire_sent >= target;
    });
  }
  /// Takes the message back, and gives the pages where it was read back to the system.
  void take_back() {
    auto& arena = *node_.channel->allocator();
    const Status why(Code::kAborted, "test");
    if (where_ == Where::kArena) {
      node_.channel->abort(why);
      node_.step();
      EXPECT_EQ(node_.wait(1).status.message(), "test");
      EXPECT_TRUE(arena.free(data_));
    } else {
      node_.channel->drop_peer(0, why);
    }
    EXPECT_EQ(arena.bytes_in_use(), 0U);
  }
  [[nodiscard]] const std::byte* data() const { return data_; }

 private:
  Node& node_;
  Where where_;
  std::vector<std::byte> private_;
  std::byte* data_;
  uint64_t sent_before_ = 0;
};

class Readers : public ::testing::TestWithParam<Where> {
 protected:
  static void tweak(ShmOptions& o) {
    o.use_vm_read = false;
    o.chunk_bytes = o.progress_bytes = o.slot_bytes = kChunk;
    o.slots = 4;
  }
  static Code after_the_end() {
    return GetParam() == Where::kArena ? Code::kAborted : Code::kPeerLost;
  }
};
INSTANTIATE_TEST_SUITE_P(Each, Readers, ::testing::Values(Where::kArena, Where::kSlots),
                         [](const auto& info) {
                           return std::string(info.param == Where::kArena ? "arena" : "slots");
                         });

/// Without a step of the channel.
void await_flag(Node& node, std::size_t flag) {
  Patience patience(node.clock.now());
  while (node.board.flags[flag].load() == 0) {
    if (patience.is_over(node.clock.now())) std::_Exit(kNothingCame);
    std::this_thread::yield();
  }
}

TEST_P(Readers, ReadNothingThatWasTakenBack) {
  run_ranks(
      2,
      [](Node& node) {
        node.sleepy = false;
        if (node.rank == 0) {
          Watcher sink;
          node.channel->receive(1, 1, 7, {nullptr, &sink, kLong}, 1);
          ASSERT_TRUE(node.until([&] { return sink.calls >= 2; }));
          node.board.flags[0].store(1);
          await_flag(node, 1);
          const int calls = sink.calls;
          ASSERT_LT(static_cast<uint64_t>(calls) * kChunk, kLong);
          EXPECT_EQ(node.wait(1).status.code(), after_the_end());
          EXPECT_EQ(sink.calls, calls);
          EXPECT_TRUE(sink.intact);
        } else {
          Owner owner(node, GetParam());
          ASSERT_TRUE(owner.begins());
          await_flag(node, 0);
          for (int i = 0; i < 50; ++i) node.step();  // those that have been read are full again
          owner.take_back();
          node.board.flags[1].store(1);
        }
        node.meet();
      },
      tweak);
}

TEST_P(Readers, HaveTheEndOfTheirChunk) {
  run_ranks(
      2,
      [](Node& node) {
        node.sleepy = false;
        if (node.rank == 0) {
          Watcher sink(3, [&] {
            node.board.flags[0].store(1);
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
          });
          node.channel->receive(1, 1, 7, {nullptr, &sink, kLong}, 1);
          EXPECT_EQ(node.wait(1).status.code(), after_the_end());
          EXPECT_GE(sink.calls, 3);
          EXPECT_TRUE(sink.intact);
        } else {
          Owner owner(node, GetParam());
          ASSERT_TRUE(node.until([&] { return node.board.flags[0].load() != 0; }));
          owner.take_back();
        }
        node.meet();
      },
      tweak);
}

TEST_P(Readers, ThatStandStillFindTheirPagesLater) {
  run_ranks(
      2,
      [](Node& node) {
        node.sleepy = false;
        if (node.rank == 0) {
          node.board.flags[0].store(static_cast<uint64_t>(::getpid()));
          Watcher sink(3, [] { ::raise(SIGSTOP); });
          node.channel->receive(1, 1, 7, {nullptr, &sink, kLong}, 1);
          EXPECT_EQ(node.wait(1).status.code(), after_the_end());
          EXPECT_EQ(sink.calls, 3);
          EXPECT_TRUE(sink.intact);
        } else {
          Owner owner(node, GetParam());
          await_flag(node, 0);
          const auto other = static_cast<pid_t>(node.board.flags[0].load());
          ASSERT_TRUE(node.until([&] { return is_stopped(other); }));
          const Time began = node.clock.now();
          owner.take_back();
          EXPECT_LT(node.clock.now() - began, 3 * kSecond);
          EXPECT_NE(node.channel->allocator()->allocate(kLong), owner.data());
          ::kill(other, SIGCONT);
        }
        node.meet();
      },
      tweak);
}

}  // namespace
}  // namespace paceline::wire::shm::testing
