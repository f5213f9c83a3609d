#include <algorithm>
#include <array>
#include <limits>

#include "device/cuda/reference_kernels.h"

namespace paceline::device::cuda::reference {
namespace {

/// Blocks whose largest magnitude is below 2^-100 send zeros: 1 / scale would overflow.
constexpr uint32_t kTiny = 0x0D800000U;

}  // namespace

template <class From>
void encode_int8(const Int8Encode& argument) {
  const auto* gradient = at<const typename From::Bits>(argument.gradient);
  const auto* residual = at<const float>(argument.residual);
  auto* next = at<float>(argument.next_residual);
  auto* scales = at<float>(argument.scales);
  auto* values = at<int8_t>(argument.values);
  std::array<float, kInt8Block> v{};
  uint64_t block = 0;
  for (uint64_t begin = 0; begin < argument.elements; begin += kInt8Block, ++block) {
    const uint64_t count = std::min<uint64_t>(kInt8Block, argument.elements - begin);
    uint32_t largest = 0;
    for (uint64_t i = 0; i < count; ++i) {
      const float r = residual != nullptr ? residual[begin + i] : 0.0F;
      v[i] = std::fma(From::widen(gradient[begin + i]), argument.scale, r);
      largest = std::max(largest, magnitude_bits(v[i]));
    }
    const bool finite = largest < 0x7F800000U;
    if (!finite) add_report(argument.report, kReportNonFinite);
    float scale = largest < kTiny ? 0.0F : float_of(largest) / 127.0F;
    const float inverse = largest < kTiny ? 0.0F : 1.0F / scale;
    if (!finite) scale = float_of(0x7FC00000U);
    scales[block] = scale;
    for (uint64_t i = 0; i < count; ++i) {
      const float steps =
          finite ? std::clamp(std::nearbyint(v[i] * inverse), -127.0F, 127.0F) : 0.0F;
      values[begin + i] = static_cast<int8_t>(steps);
      if (residual == nullptr) continue;
      next[begin + i] = finite ? v[i] - steps * scale : residual[begin + i];
    }
  }
  for (; block % 4 != 0; ++block) scales[block] = 0;
  for (uint64_t i = argument.elements; i % 16 != 0; ++i) values[i] = 0;
}

template <class To>
void combine_int8(const Int8Combine& argument) {
  auto* output = at<typename To::Bits>(argument.output);
  const auto decoded = [&](uint32_t source, uint64_t i) {
    const float scale = at<const float>(argument.encoded[source])[i / kInt8Block];
    const int8_t value = at<const int8_t>(argument.encoded[source] + argument.values_offset)[i];
    return static_cast<float>(value) * scale;
  };
  for (uint64_t i = 0; i < argument.elements; ++i) {
    float sum = decoded(0, i);
    for (uint32_t source = 1; source < argument.sources; ++source) sum += decoded(source, i);
    output[i] = To::narrow(sum * argument.scale);
  }
}

template void encode_int8<Float32>(const Int8Encode&);
template void encode_int8<Float16>(const Int8Encode&);
template void encode_int8<BFloat16>(const Int8Encode&);
template void combine_int8<Float32>(const Int8Combine&);
template void combine_int8<Float16>(const Int8Combine&);
template void combine_int8<BFloat16>(const Int8Combine&);

}  // namespace paceline::device::cuda::reference
