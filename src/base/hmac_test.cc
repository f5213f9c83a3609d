#include "base/hmac.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace paceline {
namespace {

std::string hex(std::span<const std::byte> data) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (auto b : data) {
    text += digits[static_cast<int>(b) >> 4];
    text += digits[static_cast<int>(b) & 15];
  }
  return text;
}
std::span<const std::byte> text(std::string_view s) { return std::as_bytes(std::span(s)); }

// RFC 4231, test cases 1, 2 and 6 (a key longer than the block).
TEST(Hmac, VectorsOfRfc4231) {
  std::vector<std::byte> key(20, std::byte{0x0b});
  EXPECT_EQ(hex(hmac_sha256_plain(key, text("Hi There"))),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256_plain(text("Jefe"), text("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  std::vector<std::byte> long_key(131, std::byte{0xaa});
  EXPECT_EQ(hex(hmac_sha256_plain(long_key,
                                  text("Test Using Larger Than Block-Size Key - Hash Key First"))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Hmac, PartsAreToldApart) {
  auto key = text("key");
  EXPECT_NE(hmac_sha256(key, {text("ab"), text("c")}), hmac_sha256(key, {text("a"), text("bc")}));
  EXPECT_EQ(hmac_sha256(key, {text("ab"), text("c")}), hmac_sha256(key, {text("ab"), text("c")}));
}

TEST(Hmac, ComparisonAndRandomBytes) {
  Mac a = hmac_sha256(text("k"), {text("m")});
  Mac b = a;
  EXPECT_TRUE(equal_secret(a, b));
  b[31] ^= std::byte{1};
  EXPECT_FALSE(equal_secret(a, b));
  EXPECT_FALSE(equal_secret(a, std::span<const std::byte>(a).first(31)));
  Mac x;
  Mac y;
  random_bytes(x);
  random_bytes(y);
  EXPECT_NE(x, y);
}

}  // namespace
}  // namespace paceline
