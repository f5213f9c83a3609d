// Messages from rank to rank: matched by peer, tag and order, and refused where the two sides differ.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "engine/engine_test_util.h"

namespace paceline::engine {
namespace {

TEST(Transfers, MatchByPeerAndTagInOrder) {
  Cluster cluster(3);
  std::vector<std::vector<std::byte>> sent;
  std::vector<std::vector<std::byte>> got(6);
  std::mt19937_64 random(5);
  std::vector<std::pair<Rank, OpId>> ids;
  for (std::size_t k = 0; k < 6; ++k) {
    sent.emplace_back(random() % 100000);
    for (auto& x : sent.back()) x = static_cast<std::byte>(random());
    got[k].resize(sent[k].size());
  }
  for (std::size_t k = 0; k < 6; ++k) {
    Transfer t;
    t.peer = 2;
    t.tag = k % 2;
    t.data = sent[k].data();
    t.bytes = sent[k].size();
    ids.emplace_back(0, *cluster[0].send(t, 0));
  }
  for (std::size_t k : {1, 0, 3, 2, 5, 4}) {
    Transfer t;
    t.peer = 0;
    t.tag = k % 2;
    t.data = got[k].data();
    t.bytes = got[k].size();
    ids.emplace_back(2, *cluster[2].receive(t, 0));
  }
  ASSERT_TRUE(cluster.drive([&] {
    for (auto [r, id] : ids) {
      if (cluster[r].outcome(id) == nullptr) return false;
    }
    return true;
  }));
  EXPECT_EQ(got, sent);
}

/// What is said where the first rank sends 100 bytes and the second expects 60.
std::string said_of_lengths(const Transfer& described) {
  Cluster cluster(2);
  std::vector<std::byte> data(100);
  Transfer t = described;
  t.peer = 1;
  t.data = data.data();
  t.bytes = 100;
  auto a = *cluster[0].send(t, 0);
  t.peer = 0;
  t.bytes = 60;
  auto b = *cluster[1].receive(t, 0);
  EXPECT_TRUE(cluster.drive([&] { return cluster[0].outcome(a) && cluster[1].outcome(b); }));
  return cluster[0].health().message();
}

TEST(Transfers, LengthsThatDifferAreNamed) {
  Transfer t;
  t.name = "halo";
  EXPECT_EQ(said_of_lengths(t),
            "message 'halo': rank 0 (host host-a) sends 100 bytes, rank 1 (host host-b) expects 60 "
            "bytes");
  t.shape = "float32 [n]";
  EXPECT_EQ(said_of_lengths(t),
            "message 'halo': rank 0 (host host-a) sends float32 [n] in 100 bytes, rank 1 (host "
            "host-b) expects float32 [n] in 60 bytes");
}

/// Every rank gives each rank as many elements as its number says, and one.
void exchange(Cluster& cluster) {
  const auto ranks = static_cast<std::size_t>(cluster.size());
  std::vector<std::vector<uint8_t>> in(ranks), out(ranks);
  std::vector<OpId> ids;
  for (std::size_t r = 0; r < ranks; ++r) {
    Operation o;
    o.collective = plan::Collective::kAllToAll;
    o.dtype = DType::kUInt8;
    o.send_counts.assign(ranks, r + 1);
    for (std::size_t s = 0; s < ranks; ++s) o.receive_counts.push_back(s + 1);
    in[r].resize(ranks * (r + 1));
    out[r].resize(ranks * (ranks + 1) / 2);
    o.input = in[r].data();
    o.output = out[r].data();
    ids.push_back(*cluster[static_cast<Rank>(r)].submit(o, cluster.now));
  }
  cluster.expect_ok(ids);
}

// The message has the memory in which the engine kept an all-to-all, whose counts are not its own.
TEST(Transfers, HaveNothingOfAnEarlierAllToAll) {
  Cluster cluster(3);
  exchange(cluster);
  std::vector<std::byte> data(100);
  Transfer t;
  t.data = data.data();
  t.bytes = 100;
  t.peer = 0;
  auto a = *cluster[1].send(t, cluster.now);
  t.peer = 1;
  t.bytes = 60;
  auto b = *cluster[0].receive(t, cluster.now);
  ASSERT_TRUE(cluster.drive([&] { return cluster[1].outcome(a) && cluster[0].outcome(b); }));
  EXPECT_EQ(cluster[0].health().message(),
            "message: rank 1 (host host-b) sends 100 bytes, rank 0 (host host-a) expects 60 bytes");
}

// As many bytes, and yet not what the receiver takes them for: both sides hear of it, the sender after the fact.
TEST(Transfers, ShapesThatDifferAreNamed) {
  for (const char* other : {"int32 [5, 5]", "float32 [25]", ""}) {
    Cluster cluster(2);
    std::vector<std::byte> data(100);
    Transfer t;
    t.peer = 0;
    t.data = data.data();
    t.bytes = 100;
    t.shape = "float32 [5, 5]";
    auto a = *cluster[1].send(t, 0);
    t.peer = 1;
    t.shape = other;
    auto b = *cluster[0].receive(t, 0);
    ASSERT_TRUE(cluster.drive([&] { return cluster[1].outcome(a) && cluster[0].outcome(b); }));
    ASSERT_TRUE(cluster.drive([&] { return !cluster[0].health() && !cluster[1].health(); }));
    for (Rank r : {0, 1}) {
      EXPECT_EQ(cluster[r].health().code(), Code::kMismatch);
      EXPECT_EQ(cluster[r].health().message(),
                fmt::format("message: rank 1 (host host-b) sends float32 [5, 5], rank 0 (host "
                            "host-a) expects {}",
                            *other == '\0' ? "100 bytes" : other));
    }
  }
}

}  // namespace
}  // namespace paceline::engine
