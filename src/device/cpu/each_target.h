// For tests: runs a function once on every SIMD target that this processor has, then returns to the
// best one.
#pragma once

#include <hwy/highway.h>

#include <cstdint>
#include <vector>

namespace paceline::cpu {

/// Every compiled target that runs here, best first; the baseline is always there.
inline std::vector<int64_t> runnable_targets() {
  std::vector<int64_t> targets;
  const int64_t can = hwy::SupportedTargets() | HWY_STATIC_TARGET;
  for (int bit = 0; bit < 63; ++bit) {
    const int64_t target = int64_t{1} << bit;
    if ((HWY_TARGETS & can & target) != 0) targets.push_back(target);
  }
  return targets;
}

/// fn(name) with `target` in force in this process: not while other threads run kernels.
template <class Fn>
void on_target(int64_t target, Fn fn) {
  hwy::GetChosenTarget().Update(target);
  fn(hwy::TargetName(target));
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

template <class Fn>
void on_each_target(Fn fn) {
  for (const int64_t target : runnable_targets()) on_target(target, fn);
}

}  // namespace paceline::cpu
