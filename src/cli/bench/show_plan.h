// `--plan`: what a rank would run, and what that takes of the network, without running it.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/bench/bench.h"

namespace paceline::bench {

/// Every rank calls it; the one whose plans they are prints them. `link`: bits per second, 0: not known.
Status show_plans(paceline_comm* comm, const paceline_identity& who, const Options& options,
                  const std::vector<uint64_t>& sizes, double link);

}  // namespace paceline::bench
