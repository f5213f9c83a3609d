// Random inputs of every kind that a codec may meet, made in parallel, the same for the same seed.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/types.h"

namespace bench {

enum class Kind { kNormal, kSparse, kTies, kClustered, kDenormal, kAnyBits, kNonFinite };
inline constexpr Kind kKinds[] = {Kind::kNormal,    Kind::kSparse,   Kind::kTies,
                                  Kind::kClustered, Kind::kDenormal, Kind::kAnyBits,
                                  Kind::kNonFinite};
const char* kind_name(Kind kind);

/// kSparse: 0.1 % are not zero. kTies: 3 % are 1 or -1, the rest zero. kClustered: one fiftieth, at the end, is larger. kAnyBits: every finite pattern. kNonFinite: normal, with an Inf, -Inf or NaN here and
/// there (at least one).
std::vector<std::byte> make_input(paceline::DType dtype, uint64_t elements, Kind kind,
                                  uint64_t seed);

/// Calls body(begin, end) for parts of [0, count), on all cores.
void in_parallel(uint64_t count, const std::function<void(uint64_t, uint64_t)>& body);

}  // namespace bench
