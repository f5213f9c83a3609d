#include "cli/lab/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace paceline::lab {
namespace {

namespace fs = std::filesystem;

/// A gigabit of which each flow gets a megabit, as 64 flows of them found it.
LinkCalibration by_few_flows(double payload_bps) {
  LinkCalibration link;
  link.up = {.payload_bps = payload_bps,
             .may_carry_bps = 64e6,
             .one_flow_bps = 0.95e6,
             .ahead_bytes = 72e3,
             .flows = kMostFlows};
  link.down = {.payload_bps = 0.95e9, .may_carry_bps = 1e9, .ahead_bytes = 72e3, .flows = 1};
  return link;
}

TEST(Calibration, FewFlowsAreJudgedByWhatTheyMayCarry) {
  Options o;
  o.per_flow_bps = 1e6;
  EXPECT_EQ(flows_that_fill(o), kMostFlows);
  const auto text = calibration_table(o, {by_few_flows(60.8e6)});
  EXPECT_NE(text.find("(  6.1 %)"), std::string::npos) << "a share of the line: " << text;
  EXPECT_NE(
      text.find("up by 64 flows, which may carry 64 Mb/s together (95.0 % of it): the rest of "
                "the line is not measured\n"),
      std::string::npos)
      << text;
  EXPECT_EQ(text.find("warning"), std::string::npos) << text;
  EXPECT_NE(calibration_table(o, {by_few_flows(50e6)}).find("warning"), std::string::npos);
}

TEST(Calibration, AsManyFlowsAsFillALine) {
  Options o;
  o.per_flow_bps = 3e8;
  EXPECT_EQ(flows_that_fill(o), 5) << "four, and one where two meet in a class";
  auto link = by_few_flows(0.95e9);
  link.up.may_carry_bps = 1e9;
  link.up.flows = 5;
  const auto text = calibration_table(o, {link});
  EXPECT_EQ(text.find("is not measured"), std::string::npos) << text;
  EXPECT_EQ(text.find("warning"), std::string::npos) << text;
}

class Path {
 public:
  Path() : folder_(fs::temp_directory_path() / ("paceline-report-" + std::to_string(getpid()))) {
    fs::create_directory(folder_);
  }
  ~Path() { fs::remove_all(folder_); }
  Path(const Path&) = delete;
  Path& operator=(const Path&) = delete;
  [[nodiscard]] std::string file() const { return folder_ / "lab.json"; }

 private:
  fs::path folder_;
};

TEST(ReportFile, WhatItMadeForNothingGoes) {
  const Path path;
  {
    ReportFile report;
    ASSERT_TRUE(report.open(path.file()).is_ok());
    EXPECT_TRUE(fs::exists(path.file()));
  }
  EXPECT_FALSE(fs::exists(path.file()));
}

TEST(ReportFile, AnOlderReportStays) {
  const Path path;
  std::ofstream(path.file()) << "older" << std::flush;
  {
    ReportFile report;
    ASSERT_TRUE(report.open(path.file()).is_ok());
  }
  std::string text;
  std::ifstream(path.file()) >> text;
  EXPECT_EQ(text, "older");
}

TEST(ReportFile, AReportStays) {
  const Path path;
  {
    ReportFile file;
    ASSERT_TRUE(file.open(path.file()).is_ok());
    ASSERT_TRUE(file.write({}).is_ok());
  }
  std::ifstream written(path.file());
  EXPECT_TRUE(nlohmann::json::parse(written).contains("links"));
}

TEST(ReportFile, WithoutAPathThereIsNone) {
  ReportFile file;
  EXPECT_TRUE(file.open("").is_ok());
  EXPECT_TRUE(file.write({}).is_ok());
  EXPECT_EQ(file.open("/nonexistent/folder/x.json").code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace paceline::lab
