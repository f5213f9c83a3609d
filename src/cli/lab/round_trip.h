// Whether the delay that was asked for is the delay that is there.
#pragma once

#include "base/status.h"
#include "cli/lab/calibrate.h"
#include "cli/lab/network.h"
#include "cli/lab/options.h"

namespace paceline::lab {

/// Refuses (kUnavailable, with the figures) where a link's added delay is off by more than 20 % and 60 µs. About a second
/// a node where the delay is there. Cancelled, it returns ok at once.
Status check_delay(const Network& network, const Options& options, const CalibrationHooks& hooks);

}  // namespace paceline::lab
