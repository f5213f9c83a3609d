#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

namespace paceline {
namespace {

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> v;
  for (int x : values) v.push_back(static_cast<std::byte>(x));
  return v;
}

// The vectors of RFC 3720, appendix B.4 (there printed byte by byte, least significant first).
TEST(Crc32c, VectorsOfRfc3720) {
  std::vector<std::byte> zeros(32, std::byte{0});
  std::vector<std::byte> ones(32, std::byte{0xFF});
  std::vector<std::byte> up;
  std::vector<std::byte> down;
  for (int i = 0; i < 32; ++i) up.push_back(static_cast<std::byte>(i));
  for (int i = 31; i >= 0; --i) down.push_back(static_cast<std::byte>(i));
  auto read_pdu = bytes_of({0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0,    0, 0, 0, 0,
                            0x14, 0,    0, 0, 0, 0, 4, 0, 0,    0, 0, 0x14, 0, 0, 0, 0x18,
                            0x28, 0,    0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0,    0, 0, 0, 0});
  EXPECT_EQ(crc32c(zeros), 0x8A9136AAU);
  EXPECT_EQ(crc32c(ones), 0x62A8AB43U);
  EXPECT_EQ(crc32c(up), 0x46DD794EU);
  EXPECT_EQ(crc32c(down), 0x113FDB5CU);
  EXPECT_EQ(crc32c(read_pdu), 0xD9963A56U);
  EXPECT_EQ(crc32c_portable(read_pdu), 0xD9963A56U);
  EXPECT_EQ(crc32c(std::as_bytes(std::span(std::string_view("123456789")))), 0xE3069283U);
  EXPECT_EQ(crc32c({}), 0U);
}

TEST(Crc32c, InstructionAndTableAgreeAndChain) {
  std::mt19937_64 random(20261121);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::byte> data(random() % 600);
    for (auto& b : data) b = static_cast<std::byte>(random());
    std::size_t skip = data.empty() ? 0 : random() % std::min<std::size_t>(data.size(), 9);
    std::span<const std::byte> view = std::span(data).subspan(skip);
    std::size_t cut = view.empty() ? 0 : random() % view.size();
    EXPECT_EQ(crc32c(view), crc32c_portable(view));
    EXPECT_EQ(crc32c(view.subspan(cut), crc32c(view.first(cut))), crc32c(view));
  }
}

}  // namespace
}  // namespace paceline
