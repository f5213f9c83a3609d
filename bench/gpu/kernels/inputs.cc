#include "inputs.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "device/cuda/numbers.h"

namespace bench {
namespace {

using paceline::DType;
using paceline::device::cuda::BFloat16;
using paceline::device::cuda::Float16;
using paceline::device::cuda::float_of;
using paceline::device::cuda::is_finite;

/// The index-th number of a stream (splitmix64).
uint64_t random_at(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0xD1342543DE82EF95U + (index + 1) * 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

/// Box and Muller's transform.
float normal_of(uint64_t bits) {
  const float u = (static_cast<float>(bits >> 40) + 0.5F) * 0x1p-24F;
  const float angle = static_cast<float>(bits & 0xFFFFFFU) * (6.2831853F * 0x1p-24F);
  return std::sqrt(-2.0F * std::log(u)) * std::cos(angle);
}

float value_of(Kind kind, uint64_t bits, uint64_t index, uint64_t elements) {
  switch (kind) {
    case Kind::kNormal:
      break;
    case Kind::kSparse:
      return bits % 1000 == 0 ? normal_of(bits) : 0.0F;
    case Kind::kTies:
      return bits % 100 >= 3 ? 0.0F : bits % 3 == 0 ? 1.0F : -1.0F;
    case Kind::kClustered:
      return normal_of(bits) * (index > elements / 50 * 49 ? 1.0F : 1e-2F);
    case Kind::kDenormal:
      return float_of(static_cast<uint32_t>(bits) & 0x807FFFFFU);
    case Kind::kAnyBits: {
      const float value = float_of(static_cast<uint32_t>(bits));
      return is_finite(value) ? value : 1.0F;
    }
    case Kind::kNonFinite:
      if (index == elements / 2 || bits % 100000 == 0)
        return bits % 3 == 0 ? INFINITY : bits % 3 == 1 ? -INFINITY : NAN;
      break;
  }
  return normal_of(bits) * 1e-2F;
}

}  // namespace

const char* kind_name(Kind kind) {
  constexpr const char* kNames[] = {"normal",   "0.1 % dense",  "ties",   "clustered",
                                    "denormal", "any exponent", "Inf/NaN"};
  return kNames[static_cast<int>(kind)];
}

std::vector<std::byte> make_input(DType dtype, uint64_t elements, Kind kind, uint64_t seed) {
  std::vector<std::byte> data(elements * paceline::dtype_size(dtype));
  in_parallel(elements, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) {
      const uint64_t bits = random_at(seed, i);
      const float value = value_of(kind, bits, i, elements);
      if (dtype == DType::kFloat32) {
        reinterpret_cast<float*>(data.data())[i] = value;
        continue;
      }
      auto* halves = reinterpret_cast<uint16_t*>(data.data());
      halves[i] = dtype == DType::kFloat16 ? Float16::narrow(value) : BFloat16::narrow(value);
      const bool infinite = !is_finite(dtype == DType::kFloat16 ? Float16::widen(halves[i])
                                                                : BFloat16::widen(halves[i]));
      if (infinite && is_finite(value)) halves[i] = 0x1234;
      if (kind == Kind::kDenormal) halves[i] = static_cast<uint16_t>(bits & 0x807FU);
    }
  });
  return data;
}

void in_parallel(uint64_t count, const std::function<void(uint64_t, uint64_t)>& body) {
  const uint64_t parts =
      std::clamp<uint64_t>(count / 65536, 1, std::max(1U, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (uint64_t part = 1; part < parts; ++part)
    threads.emplace_back(body, count * part / parts, count * (part + 1) / parts);
  body(0, count / parts);
  for (auto& thread : threads) thread.join();
}

}  // namespace bench
