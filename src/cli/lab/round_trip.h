// Whether the delay that was asked for is the delay that is there.
#pragma once

#include <vector>

#include "base/status.h"
#include "cli/lab/calibrate.h"
#include "cli/lab/network.h"
#include "cli/lab/options.h"

namespace paceline::lab {

/// Seconds that each link's delay takes: the time of an echo between node and switch, answered by the kernel. Refuses
/// (kUnavailable, with the figures and the shortest delay that holds) where one takes more than was asked and 20 %, or
/// 60 µs where that is more, but never more than 60 % of a short one. About a second a node and twice the delay; where
/// packets get lost, up to 15 s more. Empty without --delay, and when cancelled.
Result<std::vector<double>> check_delay(Network& network, const Options& options,
                                        const CalibrationHooks& hooks);

}  // namespace paceline::lab
