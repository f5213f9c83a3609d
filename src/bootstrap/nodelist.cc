// Slurm's compressed host lists (scontrol show hostnames): prefix[ranges]suffix, ranges "a-b" keep
// leading zeros. And its tasks per node: counts, each for one node or for several in a row.
#include <fmt/format.h>

#include <charconv>

#include "bootstrap/identity.h"

namespace paceline::bootstrap {
namespace {

constexpr uint64_t kMostTasks = 1U << 20;

Status malformed(std::string_view list, std::string_view why) {
  return {Code::kInvalidArgument, fmt::format("node list '{}': {}", list, why)};
}

struct Span {
  uint64_t first = 0;
  uint64_t last = 0;
  std::size_t width = 0;
};

std::optional<uint64_t> digits(std::string_view text) {
  uint64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || text.size() > 18 || error != std::errc() ||
      end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

std::optional<Span> parse_span(std::string_view text) {
  auto dash = text.find('-');
  auto first = digits(text.substr(0, dash));
  auto last = dash == std::string_view::npos ? first : digits(text.substr(dash + 1));
  if (!first || !last || *last < *first) return std::nullopt;
  return Span{*first, *last, text.substr(0, dash).size()};
}

/// Appends `stem` + every expansion of `rest` (brackets may follow each other).
Status expand(std::string_view list, const std::string& stem, std::string_view rest,
              std::size_t limit, std::vector<std::string>& out) {
  auto open = rest.find('[');
  if (open == std::string_view::npos) {
    if (rest.find(']') != std::string_view::npos) return malformed(list, "']' without '['");
    if (stem.empty() && rest.empty()) return malformed(list, "an empty name");
    if (out.size() >= limit) return malformed(list, fmt::format("more than {} names", limit));
    out.push_back(stem + std::string(rest));
    return {};
  }
  if (rest.substr(0, open).find(']') != std::string_view::npos)
    return malformed(list, "']' without '['");
  auto close = rest.find(']', open);
  if (close == std::string_view::npos) return malformed(list, "'[' without ']'");
  auto ranges = rest.substr(open + 1, close - open - 1);
  auto tail = rest.substr(close + 1);
  while (true) {
    auto comma = ranges.find(',');
    auto span = parse_span(ranges.substr(0, comma));
    if (!span) return malformed(list, "a range must look like 1-3 or 07");
    for (uint64_t i = span->first; i <= span->last; ++i) {
      PACELINE_RETURN_IF_ERROR(
          expand(list, fmt::format("{}{}{:0{}}", stem, rest.substr(0, open), i, span->width), tail,
                 limit, out));
    }
    if (comma == std::string_view::npos) return {};
    ranges.remove_prefix(comma + 1);
  }
}

}  // namespace

Result<std::vector<std::string>> expand_nodelist(std::string_view list, std::size_t limit) {
  std::vector<std::string> names;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= list.size(); ++i) {
    if (i < list.size() && list[i] == '[') ++depth;
    if (i < list.size() && list[i] == ']') --depth;
    if (i == list.size() || (list[i] == ',' && depth == 0)) {
      PACELINE_RETURN_IF_ERROR(expand(list, "", list.substr(begin, i - begin), limit, names));
      begin = i + 1;
    }
  }
  return names;
}

Result<Rank> tasks_on_node(std::string_view text, std::size_t node) {
  std::string_view rest = text;
  for (uint64_t first = 0;;) {
    auto comma = rest.find(',');
    auto entry = rest.substr(0, comma);
    auto bracket = entry.find("(x");
    auto tasks = digits(entry.substr(0, bracket));
    std::optional<uint64_t> nodes = 1;
    if (bracket != std::string_view::npos) {
      auto times = entry.substr(bracket + 2);
      nodes = times.ends_with(')') ? digits(times.substr(0, times.size() - 1)) : std::nullopt;
    }
    if (!tasks || !nodes || *tasks > kMostTasks || *nodes == 0)
      return Status(Code::kInvalidArgument, fmt::format("'{}' must look like 2 or 2(x3)", entry));
    if (node - first < *nodes) return static_cast<Rank>(*tasks);
    first += *nodes;
    if (comma == std::string_view::npos)
      return Status(Code::kInvalidArgument, fmt::format("it does not tell of node {}", node));
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace paceline::bootstrap
