// One operation's view of top-k's residuals: which of them belong to which elements of its buffer.
#pragma once

#include <span>
#include <vector>

#include "codec/residual_store.h"
#include "engine/engine.h"
#include "engine/executor.h"

namespace paceline::engine {

class ResidualView final : public ResidualSource {
 public:
  /// An operation without segments is one parameter, told from others by its name.
  void bind(codec::ResidualStore& store, const Operation& operation);
  /// Gives what this rank keeps and, under a plan that encodes `own`, would not use any more to the operation's buffer.
  void hand_over(std::span<const std::pair<uint64_t, uint64_t>> own, float* buffer);
  Result<std::span<const codec::ResidualRun>> runs(uint64_t first, uint64_t elements) override;

 private:
  codec::ResidualStore* store_ = nullptr;
  std::vector<codec::ResidualRange> ranges_;
  std::vector<codec::ResidualRun> runs_;
};

}  // namespace paceline::engine
