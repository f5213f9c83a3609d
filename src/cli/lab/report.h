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
Status write_report(const Report& report, const std::string& path);

}  // namespace paceline::lab
