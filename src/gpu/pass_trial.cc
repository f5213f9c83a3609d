#include "gpu/pass_trial.h"

#include <algorithm>

namespace paceline::gpu {
namespace {

Time median(std::vector<Time>& taken) {
  if (taken.empty()) return 0;
  const auto middle = taken.begin() + static_cast<long>(taken.size() / 2);
  std::nth_element(taken.begin(), middle, taken.end());
  return *middle;
}

}  // namespace

bool PassTrial::usual(Time now) {
  const Time took = now - last_;
  last_ = now;
  const uint64_t trial = pass_ - std::min(pass_, hold_);  // passes of it so far
  // What has passed since is what that way took. A turn's first pass still shows the turn before.
  if (trial > 0 && (trial - 1) % kTurn != 0) taken_[before_ ? 1 : 0].push_back(took);
  if (trial == kTurn * kTurns) settle();
  const bool tries = pass_ >= hold_;
  before_ = tries ? (pass_ - hold_) / kTurn % 2 == 0 : chosen_;
  ++pass_;
  return before_;
}

void PassTrial::settle() {
  for (size_t i = 0; i < medians_.size(); ++i) medians_[i] = median(taken_[i]);
  for (auto& taken : taken_) taken.clear();
  chosen_ = !(static_cast<double>(medians_[0]) < kGain * static_cast<double>(medians_[1]));
  pass_ = 0;
  hold_ = kHold;
}

}  // namespace paceline::gpu
