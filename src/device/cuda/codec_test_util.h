// Buffers and inputs for the codec tests, on the host and in bench/gpu/kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "device/cuda/codec.h"
#include "device/cuda/layout.h"
#include "device/cuda/numbers.h"

namespace paceline::device::cuda::test {

/// Memory aligned as the codecs ask, filled with a byte that no codec writes by itself.
class Buffer {
 public:
  explicit Buffer(uint64_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(::operator new(bytes + 1, kAlign))) {
    std::memset(data_.get(), 0xA5, bytes);
  }
  template <class T>
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size() * sizeof(T)) {
    std::memcpy(data_.get(), values.data(), bytes_);
  }
  [[nodiscard]] drivers::cuda::DevicePtr address() const {
    return reinterpret_cast<drivers::cuda::DevicePtr>(data_.get());
  }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }
  template <class T>
  [[nodiscard]] std::vector<T> copy() const {
    return {as<T>(), as<T>() + bytes_ / sizeof(T)};
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlign); }
  };
  uint64_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

inline float widen(DType dtype, const void* data, uint64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t half = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::kFloat16 ? Float16::widen(half) : BFloat16::widen(half);
}

inline void narrow(DType dtype, float value, void* data, uint64_t i) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<uint16_t*>(data)[i] =
        dtype == DType::kFloat16 ? Float16::narrow(value) : BFloat16::narrow(value);
  }
}

/// Normally distributed numbers of `dtype`.
inline Buffer normal(DType dtype, uint64_t elements, float sigma, uint32_t seed) {
  Buffer buffer(elements * dtype_size(dtype));
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0, sigma);
  for (uint64_t i = 0; i < elements; ++i) narrow(dtype, distribution(random), buffer.as<void>(), i);
  return buffer;
}

/// What codec.h calls v.
inline float start_value(float gradient, float scale, float residual) {
  return std::fma(gradient, scale, residual);
}

}  // namespace paceline::device::cuda::test
