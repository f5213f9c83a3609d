// Both ends of the handshake face to face, and each of them facing somebody who does not hold the secret.
#include "wire/handshake.h"

#include <gtest/gtest.h>

#include <array>
#include <random>

namespace paceline::wire {
namespace {

constexpr std::size_t kHeader = 8;
constexpr std::size_t kMac = 32;

Identity identity(Rank rank, std::byte secret = std::byte{0x5C}) {
  Identity i;
  i.secret.assign(16, secret);
  i.job_id = "job";
  i.build = "0.1.0";
  i.piece_bytes = 262144;
  i.rank = rank;
  i.incarnation = 10 + static_cast<uint64_t>(rank);
  i.name = rank == 0 ? "rank 0 (host a)" : "rank 1 (host b)";
  return i;
}

/// A connector (rank 0) and an acceptor (rank 1), up to the connector's proof, which has not been handed over.
struct Meeting {
  Identity caller = identity(0);
  Identity called = identity(1);
  std::vector<std::byte> hello, answer, proof, verdict;
  Handshake connector = Handshake::connector(caller, 1, 0, "rank 1", {}, hello);
  Handshake acceptor = Handshake::acceptor(called);

  Meeting() {
    EXPECT_EQ(acceptor.feed(hello, answer), hello.size());
    EXPECT_EQ(connector.feed(answer, proof), answer.size());
    EXPECT_EQ(proof.size(), kHeader + kMac);
  }
  void expect_refused(std::span<const std::byte> bytes) {
    acceptor.feed(bytes, verdict);
    EXPECT_EQ(acceptor.state(), Handshake::State::kFailed);
    EXPECT_EQ(acceptor.status().code(), Code::kUnauthenticated);
    EXPECT_NE(acceptor.status().message().find("does not hold the secret"), std::string::npos)
        << acceptor.status().message();
  }
};

TEST(Handshake, TwoWhoHoldTheSecretMeet) {
  Meeting m;
  m.acceptor.feed(m.proof, m.verdict);
  ASSERT_EQ(m.acceptor.state(), Handshake::State::kProven);
  EXPECT_EQ(m.acceptor.peer(), 0);
  EXPECT_EQ(m.acceptor.incarnation(), 10U);
  m.acceptor.accept(3, m.verdict);
  std::vector<std::byte> nothing;
  m.connector.feed(m.verdict, nothing);
  EXPECT_EQ(m.connector.state(), Handshake::State::kDone);
  EXPECT_EQ(m.connector.count(), 3U);
  EXPECT_TRUE(nothing.empty());
}

TEST(Handshake, ACallerWithoutTheSecretIsRefusedWhateverItSends) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 50; ++round) {
    Meeting flipped;
    const std::size_t bit = random() % (kMac * 8);
    flipped.proof[kHeader + bit / 8] ^= std::byte{static_cast<uint8_t>(1U << (bit % 8))};
    flipped.expect_refused(flipped.proof);
    Meeting guessed;
    for (std::size_t i = kHeader; i < guessed.proof.size(); ++i)
      guessed.proof[i] = static_cast<std::byte>(random());
    guessed.expect_refused(guessed.proof);
  }
  Meeting shorter;
  shorter.proof[6] = std::byte{0};  // the body's length
  shorter.expect_refused(std::span(shorter.proof).first(kHeader));
}

TEST(Handshake, ProofsCantBePlayedBack) {
  // The acceptor's own proof, and that of another connection.
  Meeting mirrored;
  std::copy(mirrored.answer.end() - kMac, mirrored.answer.end(), mirrored.proof.begin() + kHeader);
  mirrored.expect_refused(mirrored.proof);
  Meeting before;
  Meeting now;
  now.expect_refused(before.proof);
}

TEST(Handshake, ACallerGivesNothingToWhoDoesNotHoldTheSecret) {
  const Identity caller = identity(0);
  const Identity stranger = identity(1, std::byte{0x5D});
  std::vector<std::byte> hello;
  std::vector<std::byte> answer;
  std::vector<std::byte> proof;
  auto connector = Handshake::connector(caller, 1, 0, "rank 1", {}, hello);
  auto acceptor = Handshake::acceptor(stranger);
  acceptor.feed(hello, answer);
  connector.feed(answer, proof);
  EXPECT_EQ(connector.state(), Handshake::State::kFailed);
  EXPECT_EQ(connector.status().code(), Code::kUnauthenticated);
  EXPECT_TRUE(proof.empty());
}

}  // namespace
}  // namespace paceline::wire
