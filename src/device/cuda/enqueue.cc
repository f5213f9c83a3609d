#include "device/cuda/enqueue.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "device/cuda/layout.h"

namespace paceline::device::cuda {
namespace {

using drivers::cuda::DevicePtr;

/// Samples that make the count of entries follow the ratio: with s samples above the threshold the count's relative
/// spread is 1 / sqrt(s), 0.83 % here.
constexpr double kSamplesAbove = 14400;
/// How far below `entries` the threshold aims, in spreads: more than `entries` are met once in 160 calls.
constexpr double kMargin = 2.5;
/// Up to so many elements all are sampled: it costs less than what the launches cost.
constexpr uint64_t kSampleAll = uint64_t{1} << 21;

Status invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }

Status check_format(const WireFormat& format, uint64_t elements) {
  if (format.dtype != DType::kFloat32 && format.dtype != DType::kFloat16 &&
      format.dtype != DType::kBFloat16)
    return invalid(
        fmt::format("device codec: dtype {} is not one of float32, float16, bfloat16: reduce it "
                    "without a codec",
                    dtype_name(format.dtype)));
  if (static_cast<int>(format.codec) < 0 || static_cast<int>(format.codec) > 4)
    return invalid(
        fmt::format("device codec: no codec has number {}", static_cast<int>(format.codec)));
  if (format.codec == WireCodec::kTopK && !(format.ratio > 0 && format.ratio <= 1))
    return invalid(
        fmt::format("device codec: ratio {} is not above 0 and at most 1", format.ratio));
  if (elements > kMaxElements)
    return invalid(fmt::format("device codec: {} elements in one piece, at most {}: cut it",
                               elements, kMaxElements));
  return Status::ok();
}

uint32_t grid(uint64_t elements, uint64_t each, uint64_t most) {
  return static_cast<uint32_t>(std::clamp<uint64_t>((elements + each - 1) / each, 1, most));
}

/// The kernel of a family that lists float32, float16, bfloat16 in this order.
KernelId of_dtype(KernelId float32, DType dtype) {
  const int step = dtype == DType::kFloat32 ? 0 : dtype == DType::kFloat16 ? 1 : 2;
  return static_cast<KernelId>(static_cast<int>(float32) + step);
}

KernelId dense_encode_kernel(DType from, DType wire) {
  if (from == DType::kFloat32) return of_dtype(KernelId::encode_f32_f32, wire);
  const bool to_half = wire == DType::kFloat16;
  if (from == DType::kFloat16)
    return to_half ? KernelId::encode_f16_f16 : KernelId::encode_f16_bf16;
  return to_half ? KernelId::encode_bf16_f16 : KernelId::encode_bf16_bf16;
}

KernelId dense_combine_kernel(DType wire, DType to) {
  if (to == DType::kFloat32) return of_dtype(KernelId::combine_f32_f32, wire);
  const bool from_half = wire == DType::kFloat16;
  if (to == DType::kFloat16)
    return from_half ? KernelId::combine_f16_f16 : KernelId::combine_bf16_f16;
  return from_half ? KernelId::combine_f16_bf16 : KernelId::combine_bf16_bf16;
}

Status encode_dense(Launcher& launcher, const WireFormat& format, const EncodeArguments& a) {
  DenseEncode argument{a.gradient, a.encoded, a.report, a.elements, a.scale};
  return launcher.launch(dense_encode_kernel(format.dtype, dense_wire_dtype(format)),
                         grid(a.elements, kDenseTile, kDenseBlocks * launcher.multiprocessors()),
                         kDenseThreads, &argument);
}

Status encode_int8(Launcher& launcher, const WireFormat& format, const EncodeArguments& a) {
  const Int8Layout layout = int8_layout(a.elements);
  Int8Encode argument{a.gradient, a.residual, a.next_residual,
                      a.report,   a.encoded,  a.encoded + layout.values,
                      a.elements, a.scale};
  constexpr uint64_t kElements = uint64_t{kInt8Threads} / 32 * kInt8Block;
  return launcher.launch(of_dtype(KernelId::int8_encode_f32, format.dtype),
                         grid(a.elements, kElements, UINT32_MAX), kInt8Threads, &argument);
}

/// Which chunks are sampled, and the rank in that sample that stands for `entries` in the whole.
void plan_sample(TopK& k) {
  const auto elements = static_cast<double>(k.elements);
  const uint64_t chunks = (k.elements + kSampleChunk - 1) / kSampleChunk;
  const double wanted =
      std::max(kSamplesAbove * elements / k.entries, static_cast<double>(kSampleAll));
  const double most = std::max(elements / 16, static_cast<double>(kSampleAll));
  const double step = std::floor(elements / std::min(wanted, most));
  k.sample_step = step > 1 ? static_cast<uint32_t>(step) : 1;
  k.sample_chunks = static_cast<uint32_t>((chunks + k.sample_step - 1) / k.sample_step);
  if (k.sample_step == 1) {
    k.sample_rank = k.entries;
    return;
  }
  const double above = k.entries * (double{kSampleChunk} * k.sample_chunks / elements);
  k.sample_rank = static_cast<uint32_t>(std::max(1.0, above - kMargin * std::sqrt(above)));
}

Status encode_top_k(Launcher& launcher, const WireFormat& format, const EncodeArguments& a) {
  const TopKLayout layout = top_k_layout(format, a.elements);
  const TopKScratch scratch = top_k_scratch(format, a.elements);
  TopK k{};
  k.gradient = a.gradient;
  k.residual = a.residual;
  k.next_residual = a.next_residual;
  k.velocity = a.velocity;
  k.next_velocity = a.next_velocity;
  k.report = a.report;
  k.state = a.state;
  k.groups = a.state + scratch.groups;
  k.counts = a.state + scratch.counts;
  k.slot_offsets = a.state + scratch.slot_offsets;
  k.slot_values = a.state + scratch.slot_values;
  k.slot = scratch.slot;
  k.starts = a.encoded;
  k.exponents = a.encoded + layout.exponents;
  k.offsets = a.encoded + layout.offsets;
  k.values = a.encoded + layout.values;
  k.end = a.encoded + layout.bytes;
  k.elements = a.elements;
  k.entries = layout.entries;
  k.tiles = layout.tiles;
  k.scale = a.scale;
  k.momentum = a.momentum;
  k.fp16_values = format.fp16_values ? 1 : 0;
  k.addend_count = static_cast<uint32_t>(a.addends.size());
  std::copy(a.addends.begin(), a.addends.end(), k.addends);
  plan_sample(k);
  PACELINE_RETURN_IF_ERROR(launcher.clear(a.state, scratch.counts));
  const uint32_t sampling = grid(uint64_t{k.sample_chunks} * kSampleChunk, 4 * kSampleThreads,
                                 2 * launcher.multiprocessors());
  PACELINE_RETURN_IF_ERROR(launcher.launch(of_dtype(KernelId::topk_coarse_f32, format.dtype),
                                           sampling, kSampleThreads, &k));
  PACELINE_RETURN_IF_ERROR(launcher.launch(of_dtype(KernelId::topk_fine_f32, format.dtype),
                                           sampling, kSampleThreads, &k));
  const bool sums = k.addend_count > 0;
  const KernelId plain = sums ? KernelId::topk_select_sum_f32 : KernelId::topk_select_f32;
  const KernelId corrected = sums ? KernelId::topk_momentum_sum_f32 : KernelId::topk_momentum_f32;
  const KernelId select = a.velocity != 0 ? corrected : plain;
  PACELINE_RETURN_IF_ERROR(
      launcher.launch(of_dtype(select, format.dtype), k.tiles, kTopKThreads, &k));
  return launcher.launch(of_dtype(KernelId::topk_gather_f32, format.dtype),
                         grid(k.tiles, kGatherThreads / 32, UINT32_MAX), kGatherThreads, &k);
}

template <class Argument>
void set_sources(Argument& argument, const CombineArguments& a) {
  argument.sources = static_cast<uint32_t>(a.encoded.size());
  std::copy(a.encoded.begin(), a.encoded.end(), argument.encoded);
}

Status combine_top_k(Launcher& launcher, const WireFormat& format, const CombineArguments& a) {
  const TopKLayout layout = top_k_layout(format, a.elements);
  TopKCombine argument{};
  argument.output = a.output;
  argument.report = a.report;
  argument.elements = a.elements;
  argument.exponents_offset = layout.exponents;
  argument.offsets_offset = layout.offsets;
  argument.values_offset = layout.values;
  argument.entries = layout.entries;
  argument.tiles = layout.tiles;
  argument.scale = a.scale;
  argument.fp16_values = format.fp16_values ? 1 : 0;
  set_sources(argument, a);
  return launcher.launch(of_dtype(KernelId::topk_combine_f32, format.dtype),
                         grid(layout.tiles, kCombineTiles, UINT32_MAX), kTopKCombineThreads,
                         &argument);
}

Status combine_int8(Launcher& launcher, const WireFormat& format, const CombineArguments& a) {
  Int8Combine argument{};
  argument.output = a.output;
  argument.elements = a.elements;
  argument.values_offset = int8_layout(a.elements).values;
  argument.scale = a.scale;
  set_sources(argument, a);
  return launcher.launch(of_dtype(KernelId::int8_combine_f32, format.dtype),
                         grid(a.elements, kDenseTile, kDenseBlocks * launcher.multiprocessors()),
                         kDenseThreads, &argument);
}

Status combine_dense(Launcher& launcher, const WireFormat& format, const CombineArguments& a) {
  DenseCombine argument{};
  argument.output = a.output;
  argument.elements = a.elements;
  argument.scale = a.scale;
  set_sources(argument, a);
  return launcher.launch(dense_combine_kernel(dense_wire_dtype(format), format.dtype),
                         grid(a.elements, kDenseTile, kDenseBlocks * launcher.multiprocessors()),
                         kDenseThreads, &argument);
}

Status check_encode(const WireFormat& format, const EncodeArguments& a) {
  PACELINE_RETURN_IF_ERROR(check_format(format, a.elements));
  PACELINE_RETURN_IF_ERROR(check_aligned(a.gradient, "gradient", true));
  PACELINE_RETURN_IF_ERROR(check_aligned(a.encoded, "encoded", true));
  const bool top_k = format.codec == WireCodec::kTopK;
  const bool feedback = a.residual != 0 && (top_k || format.codec == WireCodec::kInt8);
  PACELINE_RETURN_IF_ERROR(check_aligned(a.residual, "residual", false));
  PACELINE_RETURN_IF_ERROR(check_aligned(a.next_residual, "next_residual", feedback));
  if (!top_k && !a.addends.empty())
    return invalid("device codec: only top-k adds gradients up: combine them first");
  if (!top_k) return Status::ok();
  if (a.addends.size() > kMaxAddends)
    return invalid(fmt::format("device codec: {} gradients to add, at most {}: combine them first",
                               a.addends.size(), kMaxAddends));
  for (const DevicePtr addend : a.addends)
    PACELINE_RETURN_IF_ERROR(check_aligned(addend, "an addend", true));
  PACELINE_RETURN_IF_ERROR(check_aligned(a.velocity, "velocity", a.momentum != 0));
  PACELINE_RETURN_IF_ERROR(check_aligned(a.next_velocity, "next_velocity", a.velocity != 0));
  if (a.velocity != 0 && a.residual == 0)
    return invalid("device codec: momentum correction needs a residual");
  PACELINE_RETURN_IF_ERROR(check_aligned(a.state, "state", true));
  const uint64_t wanted = state_bytes(format, a.elements);
  if (a.state_capacity < wanted)
    return invalid(fmt::format("device codec: state of {} bytes; top-k of {} elements needs {}",
                               a.state_capacity, a.elements, wanted));
  return Status::ok();
}

}  // namespace

