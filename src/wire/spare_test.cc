// A piece's memory goes from hand to hand, and not beyond what pieces need of late.
#include "wire/spare.h"

#include <gtest/gtest.h>

namespace paceline::wire {
namespace {

TEST(Spare, OneBufferGoesRound) {
  Spare spare;
  std::vector<std::byte> first = spare.take(1000);
  EXPECT_EQ(first.size(), 1000U);
  const std::byte* const at = first.data();
  spare.give_back(std::move(first), 1000);
  std::vector<std::byte> again = spare.take(600);
  EXPECT_EQ(again.data(), at);
  const std::vector<std::byte> beside = spare.take(600);
  EXPECT_NE(beside.data(), at);
  spare.give_back(std::move(again), 600);
  const std::vector<std::byte> longer = spare.take(1001);
  EXPECT_EQ(longer.size(), 1001U);
  EXPECT_NE(longer.data(), at);
}

TEST(Spare, TheLongerOfTwoIsKept) {
  Spare spare;
  std::vector<std::byte> large = spare.take(1000);
  std::vector<std::byte> small = spare.take(600);
  const std::byte* const at = large.data();
  spare.give_back(std::move(large), 1000);
  spare.give_back(std::move(small), 600);
  EXPECT_EQ(spare.take(1).data(), at);
}

TEST(Spare, WhatLongPiecesNeededIsFreedWhenNoneComeForLong) {
  Spare spare;
  spare.give_back(spare.take(100'000), 100'000);
  // Shorter ones between, such as a message's last, change nothing.
  for (int i = 0; i < 200; ++i) {
    std::vector<std::byte> memory = spare.take(10);
    ASSERT_EQ(memory.size(), 100'000U) << i;
    spare.give_back(std::move(memory), i % 60 == 0 ? 100'000 : 10);
  }
  for (int i = 0; i < 200; ++i) spare.give_back(spare.take(10), 10);
  EXPECT_EQ(spare.take(10).size(), 10U);
}

}  // namespace
}  // namespace paceline::wire
