#include <fmt/format.h>

#include <algorithm>

#include "device/cuda/enqueue.h"

namespace paceline::device::cuda {
namespace {

using drivers::cuda::DevicePtr;

constexpr uint64_t padded(uint64_t bytes) { return (bytes + 15) / 16 * 16; }

Status invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }

uint64_t row_bytes(const RowFormat& format) {
  return padded(format.row_elements * dtype_size(format.values));
}

Status check_rows(const RowFormat& format) {
  if (format.dtype != DType::kFloat32 && format.dtype != DType::kFloat16 &&
      format.dtype != DType::kBFloat16)
    return invalid(fmt::format("sparse rows: dtype {} is not one of float32, float16, bfloat16",
                               dtype_name(format.dtype)));
  if (format.values != format.dtype && format.values != DType::kFloat16 &&
      (format.values != DType::kBFloat16 || format.dtype != DType::kFloat32))
    return invalid(fmt::format("sparse rows: values of {} for a gradient of {}",
                               dtype_name(format.values), dtype_name(format.dtype)));
  if (format.rows == 0 || format.rows > kMaxElements || format.row_elements == 0)
    return invalid(
        fmt::format("sparse rows: {} rows of {} elements", format.rows, format.row_elements));
  if (format.capacity == 0 || format.capacity > format.rows)
    return invalid(
        fmt::format("sparse rows: capacity {} is not 1 to {} rows", format.capacity, format.rows));
  return Status::ok();
}

/// Of kernels that are listed in this order: f32_f32, f16_f16, bf16_bf16, float32 with fp16 on the wire, bfloat16 with,
/// float32 with bf16.
KernelId of_rows(KernelId first, const RowFormat& format) {
  int step = format.dtype == DType::kFloat32 ? 0 : format.dtype == DType::kFloat16 ? 1 : 2;
  if (format.values != format.dtype)
    step = format.values == DType::kBFloat16 ? 5 : format.dtype == DType::kFloat32 ? 3 : 4;
  return static_cast<KernelId>(static_cast<int>(first) + step);
}

uint32_t warps_grid(uint64_t rows) {
  constexpr uint64_t kWarps = kRowThreads / 32;
  return static_cast<uint32_t>((rows + kWarps - 1) / kWarps);
}

}  // namespace

uint64_t encoded_row_bytes(const RowFormat& format) {
  return used_row_bytes(format, format.capacity);
}

uint64_t used_row_bytes(const RowFormat& format, uint64_t count) {
  return kRowHead + padded(count * sizeof(uint32_t)) + count * row_bytes(format);
}

uint64_t row_state_bytes(const RowFormat& format) { return padded(format.rows); }

Status enqueue_encode_rows(Launcher& launcher, const RowFormat& format,
                           const EncodeRowsArguments& a) {
  PACELINE_RETURN_IF_ERROR(check_rows(format));
  PACELINE_RETURN_IF_ERROR(check_aligned(a.gradient, "gradient", true));
  PACELINE_RETURN_IF_ERROR(check_aligned(a.encoded, "encoded", true));
  PACELINE_RETURN_IF_ERROR(check_aligned(a.state, "state", true));
  RowsEncode argument{a.gradient,      a.state,           a.encoded,
                      a.report,        format.rows,       format.row_elements,
                      format.capacity, row_bytes(format), a.scale};
  const KernelId flag =
      format.dtype == DType::kFloat32 ? KernelId::rows_flag_32 : KernelId::rows_flag_16;
  PACELINE_RETURN_IF_ERROR(launcher.launch(flag, warps_grid(format.rows), kRowThreads, &argument));
  PACELINE_RETURN_IF_ERROR(launcher.launch(KernelId::rows_list, 1, kListThreads, &argument));
  return launcher.launch(of_rows(KernelId::rows_encode_f32_f32, format),
                         warps_grid(format.capacity), kRowThreads, &argument);
}

Status enqueue_combine_rows(Launcher& launcher, const RowFormat& format,
                            const CombineRowsArguments& a) {
  PACELINE_RETURN_IF_ERROR(check_rows(format));
  if (a.encoded.empty() || a.encoded.size() > kMaxSources)
    return invalid(fmt::format("sparse rows: {} encodings to combine, not 1 to {}",
                               a.encoded.size(), kMaxSources));
  PACELINE_RETURN_IF_ERROR(check_aligned(a.output, "output", true));
  for (const DevicePtr encoded : a.encoded)
    PACELINE_RETURN_IF_ERROR(check_aligned(encoded, "an encoding", true));
  RowsCombine argument{};
  argument.output = a.output;
  argument.rows = format.rows;
  argument.row_elements = format.row_elements;
  argument.capacity = format.capacity;
  argument.row_bytes = row_bytes(format);
  argument.scale = a.scale;
  argument.sources = static_cast<uint32_t>(a.encoded.size());
  std::copy(a.encoded.begin(), a.encoded.end(), argument.encoded);
  return launcher.launch(of_rows(KernelId::rows_combine_f32_f32, format), warps_grid(format.rows),
                         kRowThreads, &argument);
}

Status enqueue_copy(Launcher& launcher, std::span<const Segment> segments, DevicePtr buffer,
                    Direction direction) {
  for (const Segment& segment : segments)
    if (segment.bytes != 0 && (segment.tensor == 0 || buffer == 0))
      return invalid(fmt::format("packing: the {} is missing", buffer == 0 ? "buffer" : "tensor"));
  CopySegments argument{};
  const auto flush = [&] {
    const uint32_t blocks = argument.first[argument.segments];
    if (blocks == 0) return Status::ok();
    Status status = launcher.launch(KernelId::copy_segments, blocks, kCopyThreads, &argument);
    argument.segments = 0;
    return status;
  };
  for (const Segment& segment : segments) {
    if (segment.bytes == 0) continue;
    const uint64_t blocks = (segment.bytes + kCopyBytes - 1) / kCopyBytes;
    if (argument.segments == kCopySegments ||
        argument.first[argument.segments] + blocks > INT32_MAX)
      PACELINE_RETURN_IF_ERROR(flush());
    const uint32_t i = argument.segments++;
    argument.first[i + 1] = argument.first[i] + static_cast<uint32_t>(blocks);
    argument.from[i] = direction == Direction::kPack ? segment.tensor : buffer + segment.offset;
    argument.to[i] = direction == Direction::kPack ? buffer + segment.offset : segment.tensor;
    argument.bytes[i] = segment.bytes;
  }
  return argument.segments == 0 ? Status::ok() : flush();
}

}  // namespace paceline::device::cuda
