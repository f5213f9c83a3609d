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

Status send_long(Pair& pair, bool damage, std::vector<std::byte>& into) {
  const auto data = random_bytes(300000, 2);
  into.assign(data.size(), std::byte{0});
  pair.to.receive(8, 0, {into.data(), nullptr, into.size()}, 4);
  pair.from.send(8, 0, data, 3);
  EXPECT_TRUE(Pair::hand_over(pair.to, pair.from, false));  // the receive is announced
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

}  // namespace
}  // namespace paceline::wire
