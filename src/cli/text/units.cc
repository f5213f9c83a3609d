#include "cli/text/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <span>
#include <utility>

namespace paceline::cli {
namespace {

Status invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }

/// Splits "1.5gbit" into 1.5 and "gbit" (lower case).
Result<std::pair<double, std::string>> split_number(std::string_view text) {
  double number = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number))
    return invalid("it does not begin with a number");
  std::string unit(end, text.data() + text.size());
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return std::pair(number, unit);
}

struct Unit {
  std::string_view name;
  double factor;
};

Result<double> with_units(std::string_view text, std::span<const Unit> units,
                          std::string_view example) {
  auto parts = split_number(text);
  if (parts.is_ok()) {
    for (const auto& unit : units) {
      const double value = parts->first * unit.factor;
      if (parts->second == unit.name && std::isfinite(value)) return value;
    }
  }
  return invalid(fmt::format("'{}' is not understood; write it like {}", text, example));
}

}  // namespace

Result<double> parse_rate(std::string_view text) {
  static constexpr Unit kUnits[] = {{"bit", 1}, {"kbit", 1e3}, {"k", 1e3}, {"mbit", 1e6},
                                    {"m", 1e6}, {"gbit", 1e9}, {"g", 1e9}, {"tbit", 1e12}};
  return with_units(text, kUnits, "1gbit or 300mbit");
}

Result<std::chrono::nanoseconds> parse_duration(std::string_view text) {
  static constexpr Unit kUnits[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};
  PACELINE_ASSIGN(double ns, with_units(text, kUnits, "100us or 2ms"));
  constexpr double kYear = 365.0 * 24 * 3600 * 1e9;
  if (std::abs(ns) > kYear) {
    return invalid(fmt::format("'{}' is longer than a year", text));
  }
  return std::chrono::nanoseconds(static_cast<int64_t>(std::llround(ns)));
}

Result<double> parse_share(std::string_view text) {
  static constexpr Unit kUnits[] = {{"%", 0.01}};
  return with_units(text, kUnits, "0.1%");
}

std::string format_rate(double bps) {
  if (bps >= 1e9) return fmt::format("{:.4g} Gb/s", bps / 1e9);
  if (bps >= 1e6) return fmt::format("{:.4g} Mb/s", bps / 1e6);
  return fmt::format("{:.4g} kb/s", bps / 1e3);
}

}  // namespace paceline::cli
