// The dense codecs: casts that need no state.
#include "codec/codec.h"
#include "device/cpu/casts.h"
#include "device/cpu/kernels.h"

namespace paceline::codec {
namespace {

DType wire_type(const plan::CodecSpec& spec) {
  if (spec.codec == plan::Codec::kFp16) return DType::kFloat16;
  if (spec.codec == plan::Codec::kBf16) return DType::kBFloat16;
  return DType::kFloat32;
}

}  // namespace

void encode_dense(const plan::CodecSpec& spec, std::span<const float> src, std::byte* dst) {
  const DType wire = wire_type(spec);
  if (wire == DType::kFloat32) return cpu::copy(dst, src.data(), src.size_bytes());
  cpu::narrow(wire, dst, src.data(), static_cast<float>(spec.scale), src.size());
}

void decode_dense(const plan::CodecSpec& spec, const std::byte* src, std::span<float> dst) {
  const DType wire = wire_type(spec);
  if (wire == DType::kFloat32) return cpu::copy(dst.data(), src, dst.size_bytes());
  cpu::widen(wire, dst.data(), src, static_cast<float>(spec.scale), dst.size());
}

void decode_reduce_dense(const plan::CodecSpec& spec, ReduceOp op, const std::byte* src,
                         std::span<float> dst) {
  const DType wire = wire_type(spec);
  if (wire == DType::kFloat32) return cpu::reduce(DType::kFloat32, op, dst.data(), src, dst.size());
  cpu::widen_reduce(wire, op, dst.data(), src, static_cast<float>(spec.scale), dst.size());
}

}  // namespace paceline::codec
