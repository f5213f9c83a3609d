// The version of this library: what paceline_version() says, and what ranks compare before they work together.
#pragma once

namespace paceline {

inline constexpr const char* kVersion = "0.1.0";

}  // namespace paceline
