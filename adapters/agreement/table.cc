#include <fmt/format.h>

#include <algorithm>

#include "named_queue.h"

namespace paceline::agreement {

std::optional<Table::Decision> Table::ready(int32_t rank, const std::string& name,
                                            const std::string& signature) {
  auto& entry = entries_[name];
  if (entry.signatures.empty()) entry.signatures.resize(static_cast<std::size_t>(size_));
  auto& mine = entry.signatures[static_cast<std::size_t>(rank)];
  if (mine.empty()) ++entry.present;
  mine.push_back(signature);
  if (entry.present < size_) return std::nullopt;

  Decision decision{name, {}};
  const std::string first = entry.signatures[0].front();
  entry.present = 0;
  for (int32_t r = 0; r < size_; ++r) {
    auto& queue = entry.signatures[static_cast<std::size_t>(r)];
    if (queue.front() != first && decision.refusal.empty()) {
      decision.refusal = fmt::format("'{}' differs between ranks: {} on rank 0, {} on rank {}",
                                     name, first, queue.front(), r);
    }
    queue.pop_front();
    if (!queue.empty()) ++entry.present;
  }
  if (entry.present == 0) entries_.erase(name);
  return decision;
}

std::vector<std::string> Table::waiting() const {
  std::vector<std::string> result;
  for (const auto& [name, entry] : entries_) {
    std::string missing;
    for (int32_t r = 0; r < size_; ++r) {
      if (!entry.signatures[static_cast<std::size_t>(r)].empty()) continue;
      missing += fmt::format("{}rank {}", missing.empty() ? "" : ", ", r);
    }
    result.push_back(fmt::format("{} ({})", name, missing));
  }
  std::sort(result.begin(), result.end());
  return result;
}

}  // namespace paceline::agreement
