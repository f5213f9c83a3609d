// Two sessions that hand their frames to each other directly: what each makes of a payload that changed on its way.
#include "wire/protocol.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>

namespace paceline::wire {
namespace {

std::vector<std::byte> random_bytes(std::size_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> out(n);
  for (auto& b : out) b = static_cast<std::byte>(random());
  return out;
}

struct Pair {
  Shared a, b;
  Session from{a, 1, "rank 1"};
  Session to{b, 0, "rank 0"};

  explicit Pair(bool sums) { a.options.payload_sum = b.options.payload_sum = sums; }

  /// Hands over the sequenced frames of `out`; `damage` flips a bit of each payload.
  static Status hand_over(Session& out, Session& in, bool damage) {
    std::vector<std::byte> bytes;
    while (out.pull_control(bytes)) {
      auto frame = decode_frame(std::span<const std::byte>(bytes).first<kFrameHeader>());
      if (!frame) return frame.status();
      if (damage && frame->length > 0) bytes[kFrameHeader + frame->length / 2] ^= std::byte{4};
      auto status = in.take_control(*frame, std::span(bytes).subspan(kFrameHeader, frame->length));
      if (!status) return status;
      bytes.clear();
    }
    return Status::ok();
  }
};

Status send_short(Pair& pair, bool damage, std::vector<std::byte>& into) {
  const auto data = random_bytes(1000, 1);
  into.assign(1000, std::byte{0});
  pair.to.receive(7, 0, {into.data(), nullptr, into.size()}, 2);
  pair.from.send(7, 0, data, 1);
  auto status = Pair::hand_over(pair.from, pair.to, damage);
  if (status) {
    EXPECT_EQ(into == data, !damage);
  }
  return status;
}

/// Posts a long message and its receive, which is announced; returns what is to be sent.
std::vector<std::byte> begin_long(Pair& pair, std::size_t bytes, std::vector<std::byte>& into) {
  auto data = random_bytes(bytes, 2);
  into.assign(bytes, std::byte{0});
  pair.to.receive(8, 0, {into.data(), nullptr, into.size()}, 4);
  pair.from.send(8, 0, data, 3);
  EXPECT_TRUE(Pair::hand_over(pair.to, pair.from, false));
  return data;
}

Status send_long(Pair& pair, bool damage, std::vector<std::byte>& into) {
  const auto data = begin_long(pair, 300'000, into);
  Piece piece;
  while (pair.from.pull_piece(0, piece)) {
    auto place = pair.to.place(piece.frame);
    EXPECT_EQ(place.kind, Placement::Kind::kBuffer);
    std::memcpy(place.at, piece.data, piece.frame.length);
    if (damage) place.at[piece.frame.length / 2] ^= std::byte{4};
    auto status = pair.to.placed(piece.frame, {});
    pair.from.piece_written(piece);
    if (!status) return status;
  }
  EXPECT_EQ(into == data, !damage);
  return Status::ok();
}

TEST(Protocol, PayloadsArriveWithAndWithoutTheirSums) {
  for (const bool sums : {false, true}) {
    Pair pair(sums);
    std::vector<std::byte> into;
    EXPECT_TRUE(send_short(pair, false, into));
    EXPECT_TRUE(send_long(pair, false, into));
    EXPECT_EQ(pair.b.events.completions.size(), 2U);
  }
}

TEST(Protocol, ADamagedPayloadIsRefusedWhereSumsAreAskedFor) {
  std::vector<std::byte> into;
  Pair one(true);
  EXPECT_EQ(send_short(one, true, into).code(), Code::kCorrupted);
  EXPECT_TRUE(one.b.events.completions.empty());
  Pair other(true);
  EXPECT_EQ(send_long(other, true, into).code(), Code::kCorrupted);
  EXPECT_TRUE(other.b.events.completions.empty());
}

// A flow broke whose pieces had come, one of them is half written again, and then the receiver's word is heard.
TEST(Protocol, AMessageThatIsDoneAmidARepeatEndsWithTheRepeat) {
  Pair pair(false);
  std::vector<std::byte> into;
  const auto data = begin_long(pair, 1'000'000, into);
  Piece piece;
  while (pair.from.pull_piece(0, piece)) {
    auto place = pair.to.place(piece.frame);
    std::memcpy(place.at, piece.data, piece.frame.length);
    ASSERT_TRUE(pair.to.placed(piece.frame, {}));
    pair.from.piece_written(piece);
  }
  ASSERT_EQ(into, data);
  pair.from.flow_broken(0);
  ASSERT_TRUE(pair.from.pull_piece(1, piece));
  EXPECT_TRUE(Pair::hand_over(pair.to, pair.from, false));
  EXPECT_TRUE(pair.a.events.completions.empty());  // the flow still reads it
  Piece other;
  EXPECT_FALSE(pair.from.pull_piece(2, other));  // and no more is repeated
  pair.from.piece_written(piece);
  ASSERT_EQ(pair.a.events.completions.size(), 1U);
  EXPECT_TRUE(pair.a.events.completions[0].status.is_ok());
  EXPECT_FALSE(pair.from.has_pieces());
}

TEST(Protocol, AMessageIsNotDoneWhileAPieceLeavesForTheFirstTime) {
  Pair pair(false);
  std::vector<std::byte> into;
  const auto data = begin_long(pair, 200'000, into);
  Piece piece;
  ASSERT_TRUE(pair.from.pull_piece(0, piece));
  Frame done;
  done.type = FrameType::kDone;
  done.message = piece.frame.message;
  done.position = 2;
  EXPECT_EQ(pair.from.take_control(done, {}).code(), Code::kCorrupted);
  EXPECT_TRUE(pair.a.events.completions.empty());
}

// What the peer waits for needs no credit for its sake, but each copy takes memory here until it is acknowledged.
TEST(Protocol, ShortMessagesBeyondTheBudgetTravelWithoutACopy) {
  for (const bool announced : {false, true}) {
    Pair pair(false);
    const std::size_t bytes = pair.a.options.eager_limit;
    const std::size_t count = 3 * pair.a.options.eager_budget / bytes;
    std::vector<std::vector<std::byte>> data, into;
    for (std::size_t i = 0; i < count; ++i) {
      data.push_back(random_bytes(bytes, i));
      into.emplace_back(bytes + 64);
    }
    const auto receive = [&](std::size_t i, std::size_t capacity) {
      pair.to.receive(i, 0, {into[i].data(), nullptr, capacity}, 100 + i);
    };
    if (announced) {  // by a receive that would take a long one
      for (std::size_t i = 0; i < count; ++i) receive(i, bytes + 64);
      ASSERT_TRUE(Pair::hand_over(pair.to, pair.from, false));
    }
    for (std::size_t i = 0; i < count; ++i) pair.from.send(i, 0, data[i], i);
    if (!announced) {
      for (std::size_t i = 0; i < count; ++i) receive(i, bytes);
    }
    // What leaves before any acknowledgement are the copies.
    std::vector<std::byte> frames;
    while (pair.from.pull_control(frames)) {
    }
    EXPECT_GT(frames.size(), bytes);
    EXPECT_LE(frames.size(), pair.a.options.eager_budget + count * kFrameHeader);
    pair.from.rewind_control();
    std::size_t in_pieces = 0;
    for (int turn = 0; turn < 3; ++turn) {  // offers; what answers them; what they were for
      ASSERT_TRUE(Pair::hand_over(pair.from, pair.to, false));
      ASSERT_TRUE(Pair::hand_over(pair.to, pair.from, false));
      Piece piece;
      while (pair.from.pull_piece(0, piece)) {
        const auto place = pair.to.place(piece.frame);
        ASSERT_EQ(place.kind, Placement::Kind::kBuffer);
        std::memcpy(place.at, piece.data, piece.frame.length);
        ASSERT_TRUE(pair.to.placed(piece.frame, {}));
        pair.from.piece_written(piece);
        in_pieces += piece.frame.length;
      }
    }
    EXPECT_GE(in_pieces, count * bytes - 2 * pair.a.options.eager_budget);
    EXPECT_EQ(pair.a.events.completions.size(), count);
    EXPECT_EQ(pair.b.events.completions.size(), count);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_TRUE(std::equal(data[i].begin(), data[i].end(), into[i].begin())) << i;
    }
  }
}

TEST(Protocol, WhatWasRefusedIsRefusedAgainAfterAReconnect) {
  Pair pair(false);
  const auto data = random_bytes(100, 5);
  pair.from.send(7, 0, data, 1);
  pair.from.send(7, 0, data, 2);
  EXPECT_EQ(Pair::hand_over(pair.from, pair.to, false).code(), Code::kCorrupted);  // one tag
  pair.from.control_lost();
  pair.from.control_regained();
  EXPECT_EQ(Pair::hand_over(pair.from, pair.to, false).code(), Code::kCorrupted);
}

TEST(Protocol, WithoutAConnectionNoTimerAsksForAnAcknowledgement) {
  Pair pair(false);
  const auto data = random_bytes(100, 6);
  pair.from.send(7, 0, data, 1);
  ASSERT_TRUE(Pair::hand_over(pair.from, pair.to, false));
  const Time due = pair.to.next_timer();
  EXPECT_LE(due, pair.b.options.acknowledge_after);
  pair.to.control_lost();
  EXPECT_GT(pair.to.next_timer(), pair.b.options.acknowledge_after);
  pair.to.control_regained();
  EXPECT_EQ(pair.to.next_timer(), due);
}

TEST(Protocol, WhatWasCancelledLeavesNothingToSend) {
  Pair pair(false);
  std::vector<std::byte> into;
  const auto data = begin_long(pair, 1'000'000, into);
  ASSERT_TRUE(pair.from.has_pieces());
  pair.from.cancel_all({Code::kAborted, "a test"});
  EXPECT_FALSE(pair.from.has_pieces());
}

}  // namespace
}  // namespace paceline::wire
