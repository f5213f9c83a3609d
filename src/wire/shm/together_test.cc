// Messages in a peer's arena that several threads read at once.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "base/workers.h"
#include "wire/shm/testing.h"

namespace paceline::wire::shm::testing {
namespace {

constexpr std::size_t kLong = 3 * 1024 * 1024 + 192;

/// Adds one to every byte; answers pieces before `answers_before`. The first piece waits, up to the test's patience, until
/// another thread has one.
class Incrementer final : public Sink {
 public:
  explicit Incrementer(std::size_t bytes, bool wait, std::size_t answers_before = 0)
      : data(bytes), calls_(bytes / kPieceAlign + 1), wait_(wait), before_(answers_before) {}
  void consume(uint64_t offset, std::span<const std::byte> piece) override {
    {
      std::lock_guard lock(mutex_);
      threads_.insert(std::this_thread::get_id());
    }
    Patience patience(clock_.now());
    while (wait_ && threads() < 2 && !patience.is_over(clock_.now())) std::this_thread::yield();
    for (std::size_t i = 0; i < piece.size(); i += kPieceAlign)
      ++calls_[(offset + i) / kPieceAlign];
    std::transform(piece.begin(), piece.end(), data.begin() + static_cast<std::ptrdiff_t>(offset),
                   plus_one);
  }
  bool consume_and_answer(uint64_t offset, std::span<const std::byte> piece,
                          std::byte* place) override {
    consume(offset, piece);
    if (offset >= before_) return false;
    std::copy_n(data.begin() + static_cast<std::ptrdiff_t>(offset), piece.size(), place);
    return true;
  }
  static std::byte plus_one(std::byte b) { return static_cast<std::byte>(static_cast<int>(b) + 1); }
  std::size_t threads() {
    std::lock_guard lock(mutex_);
    return threads_.size();
  }
  /// Every piece came once.
  bool complete() {
    return std::all_of(
        calls_.begin(),
        calls_.begin() + static_cast<std::ptrdiff_t>((data.size() + kPieceAlign - 1) / kPieceAlign),
        [](const auto& calls) { return calls.load() == 1; });
  }
  std::vector<std::byte> data;

