// Whether the delay that was asked for is the delay that is there.
#pragma once

#include "base/status.h"
#include "cli/lab/network.h"
#include "cli/lab/options.h"

namespace paceline::lab {

/// Seconds that a small datagram takes from the node to the switch and back: median of 40.
Result<double> measure_round_trip(const Network& network, const Node& node);

/// Refuses (kUnavailable, with the figures) where a link's added delay is off by more than 20 % and 60 µs.
Status check_delay(const Network& network, const Options& options);

}  // namespace paceline::lab
