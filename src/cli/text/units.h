// Rates, durations and shares as people write them.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "base/status.h"

namespace paceline::cli {

/// "1gbit", "300mbit", "25g": bits per second. Bytes per second (tc's "bps") are refused, being
/// misread too often.
Result<double> parse_rate(std::string_view text);
/// "100us", "2ms".
Result<std::chrono::nanoseconds> parse_duration(std::string_view text);
/// "0.1%": a share from 0 to 1.
Result<double> parse_share(std::string_view text);
/// "1 Gb/s", "300 Mb/s".
std::string format_rate(double bps);

}  // namespace paceline::cli
