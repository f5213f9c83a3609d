// What a thread does between two looks at something that a GPU or a peer sets in memory.
#pragma once

#include <time.h>

#include "base/clock.h"

namespace paceline::gpu {

/// For so long nothing but looking; it is how fast what follows in a burst is seen.
inline constexpr Time kLookHard = 30 * kMicrosecond;
/// From here on a nap may be `longer`, and later last as long as a wake-up is worth: each takes the processor some 10 µs on a
/// virtual machine, a third of a core at 30 µs a nap.
inline constexpr Time kLongerAfter = 2 * kMillisecond, kLongestAfter = 10 * kMillisecond;
inline constexpr Time kLongestNap = 120 * kMicrosecond;

/// The nap after nothing has happened for `waited`; 0: look again at once.
constexpr Time nap_after(Time waited, Time nap, Time longer) {
  if (waited < kLookHard) return 0;
  if (waited < kLongerAfter) return nap;
  return waited < kLongestAfter ? longer : kLongestNap;
}

inline void take_nap(Time nap) {
  const timespec t{0, static_cast<long>(nap)};
  nanosleep(&t, nullptr);
}

}  // namespace paceline::gpu
