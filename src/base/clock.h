// The clock seam. Protocol and engine code never asks the system for the time: it is given one, so
// that a simulation can turn years in milliseconds and replay a failure exactly.
#pragma once

#include <chrono>
#include <cstdint>

namespace paceline {

/// Nanoseconds since an arbitrary origin; differences are durations in nanoseconds.
using Time = int64_t;
inline constexpr Time kMicrosecond = 1'000;
inline constexpr Time kMillisecond = 1'000'000;
inline constexpr Time kSecond = 1'000'000'000;
/// "No deadline": later than every other time.
inline constexpr Time kNever = INT64_MAX;

/// `t + d` that saturates at kNever.
constexpr Time after(Time t, Time d) { return d >= kNever - t ? kNever : t + d; }

/// Seconds, as settings and callers give them; what is negative or no number is 0, what is too long kNever.
constexpr Time to_time(double seconds) {
  if (!(seconds > 0)) return 0;
  return seconds >= 9e9 ? kNever : static_cast<Time>(seconds * static_cast<double>(kSecond));
}

class Clock {
 public:
  virtual ~Clock() = default;
  [[nodiscard]] virtual Time now() const = 0;
};

/// CLOCK_MONOTONIC.
class SteadyClock final : public Clock {
 public:
  [[nodiscard]] Time now() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

/// Moves only when told to.
class VirtualClock final : public Clock {
 public:
  [[nodiscard]] Time now() const override { return now_; }
  void advance_to(Time t) {
    if (t > now_) now_ = t;
  }

 private:
  Time now_ = 0;
};

}  // namespace paceline
