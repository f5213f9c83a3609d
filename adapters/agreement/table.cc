#include "table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace paceline::agreement {
namespace {

constexpr std::size_t kNamed = 8;  // ranks that a sentence names, for jobs of hundreds

std::string list(const std::vector<int32_t>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < std::min(ranks.size(), kNamed); ++i)
    text += fmt::format("{}rank {}", i == 0 ? "" : ", ", ranks[i]);
  if (ranks.size() > kNamed) text += fmt::format(" and {} more", ranks.size() - kNamed);
  return text;
}

}  // namespace

std::optional<Table::Decision> Table::ready(int32_t rank, const std::string& name,
                                            const std::string& signature, double now) {
  const auto size = static_cast<std::size_t>(size_);
  const auto self = static_cast<std::size_t>(rank);
  auto& entry = entries_[name];
  if (entry.signatures.empty()) {
    entry.signatures.resize(size);
    entry.since.resize(size);
    entry.late.resize(size);
  }
  if (!entry.late[self].empty()) {
    Decision decision{name, entry.late[self].front(), PACELINE_TIMEOUT, {rank}};
    entry.late[self].pop_front();
    if (is_idle(entry)) entries_.erase(name);
    return decision;
  }
  if (entry.signatures[self].empty()) ++entry.present;
  entry.signatures[self].push_back(signature);
  entry.since[self].push_back(now);
  if (entry.present < size_) {
    auto refused = refuse_for_the_gone(name, entry);
    if (refused && is_idle(entry)) entries_.erase(name);
    return refused;
  }
  Decision decision{name, {}, PACELINE_OK, {}};
  const std::string first = entry.signatures[0].front();
  for (int32_t r = 0; r < size_; ++r) {
    auto& queue = entry.signatures[static_cast<std::size_t>(r)];
    if (queue.front() != first && decision.refusal.empty()) {
      decision.refusal = fmt::format("'{}' differs between ranks: {} on rank 0, {} on rank {}",
                                     name, first, queue.front(), r);
      decision.code = PACELINE_MISMATCH;
    }
  }
  (void)pop_round(entry);
  if (is_idle(entry)) entries_.erase(name);
  return decision;
}

std::vector<Table::Decision> Table::expire(double now, double timeout_s) {
  std::vector<Decision> decisions;
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto& name = it->first;
    auto& entry = it->second;
    while (entry.present > 0) {
      double oldest = now;
      for (const auto& times : entry.since) {
        if (!times.empty()) oldest = std::min(oldest, times.front());
      }
      if (now - oldest < timeout_s) break;
      const auto absent = missing(entry);
      auto text = fmt::format(
          "all-reduce '{}' timed out after {:.4g} s: {} {} not reached it; every rank must call "
          "it, and use its value where it is part of a graph, which leaves it out otherwise; "
          "PACELINE_TIMEOUT must be longer than the slowest rank takes to come there",
          name, timeout_s, list(absent), absent.size() == 1 ? "has" : "have");
      for (int32_t r : absent) {
        entry.late[static_cast<std::size_t>(r)].push_back(
            fmt::format("all-reduce '{}' came too late on rank {}: other ranks gave it up after "
                        "{:.4g} s (PACELINE_TIMEOUT)",
                        name, r, timeout_s));
      }
      decisions.push_back({name, std::move(text), PACELINE_TIMEOUT, pop_round(entry)});
    }
    it = is_idle(entry) ? entries_.erase(it) : std::next(it);
  }
  return decisions;
}

std::vector<Table::Decision> Table::leave(int32_t rank) {
  gone_[static_cast<std::size_t>(rank)] = true;
  std::vector<Decision> decisions;
  for (auto it = entries_.begin(); it != entries_.end();) {
    auto& entry = it->second;
    while (auto refused = refuse_for_the_gone(it->first, entry))
      decisions.push_back(std::move(*refused));
    it = is_idle(entry) ? entries_.erase(it) : std::next(it);
  }
  return decisions;
}

std::vector<std::string> Table::waiting() const {
  std::vector<std::string> result;
  for (const auto& [name, entry] : entries_) {
    if (entry.present == 0) continue;
    result.push_back(fmt::format("{} ({})", name, list(missing(entry))));
  }
  std::sort(result.begin(), result.end());
  return result;
}

bool Table::is_idle(const Entry& entry) const {
  return entry.present == 0 && std::all_of(entry.late.begin(), entry.late.end(),
                                           [](const auto& late) { return late.empty(); });
}

std::vector<int32_t> Table::missing(const Entry& entry) const {
  std::vector<int32_t> ranks;
  for (int32_t r = 0; r < size_; ++r) {
    if (entry.signatures[static_cast<std::size_t>(r)].empty()) ranks.push_back(r);
  }
  return ranks;
}

/// Takes the oldest report of every rank that has one; these ranks.
std::vector<int32_t> Table::pop_round(Entry& entry) {
  std::vector<int32_t> ranks;
  entry.present = 0;
  for (int32_t r = 0; r < size_; ++r) {
    auto& signatures = entry.signatures[static_cast<std::size_t>(r)];
    if (signatures.empty()) continue;
    ranks.push_back(r);
    signatures.pop_front();
    entry.since[static_cast<std::size_t>(r)].pop_front();
    if (!signatures.empty()) ++entry.present;
  }
  return ranks;
}

/// No debts are kept here: whoever comes later misses the same rank.
std::optional<Table::Decision> Table::refuse_for_the_gone(const std::string& name, Entry& entry) {
  if (entry.present == 0) return std::nullopt;
  std::vector<int32_t> left;
  for (int32_t r : missing(entry)) {
    if (gone_[static_cast<std::size_t>(r)]) left.push_back(r);
  }
  if (left.empty()) return std::nullopt;
  auto text = fmt::format("all-reduce '{}' can't run: {} {} shut down and will not reach it", name,
                          list(left), left.size() == 1 ? "has" : "have");
  return Decision{name, std::move(text), PACELINE_UNAVAILABLE, pop_round(entry)};
}

}  // namespace paceline::agreement
