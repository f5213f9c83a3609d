// Whether the delay that was asked for is the delay that is there.
#pragma once

#include <chrono>
#include <vector>

#include "base/status.h"
#include "cli/lab/calibrate.h"
#include "cli/lab/network.h"
#include "cli/lab/options.h"

namespace paceline::lab {

/// What a link may take beyond the delay that was asked for: 20 %, or 60 µs where that is more, but never more than
/// 60 % of a short one.
double delay_tolerance(double asked_seconds);
/// The shortest delay that a link holds which takes so much longer than it should, with a quarter of that to spare.
std::chrono::microseconds shortest_delay(double excess_seconds);

/// Seconds that each link's delay takes: the time of an echo between node and switch, answered by the kernel. Refuses
/// (kUnavailable, with the figures and the fix) where that is off by more than delay_tolerance(). About a second a node
/// and twice the delay; where packets get lost, up to 15 s more. Empty without --delay, and when cancelled.
Result<std::vector<double>> check_delay(const Network& network, const Options& options,
                                        const CalibrationHooks& hooks);

}  // namespace paceline::lab
