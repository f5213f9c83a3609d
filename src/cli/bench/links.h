// What the links of a lab have carried, what they can carry, and how long they are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace paceline::bench {

struct LinkBytes {
  std::vector<uint64_t> up, down;  ///< by node
};
/// Inside a lab: its byte counters; nullopt elsewhere.
std::optional<LinkBytes> read_links();
/// The busiest link's busier direction between two readings.
uint64_t busiest(const LinkBytes& before, const LinkBytes& after);

/// --link, or the lab's rate, or 0: bits per second.
Result<double> link_rate(const std::string& option);
/// --latency, or what the lab's --delay takes, or 0: seconds.
Result<double> link_latency(const std::string& option);

}  // namespace paceline::bench
