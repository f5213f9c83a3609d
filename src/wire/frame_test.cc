#include "wire/frame.h"

#include <gtest/gtest.h>

#include <array>
#include <random>

#include "base/crc32c.h"
#include "wire/channel.h"

namespace paceline::wire {
namespace {

using Bytes = std::array<std::byte, kFrameHeader>;

Bytes encoded(const Frame& f) {
  Bytes b;
  encode_frame(f, b);
  return b;
}

Frame piece() {
  Frame f;
  f.type = FrameType::kPiece;
  f.length = 4096;
  f.digest = 0xDEADBEEF;
  f.tag = 0x1122334455667788;
  f.message = 0x99AABBCCDDEEFF00;
  f.position = 6ULL << 30;  // beyond 4 GiB
  f.total = (6ULL << 30) + 8192;
  f.acknowledged = 77;
  f.freed = 88;
  f.sum = 99;
  f.has_sum = true;
  return f;
}

TEST(Frame, RoundTrip) {
  auto back = decode_frame(encoded(piece()));
  ASSERT_TRUE(back.is_ok());
  EXPECT_EQ(back->type, FrameType::kPiece);
  EXPECT_EQ(back->length, 4096U);
  EXPECT_EQ(back->digest, 0xDEADBEEF);
  EXPECT_EQ(back->tag, 0x1122334455667788U);
  EXPECT_EQ(back->message, 0x99AABBCCDDEEFF00U);
  EXPECT_EQ(back->position, 6ULL << 30);
  EXPECT_EQ(back->total, (6ULL << 30) + 8192);
  EXPECT_EQ(back->acknowledged, 77U);
  EXPECT_EQ(back->freed, 88U);
  EXPECT_EQ(back->sum, 99U);
  EXPECT_TRUE(back->has_sum);
}

TEST(Frame, EveryFlippedBitIsFound) {
  Bytes good = encoded(piece());
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    EXPECT_EQ(decode_frame(bad).status().code(), Code::kCorrupted) << bit;
  }
}

TEST(Frame, RangesAreChecked) {
  auto refuses = [](auto&& change) {
    Frame f = piece();
    change(f);
    return !decode_frame(encoded(f)).is_ok();
  };
  EXPECT_TRUE(refuses([](Frame& f) { f.length = 0; }));
  EXPECT_TRUE(refuses([](Frame& f) {
    f.length = kMaxPiece + 64;
    f.total = UINT64_MAX;
  }));
  EXPECT_TRUE(refuses([](Frame& f) { f.position = UINT64_MAX - 63; }));
  EXPECT_TRUE(refuses([](Frame& f) { f.total = f.position + 4095; }));
  EXPECT_TRUE(refuses([](Frame& f) { f.position += 1; }));
  EXPECT_TRUE(refuses([](Frame& f) { f.length = 100; }));
  EXPECT_FALSE(refuses([](Frame& f) {
    f.length = 100;
    f.total = f.position + 100;
  }));
  EXPECT_TRUE(refuses([](Frame& f) { f.type = static_cast<FrameType>(99); }));
  EXPECT_TRUE(refuses([](Frame& f) {
    f.type = FrameType::kNote;
    f.length = kNoteLimit + 1;
  }));
  EXPECT_TRUE(refuses([](Frame& f) {
    f.type = FrameType::kEager;
    f.length = 5;
    f.total = 6;
  }));
  EXPECT_TRUE(refuses([](Frame& f) {
    f.type = FrameType::kDone;
    f.length = 5;
  }));
}

}  // namespace
}  // namespace paceline::wire
