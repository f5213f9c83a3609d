#include "gpu/link_share.h"

#include <algorithm>
#include <cmath>

namespace paceline::gpu {
namespace {

/// Smaller changes of a part are not worth a call for each connection.
constexpr double kWorthIt = 1.0 / 8;

/// What `bytes` count as, where `most` wait on the wire that has most to send.
double weight(uint64_t bytes, uint64_t most) {
  return static_cast<double>(bytes == 0 ? 0 : std::max(bytes, most / LinkShare::kLeastOfMost));
}

}  // namespace

LinkShare::LinkShare(NodePage* page, int rank, int ranks, int wires)
    : page_(page),
      rank_(rank),
      ranks_(ranks),
      wires_(wires),
      told_(static_cast<size_t>(wires)),
      parts_(static_cast<size_t>(wires), 1.0) {
  for (int w = 0; page_ != nullptr && w < wires_; ++w) page_->put_waiting(rank_, w, 0);
}

void LinkShare::tell(std::span<const uint64_t> waiting) {
  for (size_t w = 0; w < waiting.size(); ++w) {
    if (waiting[w] == told_[w]) continue;
    told_[w] = waiting[w];
    if (page_ != nullptr) page_->put_waiting(rank_, static_cast<int>(w), waiting[w]);
  }
}

bool LinkShare::all_have_told() const {
  for (int r = 0; page_ != nullptr && r < ranks_; ++r) {
    if (!page_->waiting(r, 0)) return false;
  }
  return page_ != nullptr;
}

std::span<const double> LinkShare::deal(std::span<const uint64_t> waiting, Time now) {
  tell(waiting);
  if (now - dealt_at_ < kEvery) return {};
  dealt_at_ = now;
  std::vector<uint64_t> all(waiting.begin(), waiting.end());
  if (all_have_told()) {
    for (int r = 0; r < ranks_; ++r) {
      for (int w = 0; r != rank_ && w < wires_; ++w)
        all.push_back(page_->waiting(r, w).value_or(0));
    }
  }
  const uint64_t most = *std::ranges::max_element(all);
  double sum = 0;
  for (const uint64_t bytes : all) sum += weight(bytes, most);
  bool changed = false;
  std::vector<double> parts(waiting.size(), 1.0);
  for (size_t w = 0; w < waiting.size() && sum > 0; ++w) {
    // One that has nothing now begins with the least.
    const double mine = weight(std::max<uint64_t>(waiting[w], 1), most);
    parts[w] = mine / sum * static_cast<double>(all.size());
  }
  for (size_t w = 0; w < parts.size(); ++w)
    changed |= std::abs(parts[w] - parts_[w]) > kWorthIt * parts_[w];
  if (!changed) return {};
  parts_ = std::move(parts);
  return parts_;
}

}  // namespace paceline::gpu
