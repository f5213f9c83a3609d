// Top-k's residuals as the engine sees them: which memory belongs to which elements of an
// operation's buffer.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/executor.h"

namespace paceline::engine {

/// All residuals of this rank.
class ResidualState {
 public:
  Result<std::span<const codec::ResidualRun>> runs(const std::vector<Segment>&, uint64_t, uint64_t,
                                                   std::vector<codec::ResidualRun>&) {
    return Status(Code::kUnsupported, "top-k is not built in yet");
  }
  void commit() {}
  void rollback() {}
  void scale(double) {}
  Status read(uint64_t, std::span<float>) const { return Status::ok(); }
  Status write(uint64_t, std::span<const float>) { return Status::ok(); }
  [[nodiscard]] uint64_t bytes() const { return 0; }
};

/// One operation's view of them.
class ResidualView final : public ResidualSource {
 public:
  void bind(ResidualState* state, const Operation& operation) {
    state_ = state;
    segments_ = operation.segments;
  }
  Result<std::span<const codec::ResidualRun>> runs(uint64_t first, uint64_t elements) override {
    return state_->runs(segments_, first, elements, runs_);
  }

 private:
  ResidualState* state_ = nullptr;
  std::vector<Segment> segments_;
  std::vector<codec::ResidualRun> runs_;
};

}  // namespace paceline::engine