Status check_aligned(DevicePtr pointer, const char* what, bool needed) {
  if (pointer == 0 && needed) return invalid(fmt::format("device codec: {} is missing", what));
  if (pointer % 16 != 0)
    return invalid(fmt::format("device codec: {} at {:#x} is not aligned to 16 bytes", what,
                               static_cast<uint64_t>(pointer)));
  return Status::ok();
}

Status enqueue_encode(Launcher& launcher, const WireFormat& format,
                      const EncodeArguments& arguments) {
  if (arguments.elements == 0) return check_format(format, 0);
  PACELINE_RETURN_IF_ERROR(check_encode(format, arguments));
  if (format.codec == WireCodec::kTopK) return encode_top_k(launcher, format, arguments);
  if (format.codec == WireCodec::kInt8) return encode_int8(launcher, format, arguments);
  return encode_dense(launcher, format, arguments);
}

Status enqueue_combine(Launcher& launcher, const WireFormat& format,
                       const CombineArguments& arguments) {
  PACELINE_RETURN_IF_ERROR(check_format(format, arguments.elements));
  if (arguments.encoded.empty() || arguments.encoded.size() > kMaxSources)
    return invalid(fmt::format("device codec: {} encodings to combine, not 1 to {}",
                               arguments.encoded.size(), kMaxSources));
  if (arguments.elements == 0) return Status::ok();
  PACELINE_RETURN_IF_ERROR(check_aligned(arguments.output, "output", true));
  for (const DevicePtr encoded : arguments.encoded)
    PACELINE_RETURN_IF_ERROR(check_aligned(encoded, "an encoding", true));
  if (format.codec == WireCodec::kTopK) return combine_top_k(launcher, format, arguments);
  if (format.codec == WireCodec::kInt8) return combine_int8(launcher, format, arguments);
  return combine_dense(launcher, format, arguments);
}

}  // namespace paceline::device::cuda
