#include "bootstrap/arrivals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

namespace paceline::bootstrap {
namespace {

constexpr const char* kPatience = "PACELINE_START_TIMEOUT sets the patience";

std::string list(const std::set<Rank>& ranks) {
  constexpr std::size_t kShown = 16;
  std::vector<Rank> first(
      ranks.begin(), std::next(ranks.begin(), static_cast<long>(std::min(kShown, ranks.size()))));
  auto text = fmt::format("{}", fmt::join(first, ", "));
  if (ranks.size() > kShown) text += fmt::format(" … ({} in all)", ranks.size());
  return text;
}

}  // namespace

std::string here_key(const std::string& prefix, Rank rank) {
  return fmt::format("{}here{}", prefix, rank);
}

bool is_here(KeyValue& space, const std::string& prefix, Rank rank, const std::string& put_key) {
  if (auto announced = space.announced(here_key(prefix, rank))) return *announced;
  auto value = space.get(put_key);
  return value && *value;
}

double shown_seconds(Time waited) {
  const auto seconds = static_cast<double>(waited) / kSecond;
  return seconds < 1 ? seconds : std::round(10 * seconds) / 10;
}

Status never_came(Time waited, const std::set<Rank>& ranks, Rank size, const KeyValue& space) {
  if (const Status trouble = space.trouble(); !trouble.is_ok()) {
    return {Code::kTimeout,
            fmt::format("after {:g} s nobody can say which of {} ranks have come: {}. {}",
                        shown_seconds(waited), size, trouble.message(), kPatience)};
  }
  return {Code::kTimeout,
          fmt::format("after {:g} s rank{} {} of {} never came (asked {}). Are all ranks started "
                      "with the same size and rendezvous? {}",
                      shown_seconds(waited), ranks.size() == 1 ? "" : "s", list(ranks), size,
                      space.describe(), kPatience)};
}

Status came_late(Time waited, Rank size) {
  return {Code::kTimeout, fmt::format("after {:g} s all of {} ranks have come, but the last one "
                                      "too late to form the job in time. {}",
                                      shown_seconds(waited), size, kPatience)};
}

}  // namespace paceline::bootstrap
