// What scripts written for torch's launcher expect in their environment, from whatever launcher there is.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/settings.h"
#include "base/status.h"

namespace paceline::bootstrap {

/// RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; empty when torch's launcher or `paceline
/// run` has set them, or nothing started this process. Under mpirun rank 0 tells the others its address and a free
/// port over the launcher's key-value space: collective, once a process.
Result<std::vector<std::pair<std::string, std::string>>> launch_environment(
    const Settings& settings);

/// A TCP port of `address` that was free a moment ago.
Result<uint16_t> free_port(const std::string& address);

}  // namespace paceline::bootstrap
