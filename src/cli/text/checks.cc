#include "cli/text/checks.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

namespace paceline::cli {

std::function<std::string(const std::string&)> number_from(double low, double high) {
  return [low, high](const std::string& text) {
    double number = 0;
    const bool is_good = CLI::detail::lexical_cast(text, number) && number >= low && number <= high;
    return is_good ? "" : fmt::format("{} is no number from {:g} to {:g}", text, low, high);
  };
}

}  // namespace paceline::cli
