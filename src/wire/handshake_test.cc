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

/// A connector (rank 0) that called, an acceptor that took its hello and answered, and what the connector says to that.
struct Call {
  std::vector<std::byte> hello, answer, reply;
  Handshake connector, acceptor;

  Call(const Identity& caller, const Identity& called)
      : connector(Handshake::connector(caller, 1, 0, "rank 1", {}, hello)),
        acceptor(Handshake::acceptor(called)) {
    acceptor.feed(hello, answer);
    connector.feed(answer, reply);
  }
};

TEST(Handshake, ACallerGivesNothingToWhoDoesNotHoldTheSecret) {
  const Call call(identity(0), identity(1, std::byte{0x5D}));
  EXPECT_EQ(call.connector.state(), Handshake::State::kFailed);
  EXPECT_EQ(call.connector.status().code(), Code::kUnauthenticated);
  EXPECT_TRUE(call.reply.empty());
}

void expect_versions_named(const Handshake& side, uint32_t ours, uint32_t theirs) {
  EXPECT_EQ(side.state(), Handshake::State::kFailed);
  EXPECT_EQ(side.status().code(), Code::kMismatch);
  EXPECT_TRUE(side.is_final());
  const auto& text = side.status().message();
  for (auto version : {ours, theirs})
    EXPECT_NE(text.find("(wire version " + std::to_string(version) + ")"), std::string::npos)
        << text;
  EXPECT_NE(text.find("install the same version everywhere"), std::string::npos) << text;
}

TEST(Handshake, ACallerOfAnotherWireVersionIsRefusedAndToldBoth) {
  std::mt19937 random(12);
  Identity caller = identity(0);
  const Identity called = identity(1);
  caller.wire_version = called.wire_version + 1 + random() % 1000;
  const Call call(caller, called);
  expect_versions_named(call.acceptor, called.wire_version, caller.wire_version);
  expect_versions_named(call.connector, caller.wire_version, called.wire_version);
  EXPECT_TRUE(call.reply.empty());
}

// A later version's fields may stand elsewhere: only the version and the build are read of such a hello.
TEST(Handshake, TheRestOfAnotherVersionsHelloIsNotRead) {
  std::vector<std::byte> refusal;
  const Identity called = identity(1);
  auto acceptor = Handshake::acceptor(called);
  std::vector<std::byte> hello;
  Identity caller = identity(0);
  caller.wire_version = 7;
  Handshake::connector(caller, 1, 0, "rank 1", {}, hello);
  hello.resize(kHeader + sizeof caller.wire_version + sizeof(uint32_t) + caller.build.size());
  hello[6] = static_cast<std::byte>(hello.size() - kHeader);  // the body's length
  hello[7] = std::byte{0};
  acceptor.feed(hello, refusal);
  expect_versions_named(acceptor, called.wire_version, caller.wire_version);
}

TEST(Handshake, AnAnswerOfAnotherVersionIsRefusedBeforeAnythingIsProven) {
  const Identity caller = identity(0);
  for (bool build : {false, true}) {
    Identity called = identity(1);
    if (build) {
      called.build = "0.9.9";
    } else {
      called.wire_version = 3;
    }
    // One of that version takes the hello of its like, and answers this one.
    Identity like = called;
    like.rank = caller.rank;
    std::vector<std::byte> hello;
    std::vector<std::byte> other_hello;
    std::vector<std::byte> answer;
    std::vector<std::byte> proof;
    auto connector = Handshake::connector(caller, 1, 0, "rank 1", {}, hello);
    Handshake::connector(like, 1, 0, "rank 1", {}, other_hello);
    auto acceptor = Handshake::acceptor(called);
    acceptor.feed(other_hello, answer);
    connector.feed(answer, proof);
    expect_versions_named(connector, caller.wire_version, called.wire_version);
    for (const auto& version : {caller.build, called.build})
      EXPECT_NE(connector.status().message().find("paceline " + version), std::string::npos);
    EXPECT_TRUE(proof.empty());
  }
}

TEST(Handshake, ACallerOfAnotherBuildIsRefusedAndToldBoth) {
  Identity caller = identity(0);
  const Identity called = identity(1);
  caller.build = "0.9.9";
  const Call call(caller, called);
  for (const auto* side : {&call.acceptor, &call.connector}) {
    EXPECT_EQ(side->status().code(), Code::kMismatch);
    for (const auto& version : {caller.build, called.build})
      EXPECT_NE(side->status().message().find("paceline " + version), std::string::npos)
          << side->status().message();
  }
}

}  // namespace
}  // namespace paceline::wire
