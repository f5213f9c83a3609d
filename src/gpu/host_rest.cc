#include "gpu/host_rest.h"

#include <algorithm>

namespace paceline::gpu {

Time HostRest::until(Time now, Time joined, Time before) {
  if (joined_ > 0) taken_[next_++ % taken_.size()] = std::max<Time>(before - joined_, 0);
  joined_ = joined;
  const bool rests = trial_.usual(now);
  const Time least = *std::min_element(taken_.begin(), taken_.end());
  return rests && least > kLead ? joined + least - kLead : now;
}

}  // namespace paceline::gpu
