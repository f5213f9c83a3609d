// Parts of a node's link by what waits: how they are dealt, and that the pump tells its wires.
#include "gpu/link_share.h"

#include <array>
#include <atomic>
#include <random>
#include <thread>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kMegabyte = 1U << 20;

/// The ranks of a node, who deal at the same time.
class Ranks {
 public:
  Ranks(int ranks, int wires) : wires_(wires) {
    auto made = NodePage::make(ranks);
    EXPECT_TRUE(made.is_ok()) << made.status().message();
    page_ = std::make_unique<NodePage>(std::move(*made));
    for (int r = 0; r < ranks; ++r) {
      shares_.emplace_back(page_.get(), r, ranks, wires);
      parts_.emplace_back(static_cast<size_t>(wires), 1.0);
    }
  }
  /// waiting: by rank and wire. Their parts when all have told and dealt, also where nothing has changed.
  std::vector<std::vector<double>> deal(const std::vector<std::vector<uint64_t>>& waiting) {
    for (int pass = 0; pass < 2; ++pass) {  // in the first one some have not told yet
      now_ += LinkShare::kEvery;
      for (size_t r = 0; r < shares_.size(); ++r) {
        const auto given = shares_[r].deal(waiting[r], now_);
        if (!given.empty()) parts_[r].assign(given.begin(), given.end());
      }
    }
    return parts_;
  }
  [[nodiscard]] int wires() const { return wires_; }
  [[nodiscard]] size_t size() const { return shares_.size(); }

 private:
  int wires_;
  Time now_ = kSecond;
  std::unique_ptr<NodePage> page_;
  std::vector<LinkShare> shares_;
  std::vector<std::vector<double>> parts_;
};

TEST(LinkShare, PartsAreEvenWhereAllHaveAsMuchToSend) {
  Ranks ranks(2, 2);
  using Parts = std::vector<std::vector<double>>;
  const Parts even(2, {1.0, 1.0});
  EXPECT_EQ(ranks.deal({{0, 0}, {0, 0}}), even);
  EXPECT_EQ(ranks.deal({{kMegabyte, kMegabyte}, {kMegabyte, kMegabyte}}), even);
  // Changes too small to be worth a call.
  EXPECT_EQ(ranks.deal({{kMegabyte, kMegabyte}, {kMegabyte, kMegabyte + kMegabyte / 20}}), even);
}

TEST(LinkShare, WhoHasMoreSendsFasterAndWhoIsAloneHasTheLink) {
  Ranks ranks(2, 2);
  auto parts = ranks.deal({{30 * kMegabyte, 30 * kMegabyte}, {10 * kMegabyte, 10 * kMegabyte}});
  EXPECT_DOUBLE_EQ(parts[0][0], 1.5);
  EXPECT_DOUBLE_EQ(parts[1][1], 0.5);
  parts = ranks.deal({{30 * kMegabyte, 10 * kMegabyte}, {10 * kMegabyte, 10 * kMegabyte}});
  EXPECT_DOUBLE_EQ(parts[0][0], 2.0);
  EXPECT_DOUBLE_EQ(parts[0][1], 2.0 / 3);
  parts = ranks.deal({{kMegabyte, kMegabyte}, {0, 0}});
  EXPECT_DOUBLE_EQ(parts[0][0], 2.0);
  parts = ranks.deal({{0, 0}, {0, 0}});
  EXPECT_DOUBLE_EQ(parts[0][0], 1.0);
}

// Of a thousandth of what others have nothing is left to wait for.
TEST(LinkShare, WhatIsShortIsNotStretchedToTheTimeOfAllElse) {
  Ranks ranks(2, 1);
  const auto parts = ranks.deal({{1000 * kMegabyte}, {kMegabyte}});
  EXPECT_DOUBLE_EQ(parts[1][0], 2.0 / (1 + LinkShare::kLeastOfMost));
}

