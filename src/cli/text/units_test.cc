#include "cli/text/units.h"

#include <gtest/gtest.h>

namespace paceline::cli {
namespace {

TEST(Units, RatesDurationsShares) {
  EXPECT_EQ(parse_rate("1gbit").value(), 1e9);
  EXPECT_EQ(parse_rate("2.5Gbit").value(), 2.5e9);
  EXPECT_EQ(parse_rate("300mbit").value(), 3e8);
  EXPECT_EQ(parse_rate("64k").value(), 64e3);
  EXPECT_EQ(parse_duration("100us").value(), std::chrono::microseconds(100));
  EXPECT_EQ(parse_duration("0.5ms").value(), std::chrono::microseconds(500));
  EXPECT_DOUBLE_EQ(parse_share("0.1%").value(), 0.001);
  for (const char* bad :
       {"", "gbit", "1", "1gbps", "1 gbit", "nan", "infgbit", "1e999gbit", "1e300tbit"}) {
    EXPECT_FALSE(parse_rate(bad).is_ok()) << bad;
  }
  for (const char* bad : {"0.1", "1", "%", "x%"}) EXPECT_FALSE(parse_share(bad).is_ok()) << bad;
  EXPECT_EQ(parse_duration("31536000s").value(), std::chrono::hours(365 * 24));
  for (const char* bad : {"5", "5m", "us", "1e300s", "-1e300s", "31536001s"})
    EXPECT_FALSE(parse_duration(bad).is_ok()) << bad;
}

}  // namespace
}  // namespace paceline::cli
