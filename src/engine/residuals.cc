#include "engine/residuals.h"

#include "engine/describe.h"

namespace paceline::engine {

void ResidualView::bind(codec::ResidualStore& store, const Operation& operation) {
  store_ = &store;
  ranges_.clear();
  for (const auto& s : operation.segments) ranges_.push_back({s.key, s.offset, s.elements});
  if (!ranges_.empty()) return;
  uint64_t key = mix(mix(0x756e6e616d6564ULL, operation.group), operation.name.size());
  for (char c : operation.name) key = mix(key, static_cast<unsigned char>(c));
  if (operation.name.empty()) key = mix(key, operation.count);
  ranges_.push_back({key, 0, operation.count});
}

void ResidualView::hand_over(std::span<const std::pair<uint64_t, uint64_t>> own, float* buffer) {
  store_->hand_over(ranges_, own, buffer);
}

Result<std::span<const codec::ResidualRun>> ResidualView::runs(uint64_t first, uint64_t elements) {
  runs_.clear();
  PACELINE_RETURN_IF_ERROR(store_->runs(ranges_, first, elements, runs_));
  return std::span<const codec::ResidualRun>(runs_);
}

}  // namespace paceline::engine
