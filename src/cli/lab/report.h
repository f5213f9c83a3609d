// What a lab tells: before the run, the links as measured; after it, what they carried.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "cli/lab/calibrate.h"
#include "cli/lab/counters.h"
#include "cli/lab/options.h"
#include "cli/lab/ranks.h"

namespace paceline::lab {

/// "4 nodes × 1 rank, 1 Gb/s both ways, MTU 1500, cubic, …"
std::string describe(const Options& options, const std::string& congestion);
/// What was asked beside what each link takes (check_delay(), at least one).
std::string delay_line(const Options& options, const std::vector<double>& delays);
/// One line per link, and a warning where a link falls short of what was asked.
std::string calibration_table(const Options& options, const std::vector<LinkCalibration>& links);
/// Bytes and mean rates per node since the ranks started.
std::string traffic_table(const std::vector<LinkTraffic>& used, double seconds);

struct Report {
  Options options;
  std::string congestion;
  std::vector<double> delays;  ///< seconds, by link; empty without --delay
  std::vector<LinkCalibration> calibration;
  std::vector<LinkTraffic> traffic;
  RunResult run;
  double seconds = 0;
};

/// Where --json's report will be, tried before the lab is made: a long run should not end without one.
class ReportFile {
 public:
  /// Removes what open() has made and nothing was written to: a lab that never ran leaves no empty report.
  ~ReportFile();
  ReportFile() = default;
  ReportFile(const ReportFile&) = delete;
  ReportFile& operator=(const ReportFile&) = delete;
  /// kInvalidArgument where it can't be written; an empty path is none, and fine.
  Status open(const std::string& path);
  Status write(const Report& report);

 private:
  std::string path_;
  bool is_new_ = false;
};

}  // namespace paceline::lab
