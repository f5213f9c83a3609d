// 16-bit floats on the host, one at a time, with the bits that the device's conversions give.
#pragma once

#include <cstdint>
#include <cstring>

namespace paceline::device::cuda {

inline uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float float_of(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7FFFFFFFU; }
inline bool is_finite(float value) { return magnitude_bits(value) < 0x7F800000U; }

/// A number as it lies in memory: how it becomes a float32, and back. `narrow` rounds to nearest even, what is out of
/// range becomes infinite, NaN becomes 0x7FFF. kLargest: the largest finite magnitude; kOverflow: bits of the smallest
/// float32 that rounds beyond it.
struct Float32 {
  using Bits = float;
  static float widen(float value) { return value; }
  static float narrow(float value) { return value; }
  static constexpr uint32_t kOverflow = 0x7F800000U;
  static float largest() { return float_of(0x7F7FFFFFU); }
};

struct Float16 {
  using Bits = uint16_t;
  static constexpr uint32_t kOverflow = 0x477FF000U;  // 65520
  static uint16_t largest() { return 0x7BFFU; }
  static float widen(uint16_t half) {
    const uint32_t sign = (half & 0x8000U) << 16, exponent = (half >> 10) & 31U;
    const uint32_t fraction = half & 0x3FFU;
    if (exponent == 31) return float_of(sign | 0x7F800000U | fraction << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return float_of(sign | bits_of(magnitude));
  }
  static uint16_t narrow(float value) {
    const uint32_t magnitude = magnitude_bits(value);
    const auto sign = static_cast<uint16_t>((bits_of(value) >> 16) & 0x8000U);
    if (magnitude > 0x7F800000U) return 0x7FFFU;
    if (magnitude >= kOverflow) return static_cast<uint16_t>(sign | 0x7C00U);
    // Below 2^-14 fp16 counts in 2^-24, as float32 does between 0.5 and 1: that sum rounds.
    if (magnitude < 0x38800000U)
      return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5F) - 0x3F000000U));
    const uint32_t rounded = magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U);
    return static_cast<uint16_t>(sign | rounded >> 13);
  }
};

struct BFloat16 {
  using Bits = uint16_t;
  static constexpr uint32_t kOverflow = 0x7F7F8000U;
  static uint16_t largest() { return 0x7F7FU; }
  static float widen(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }
  static uint16_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    if (magnitude_bits(value) > 0x7F800000U) return 0x7FFFU;
    return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
  }
};

}  // namespace paceline::device::cuda
