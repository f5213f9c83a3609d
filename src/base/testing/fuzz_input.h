// What fuzzers draw from their input, which may end at any moment: zeros from there on.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <span>

namespace paceline::testing {

/// Ends the fuzzer, which keeps its input.
inline void require(bool condition) {
  if (!condition) std::abort();
}

struct FuzzInput {
  std::span<const uint8_t> rest;

  uint8_t byte() {
    if (rest.empty()) return 0;
    const uint8_t b = rest[0];
    rest = rest.subspan(1);
    return b;
  }
  /// Small ones, sometimes one within `mask`, and sometimes a huge one.
  uint64_t number(uint64_t mask) {
    const uint8_t b = byte();
    if (b < 0xF0) return b;
    uint64_t v = 0;
    for (int i = 0; i < 8; ++i) v = v << 8 | byte();
    return b < 0xF8 ? v : v & mask;
  }
};

}  // namespace paceline::testing
