#include "cli/lab/options.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

namespace paceline::lab {
namespace {

Result<Options> parse(const std::vector<std::string>& words) {
  CLI::App app("lab");
  Flags flags;
  flags.declare(app);
  std::vector<std::string> reversed(words.rbegin(), words.rend());
  app.parse(reversed);
  return flags.resolve({"true"});
}

TEST(Options, DefaultsAreAGigabitPair) {
  auto o = parse({}).value();
  EXPECT_EQ(o.ranks(), 2);
  EXPECT_EQ(o.rate_bps, 1e9);
  EXPECT_EQ(o.mtu, 1500);
  EXPECT_EQ(o.congestion, "cubic");
  EXPECT_TRUE(o.calibrate);
}

TEST(Options, ProfilesGiveWhatFlagsDoNot) {
  auto o = parse({"--profile", "aws-25g", "--scale", "0.1"}).value();
  EXPECT_DOUBLE_EQ(o.rate_bps, 2.5e9);
  EXPECT_DOUBLE_EQ(o.per_flow_bps, 0.5e9);
  EXPECT_EQ(o.mtu, 9001);
  auto own = parse({"--profile", "aws-25g", "--rate", "5gbit", "--mtu", "1500"}).value();
  EXPECT_EQ(own.rate_bps, 5e9);
  EXPECT_EQ(own.mtu, 1500);
  for (const auto& p : profiles()) {
    EXPECT_TRUE(parse({"--profile", std::string(p.name)}).is_ok()) << p.name;
    EXPECT_NE(profiles_table().find(p.name), std::string::npos);
  }
}

TEST(Options, ErrorsNameTheFlag) {
  auto message = [](const std::vector<std::string>& words) {
    return parse(words).status().message();
  };
  EXPECT_NE(message({"--rate", "1gb"}).find("--rate"), std::string::npos);
  EXPECT_NE(message({"--loss", "60%"}).find("--loss"), std::string::npos);
  EXPECT_NE(message({"--per-flow", "2gbit"}).find("--per-flow"), std::string::npos);
  EXPECT_NE(message({"--profile", "none"}).find("gcp-50g"), std::string::npos);
  for (const std::string scale : {"nan", "-nan", "inf", "0", "-1", "1e400", "11", "", "1x"})
    EXPECT_THROW((void)parse({"--profile", "aws-10g", "--scale", scale}), CLI::ValidationError)
        << scale;
  EXPECT_NE(message({"--profile", "aws-10g", "--rate", "1gbit"}).find("--profile aws-10g caps"),
            std::string::npos);
}

// Also what the flag's own default would be: who asks for a link must not be shown figures of none.
TEST(Options, LoopbackRefusesWhatItCanNotHonour) {
  using Words = std::vector<std::string>;
  for (const Words& asked :
       {Words{"--rate", "1gbit"}, Words{"--per-flow", "300mbit"}, Words{"--delay", "0us"},
        Words{"--loss", "0%"}, Words{"--profile", "aws-25g"}, Words{"--profile", "azure-16g"},
        Words{"--mtu", "1500"}, Words{"--congestion", "cubic"}, Words{"--keep"}}) {
    Words words = asked;
    words.emplace_back("--loopback");
    const auto status = parse(words).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << asked[0];
    EXPECT_NE(status.message().find("it can't go with " + asked[0] + ". Leave --loopback out"),
              std::string::npos)
        << status.message();
  }
  const auto both = parse({"--loopback", "--mtu", "9000", "--rate", "1gbit"}).status();
  EXPECT_NE(both.message().find("with --rate, --mtu."), std::string::npos) << both.message();
  EXPECT_TRUE(parse({"--loopback", "--nodes", "4", "--slots", "2", "--grace", "1s", "--quiet",
                     "--no-calibration", "--json", "x.json"})
                  .is_ok());
}

// What a script makes of a variable that is not set.
TEST(Options, AnEmptyValueIsNoDefault) {
  for (const std::string flag :
       {"--rate", "--per-flow", "--delay", "--loss", "--grace", "--profile", "--json"}) {
    const auto status = parse({flag, ""}).status();
    EXPECT_FALSE(status.is_ok()) << flag;
    EXPECT_NE(status.message().find(flag), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace paceline::lab
