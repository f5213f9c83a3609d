#include <algorithm>

#include "device/cuda/reference_kernels.h"

namespace paceline::device::cuda::reference {
template <class From, class Wire>
void encode_dense(const DenseEncode& argument) {
  const auto* gradient = at<const typename From::Bits>(argument.gradient);
  auto* encoded = at<typename Wire::Bits>(argument.encoded);
  uint32_t report = 0;
  for (uint64_t i = 0; i < argument.elements; ++i)
    encoded[i] = saturated<Wire>(From::widen(gradient[i]) * argument.scale, report);
  for (uint64_t i = argument.elements; i * sizeof(*encoded) % 16 != 0; ++i) encoded[i] = 0;
  if (report != 0) add_report(argument.report, report);
}

template <class Wire, class To>
void combine_dense(const DenseCombine& argument) {
  auto* output = at<typename To::Bits>(argument.output);
  for (uint64_t i = 0; i < argument.elements; ++i) {
    float sum = Wire::widen(at<const typename Wire::Bits>(argument.encoded[0])[i]);
    for (uint32_t source = 1; source < argument.sources; ++source)
      sum += Wire::widen(at<const typename Wire::Bits>(argument.encoded[source])[i]);
    output[i] = To::narrow(sum * argument.scale);
  }
}

template void encode_dense<Float32, Float32>(const DenseEncode&);
template void encode_dense<Float32, Float16>(const DenseEncode&);
template void encode_dense<Float32, BFloat16>(const DenseEncode&);
template void encode_dense<Float16, Float16>(const DenseEncode&);
template void encode_dense<Float16, BFloat16>(const DenseEncode&);
template void encode_dense<BFloat16, Float16>(const DenseEncode&);
template void encode_dense<BFloat16, BFloat16>(const DenseEncode&);
template void combine_dense<Float32, Float32>(const DenseCombine&);
template void combine_dense<Float16, Float32>(const DenseCombine&);
template void combine_dense<BFloat16, Float32>(const DenseCombine&);
template void combine_dense<Float16, Float16>(const DenseCombine&);
template void combine_dense<BFloat16, Float16>(const DenseCombine&);
template void combine_dense<Float16, BFloat16>(const DenseCombine&);
template void combine_dense<BFloat16, BFloat16>(const DenseCombine&);

}  // namespace paceline::device::cuda::reference
