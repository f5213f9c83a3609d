#include "bootstrap/key_rows.h"

#include <gtest/gtest.h>

#include "bootstrap/kv.h"

namespace paceline::bootstrap {
namespace {

KeyValues some() {
  return {{"address 0", "10.0.0.1:4711"},
          {"", ""},
          {std::string(kKeyLimit, 'k'), std::string(kValueLimit, '\0')}};
}

TEST(KeyRows, RowsOfSeveralRanksAreReadInTheirOrder) {
  auto rows = encode_row(some());
  const auto second = encode_row({{"address 1", "[::1]:80"}});
  rows.insert(rows.end(), second.begin(), second.end());
  auto expected = some();
  expected.emplace_back("address 1", "[::1]:80");
  const auto read = parse_rows(rows);
  ASSERT_TRUE(read) << read.status().message();
  EXPECT_EQ(*read, expected);
}

TEST(KeyRows, NothingIsNoPairs) {
  EXPECT_TRUE(encode_row({}).empty());
  const auto read = parse_rows({});
  ASSERT_TRUE(read);
  EXPECT_TRUE(read->empty());
}

TEST(KeyRows, ARowCutWithinAPairIsRefused) {
  const KeyValues pair{{"key", "value"}};
  const auto row = encode_row(pair);
  for (size_t n = 1; n < row.size(); ++n) {
    const auto read = parse_rows(std::span(row).first(n));
    EXPECT_EQ(read.status().code(), Code::kCorrupted) << n;
  }
}

TEST(KeyRows, WhatIsLongerThanTheLimitsIsRefused) {
  EXPECT_EQ(parse_rows(encode_row({{std::string(kKeyLimit + 1, 'k'), ""}})).status().code(),
            Code::kCorrupted);
  EXPECT_EQ(parse_rows(encode_row({{"k", std::string(kValueLimit + 1, 'v')}})).status().code(),
            Code::kCorrupted);
}

}  // namespace
}  // namespace paceline::bootstrap
