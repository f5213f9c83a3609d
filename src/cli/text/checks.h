// Checks of what people write, for CLI11's options.
#pragma once

#include <functional>
#include <string>

namespace paceline::cli {

/// A number from `low` to `high`: CLI::Range lets "nan" through.
std::function<std::string(const std::string&)> number_from(double low, double high);

}  // namespace paceline::cli