// Whatever waits, the link is dealt once.
TEST(LinkShare, PartsAddUpToTheLink) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    Ranks ranks(1 + static_cast<int>(random() % 8), 1 + static_cast<int>(random() % kMostWires));
    const size_t count = ranks.size();
    std::vector<std::vector<uint64_t>> waiting(count);
    double senders = 0;
    for (auto& one : waiting) {
      one.resize(static_cast<size_t>(ranks.wires()));
      for (auto& bytes : one) {
        bytes = random() % 3 == 0 ? 0 : 1 + random() % (100 * kMegabyte);
        senders += bytes > 0 ? 1 : 0;
      }
    }
    const auto parts = ranks.deal(waiting);
    double sum = 0;
    for (size_t r = 0; r < count; ++r) {
      for (size_t w = 0; w < parts[r].size(); ++w) sum += waiting[r][w] > 0 ? parts[r][w] : 0;
    }
    // Each may differ by the eighth that is not worth a call.
    const auto all = static_cast<double>(count) * ranks.wires();
    if (senders > 0) {
      EXPECT_NEAR(sum, all, all / 7) << round;
    }
  }
}

// It may be in another container, and send all the same.
TEST(LinkShare, ARankThatTellsNothingKeepsItsPart) {
  auto page = NodePage::make(2);
  ASSERT_TRUE(page.is_ok()) << page.status().message();
  LinkShare share(&*page, 0, 2, 2);
  const std::array waiting{3 * kMegabyte, kMegabyte};
  const auto parts = share.deal(waiting, kSecond);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_DOUBLE_EQ(parts[0], 1.5);
  EXPECT_DOUBLE_EQ(parts[1], 0.5);
}

TEST(LinkShare, IsDealtAnewAfterAWhileOnly) {
  LinkShare share(nullptr, 0, 1, 2);
  EXPECT_FALSE(share.deal(std::array{3 * kMegabyte, kMegabyte}, kSecond).empty());
  EXPECT_TRUE(share.deal(std::array{kMegabyte, 3 * kMegabyte}, kSecond + 1).empty());
  EXPECT_FALSE(
      share.deal(std::array{kMegabyte, 3 * kMegabyte}, kSecond + LinkShare::kEvery).empty());
}

/// A channel that carries nothing and remembers how fast it may.
class RememberedRate final : public wire::Channel {
 public:
  explicit RememberedRate(std::atomic<uint64_t>& rate) : rate_(rate) {}
  void limit_rate(uint64_t bytes_per_second) override { rate_ = bytes_per_second; }

  void send(Rank, wire::Tag, uint32_t, std::span<const std::byte>, uint64_t) override {}
  void receive(Rank, wire::Tag, uint32_t, wire::Inbox, uint64_t) override {}
  void post_note(Rank, std::span<const std::byte>) override {}
  bool progress(Time, wire::Events&) override { return false; }
  [[nodiscard]] Time next_timer() const override { return kSecond; }
  [[nodiscard]] int poll_fd() const override { return -1; }
  bool prepare_wait() override { return true; }
  void wake() override {}
  void drop_peer(Rank, const Status&) override {}
  void abort(const Status&) override {}
  [[nodiscard]] wire::Counters counters() const override { return {}; }
  [[nodiscard]] std::string describe() const override { return "none"; }

 private:
  std::atomic<uint64_t>& rate_;
};

// What rank 0 sends is held up: it gets what rank 1, which is through, does not need.
TEST(LinkShare, ThePumpTellsItsWires) {
  constexpr uint64_t kEven = 1000;
  constexpr uint64_t kCount = 50021;
  setenv("PACELINE_LINK_RATE", "25", 1);
  Cluster cluster({.nodes = 2, .local_size = 2});
  std::array<std::atomic<uint64_t>, 4> rates{};
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    cluster.comm(r)->even_rate = kEven;
    cluster.comm(r)->job->channel = std::make_unique<RememberedRate>(rates[static_cast<size_t>(r)]);
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4).is_ok());
    Tensor tensor(cluster, r, kCount * sizeof(float));
    std::fill_n(tensor.as<float>(), kCount, 1.0F);
    AllReduce a;
    a.data = tensor.address();
    a.count = kCount;
    a.codec = 1;
    std::jthread lets_go;
    if (r == 0) {
      cluster.network().hold_between(0, 2);
      lets_go = std::jthread([&] {
        while (rates[0] != 2 * kEven) std::this_thread::yield();
        cluster.network().hold_between(0, 2, false);
      });
    }
    carry(cluster, path, a);
    EXPECT_EQ(tensor.as<float>()[kCount - 1], 4.0F);
    EXPECT_TRUE(path.destroy().is_ok());
  });
  unsetenv("PACELINE_LINK_RATE");
}

}  // namespace
}  // namespace paceline::gpu