 private:
  SteadyClock clock_;
  std::mutex mutex_;
  std::set<std::thread::id> threads_;
  std::vector<std::atomic<int>> calls_;
  bool wait_;
  std::size_t before_;
};

std::vector<std::byte> incremented(std::vector<std::byte> data) {
  std::transform(data.begin(), data.end(), data.begin(), Incrementer::plus_one);
  return data;
}

std::byte* in_arena(Node& node, const std::vector<std::byte>& data) {
  auto* memory = static_cast<std::byte*>(node.channel->allocator()->allocate(data.size()));
  std::copy(data.begin(), data.end(), memory);
  return memory;
}

// Short, long and odd ones, into sinks and into memory; what one call reads ends in the middle of some.
TEST(Together, EveryByteComesOnce) {
  const std::vector<std::size_t> lengths{700'001, kLong,     64 * 1024, 1'500'000,
                                         20'001,  kLong + 1, 9'000};
  run_ranks(
      2,
      [&](Node& node) {
        talk(node, 1 - node.rank, 1000);
        if (node.rank == 1) {
          for (std::size_t i = 0; i < lengths.size(); ++i) {
            const auto data = pattern(lengths[i], static_cast<unsigned>(i));
            node.channel->send(0, i, 7, {in_arena(node, data), data.size()}, i);
          }
          for (std::size_t i = 0; i < lengths.size(); ++i) EXPECT_TRUE(node.wait(i).status.is_ok());
        } else {
          Workers workers(3);
          node.channel->set_workers(&workers);
          std::vector<std::unique_ptr<Incrementer>> sinks;
          std::vector<std::vector<std::byte>> plain;
          for (std::size_t i = 0; i < lengths.size(); ++i) {
            sinks.push_back(std::make_unique<Incrementer>(lengths[i], i == 1));
            plain.emplace_back(lengths[i]);
            const bool sink = i % 2 == 1;
            node.channel->receive(
                1, i, 7,
                {sink ? nullptr : plain[i].data(), sink ? sinks[i].get() : nullptr, lengths[i]}, i);
          }
          for (std::size_t i = 0; i < lengths.size(); ++i) {
            const Completion done = node.wait(i);
            EXPECT_TRUE(done.status.is_ok());
            EXPECT_EQ(done.bytes, lengths[i]);
            const auto sent = pattern(lengths[i], static_cast<unsigned>(i));
            if (i % 2 == 1) {
              EXPECT_TRUE(sinks[i]->complete()) << "message " << i;
              EXPECT_EQ(sinks[i]->data, incremented(sent)) << "message " << i;
            } else {
              EXPECT_EQ(plain[i], sent) << "message " << i;
            }
          }
          EXPECT_GE(sinks[1]->threads(), 2U);
          node.channel->set_workers(nullptr);
        }
        node.meet();
        EXPECT_EQ(node.channel->counters().payload_received + node.channel->counters().payload_sent,
                  4 * 300'100 / 2 + std::accumulate(lengths.begin(), lengths.end(), uint64_t{0}));
      },
      [](ShmOptions& o) { o.worker_bytes = 512 * 1024; });
}

// All parts answered, or all but the last: then the later message has to bring it.
TEST(Together, AnswersCountIfAllAreThere) {
  for (const bool whole : {true, false}) {
    run_ranks(2, [&](Node& node) {
      talk(node, 1 - node.rank, 1000);
      const auto sent = pattern(kLong, 3);
      if (node.rank == 1) {
        std::byte* data = in_arena(node, sent);
        Answer answer;
        answer.place = data;
        node.channel->send_with_answer(0, 1, 7, {data, kLong}, 1, answer);
        EXPECT_TRUE(node.wait(1).status.is_ok());
        EXPECT_EQ(std::equal(data, data + kLong, incremented(sent).begin()), whole);
        node.channel->receive(0, 2, 7, {data, nullptr, kLong}, 2);
        EXPECT_TRUE(node.wait(2).status.is_ok());
        EXPECT_TRUE(std::equal(data, data + kLong, incremented(sent).begin()));
      } else {
        Workers workers(3);
        node.channel->set_workers(&workers);
        Incrementer sink(kLong, true, whole ? kLong : kLong - 1000);
        node.channel->receive(1, 1, 7, {nullptr, &sink, kLong}, 1);
        const Completion taken = node.wait(1);
        EXPECT_EQ(taken.answered != 0, whole);
        EXPECT_GE(sink.threads(), 2U);
        Answer answer;
        answer.given = taken.answered;
        node.channel->send_with_answer(1, 2, 7, sink.data, 2, answer);
        EXPECT_TRUE(node.wait(2).status.is_ok());
        node.channel->set_workers(nullptr);
      }
      node.meet();
    });
  }
}

/// Submits from within what the channel's driver waits for.
class Submitter final : public Interlude {
 public:
  explicit Submitter(Node& node) : node_(node), sent_(pattern(kLong, 9)), into_(kLong) {}
  void begin() override {
    ++times;
    if (times > 1) return;
    std::thread other([this] {
      node_.channel->send(1, 5, 7, sent_, 5);
      node_.channel->receive(1, 6, 7, {into_.data(), nullptr, kLong}, 6);
    });
    other.join();
  }
  void end() override { ++ends; }
  [[nodiscard]] const std::vector<std::byte>& into() const { return into_; }
  int times = 0, ends = 0;

 private:
  Node& node_;
  std::vector<std::byte> sent_, into_;
};

TEST(Together, OthersSubmitMeanwhile) {
  run_ranks(2, [](Node& node) {
    talk(node, 1 - node.rank, 1000);
    if (node.rank == 1) {
      const auto sent = pattern(kLong, 3), theirs = pattern(kLong, 9);
      node.channel->send(0, 1, 7, {in_arena(node, sent), kLong}, 1);
      node.channel->send(0, 6, 7, {in_arena(node, sent), kLong}, 2);
      std::vector<std::byte> into(kLong);
      node.channel->receive(0, 5, 7, {into.data(), nullptr, kLong}, 3);
      for (const uint64_t cookie : {1, 2, 3}) EXPECT_TRUE(node.wait(cookie).status.is_ok());
      EXPECT_EQ(into, theirs);
    } else {
      Workers workers(3);
      node.channel->set_workers(&workers);
      Submitter submitter(node);
      node.channel->set_interlude(&submitter);
      std::vector<std::byte> into(kLong);
      node.channel->receive(1, 1, 7, {into.data(), nullptr, kLong}, 1);
      for (const uint64_t cookie : {1, 5, 6}) EXPECT_TRUE(node.wait(cookie).status.is_ok());
      EXPECT_EQ(into, pattern(kLong, 3));
      EXPECT_EQ(submitter.into(), pattern(kLong, 3));
      EXPECT_GE(submitter.times, 2);
      EXPECT_EQ(submitter.times, submitter.ends);
      node.channel->set_interlude(nullptr);
      node.channel->set_workers(nullptr);
    }
    node.meet();
  });
}

// All peers of a rank share what one call of progress() reads.
TEST(Together, ManyPeersAreReadInOneCallsTime) {
  constexpr std::size_t kEach = 6U << 20;
  run_ranks(4, [](Node& node) {
    node.sleepy = false;
    for (Rank peer = 0; peer < node.size; ++peer) {
      if (peer != node.rank && (peer == 0 || node.rank == 0)) talk(node, peer, 1000);
    }
    if (node.rank != 0) {
      node.channel->send(0, 1, 7, {in_arena(node, pattern(kEach, 3)), kEach}, 1);
      node.meet();
      EXPECT_TRUE(node.wait(1).status.is_ok());
    } else {
      node.meet();  // all three are offered
      Workers workers(3);
      node.channel->set_workers(&workers);
      std::vector<std::vector<std::byte>> into(3, std::vector<std::byte>(kEach));
      for (Rank peer = 1; peer < 4; ++peer)
        node.channel->receive(peer, 1, 7, {into[peer - 1].data(), nullptr, kEach}, peer);
      int calls = 0;
      EXPECT_TRUE(node.until([&] { return ++calls > 0 && node.done.size() == 3; }));
      // Two MiB a thread in a call, for all of them: eighteen take three calls at least.
      EXPECT_GE(calls, 4);
      for (const auto& data : into) EXPECT_EQ(data, pattern(kEach, 3));
      node.channel->set_workers(nullptr);
    }
    node.meet();
  });
}

/// Tells when a thread reads, and goes on when the sender is about to take its message back.
class Interrupted final : public Sink {
 public:
  explicit Interrupted(Board& board) : board_(board), expected_(pattern(kLong, 3)) {}
  void consume(uint64_t offset, std::span<const std::byte> piece) override {
    board_.flags[0].store(1);
    Patience patience(clock_.now());
    while (board_.flags[1].load() == 0 && !patience.is_over(clock_.now()))
      std::this_thread::yield();
    for (int i = 0; i < 20; ++i) {
      if (!std::equal(piece.begin(), piece.end(),
                      expected_.begin() + static_cast<std::ptrdiff_t>(offset)))
        intact.store(false);
    }
  }
  std::atomic<bool> intact{true};

 private:
  SteadyClock clock_;
  Board& board_;
  std::vector<std::byte> expected_;
};

TEST(Together, WhoTakesItsMessageBackWaitsForAllThreads) {
  run_ranks(2, [](Node& node) {
    node.sleepy = false;
    talk(node, 1 - node.rank, 1000);
    if (node.rank == 1) {
      std::byte* data = in_arena(node, pattern(kLong, 3));
      node.channel->send(0, 1, 7, {data, kLong}, 1);
      EXPECT_TRUE(node.until([&] { return node.board.flags[0].load() != 0; }));
      node.board.flags[1].store(1);
      node.channel->abort(Status(Code::kAborted, "test"));
      EXPECT_EQ(node.wait(1).status.message(), "test");
      std::fill_n(data, kLong, std::byte{0xee});
      node.board.flags[2].store(1);
    } else {
      Workers workers(3);
      node.channel->set_workers(&workers);
      Interrupted sink(node.board);
      node.channel->receive(1, 1, 7, {nullptr, &sink, kLong}, 1);
      EXPECT_EQ(node.wait(1).status.code(), Code::kAborted);
      EXPECT_TRUE(sink.intact.load());
      EXPECT_TRUE(node.until([&] { return node.board.flags[2].load() != 0; }));
      node.channel->set_workers(nullptr);
    }
    node.meet();
  });
}

}  // namespace
}  // namespace paceline::wire::shm::testing
