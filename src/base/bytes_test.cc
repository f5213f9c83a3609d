#include "base/bytes.h"

#include <gtest/gtest.h>

namespace paceline {
namespace {

TEST(Bytes, TextIsShortenedByWholeCharacters) {
  EXPECT_EQ(shortened("bucket 3", 8), "bucket 3");
  EXPECT_EQ(shortened("bucket 3", 6), "bucket");
  EXPECT_EQ(shortened("", 0), "");
  const std::string text = "a×…😀";  // 1, 2, 3 and 4 bytes
  const std::size_t ends[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 10};
  for (std::size_t limit = 0; limit < std::size(ends); ++limit)
    EXPECT_EQ(shortened(text, limit), text.substr(0, ends[limit])) << limit;
  // What is no UTF-8 leaves nothing rather than half of something.
  EXPECT_EQ(shortened("\x80\x80\x80", 2), "");
}

}  // namespace
}  // namespace paceline
