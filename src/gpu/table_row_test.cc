// Rows of the table by which the ranks of a path know each other: nothing in them is taken for granted.
#include "gpu/table_row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace paceline::gpu {
namespace {

TableRow row_of(int node, int local_rank, int local_size = 2) {
  TableRow row;
  row.node = node;
  row.local_rank = local_rank;
  row.local_size = local_size;
  return row;
}

std::vector<TableRow> table(int nodes, int local_size) {
  std::vector<TableRow> rows;
  for (int node = 0; node < nodes; ++node)
    for (int local = 0; local < local_size; ++local)
      rows.push_back(row_of(node, local, local_size));
  return rows;
}

TEST(TableRow, ComesBackAsItWas) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    auto any = [&] { return static_cast<int>(random()); };
    TableRow sent{any(), any(), any(), any(), any(), (uint64_t{random()} << 32) | random(),
                  any(), any(), ""};
    for (auto length = random() % 50; length > 0; --length)
      sent.message += static_cast<char>(random() % 256);
    const auto got = TableRow::parse(sent.text(1024));
    ASSERT_TRUE(got) << got.status().message();
    EXPECT_EQ(got->text(1024), sent.text(1024));
    EXPECT_EQ(got->message, sent.message);
    EXPECT_EQ(got->piece_bytes, sent.piece_bytes);
    EXPECT_EQ(got->wire_threads, sent.wire_threads);
  }
}

TEST(TableRow, LongMessagesAreCut) {
  TableRow row{std::numeric_limits<int>::min(), -1, -1, -1, -1, ~uint64_t{0}, -1, -1,
               std::string(5000, 'x')};
  EXPECT_LE(row.text(1024).size(), 1024U);
  EXPECT_GT(row.text(1024).size(), 900U);
}

TEST(TableRow, WhatCantBeReadIsRefused) {
  const std::string good = row_of(1, 0).text(1024);
  ASSERT_TRUE(TableRow::parse(good));
  for (size_t length = 0; length + 1 < good.size(); ++length)
    EXPECT_FALSE(TableRow::parse(good.substr(0, length))) << length;
  for (const char* bad :
       {"0 1 2 3 4 5 6 99999999999\n", "0 1 2 3 4 -5 6 7\n", "0 1 2 3 4 5 6 7",
        " 0 1 2 3 4 5 6 7\n", "0,1 2 3 4 5 6 7\n", "0 1 2 3 4 18446744073709551616 6 7\n"})
    EXPECT_EQ(TableRow::parse(bad).status().code(), Code::kInternal) << bad;
  std::mt19937 random(2);
  for (int i = 0; i < 20000; ++i) {  // neither crashes nor reads beyond the end
    std::string text = good;
    for (auto changes = 1 + random() % 4; changes > 0; --changes)
      text[random() % text.size()] = static_cast<char>(random() % 256);
    const auto got = TableRow::parse(text);
    EXPECT_TRUE(got || got.status().code() == Code::kInternal);
  }
}

TEST(Places, EachIsTakenOnce) {
  for (int nodes : {1, 2, 3})
    for (int local : {1, 2, 4}) EXPECT_TRUE(check_places(table(nodes, local), nodes, local));
  auto other_order = table(3, 2);
  std::shuffle(other_order.begin(), other_order.end(), std::mt19937(3));
  EXPECT_TRUE(check_places(other_order, 3, 2));
}

TEST(Places, OfNobodyAreRefused) {
  constexpr int kFar = std::numeric_limits<int>::max();
  for (auto [node, local_rank] :
       {std::pair(-1, 0), {2, 0}, {0, -1}, {0, 2}, {kFar, 0}, {1, kFar}, {-kFar, -kFar}}) {
    auto rows = table(2, 2);
    rows[3].node = node;
    rows[3].local_rank = local_rank;
    const Status status = check_places(rows, 2, 2);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find("rank 3 "), std::string::npos) << status.message();
  }
  auto twice = table(2, 2);
  twice[3] = twice[1];
  EXPECT_NE(check_places(twice, 2, 2).message().find("ranks 1 and 3"), std::string::npos);
  EXPECT_EQ(check_places(table(2, 2), 3, 2).code(), Code::kInternal);
  EXPECT_EQ(check_places(table(2, 2), 4, 2).code(), Code::kInternal);
  EXPECT_EQ(check_places(table(2, 2), 0, 2).code(), Code::kInternal);
}

TEST(Places, NodesOfOtherSizesAreNamed) {
  auto rows = table(2, 2);
  rows[2].local_size = 4;
  const Status status = check_places(rows, 2, 2);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("rank 2 is one of 4"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace paceline::gpu
