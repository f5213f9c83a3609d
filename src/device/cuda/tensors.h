// Rows and segments: an untied embedding's gradient as the rows that are not zero, and many tensors moved in one launch.
//
// A sparse encoding has room for `capacity` rows; no kernel needs a count from the host. Each node sends its rows that are
// not all zero, in ascending order; what lies beyond the capacity is lost, so the output of such a sum becomes NaN on every
// rank, and the sender's report says kReportRows: the capacity must be a bound, as the number of all rows is.
//
//   count  u32, 12 bytes of zeros          rows that are not zero, even those beyond the capacity
//   rows   u32 × count                     ascending; zeros to a multiple of 16 bytes
//   values count × row_elements            of the wire's type; each row begins at a multiple of 16 bytes, filled up by zeros
//
// That is all of it (used_row_bytes()): what lies behind is neither written nor read.
//
// Values are cast as dense codecs do: rounded once, saturated, Inf and NaN as they are.
#pragma once

#include <cstdint>
#include <span>

#include "base/types.h"
#include "drivers/cuda/api.h"

namespace paceline::device::cuda {

struct RowFormat {
  DType dtype = DType::kFloat32;  ///< of the gradient: float32, float16 or bfloat16
  /// Of the values: the gradient's, or float16; bfloat16 for float32 gradients.
  DType values = DType::kFloat32;
  uint64_t rows = 0;          ///< at most 2^31
  uint64_t row_elements = 0;  ///< at least 1
  uint64_t capacity = 0;      ///< rows that an encoding holds, 1 to rows
};

/// Bytes of an encoding at most, a multiple of 16.
[[nodiscard]] uint64_t encoded_row_bytes(const RowFormat& format);
/// Bytes of an encoding whose head says `count`.
[[nodiscard]] uint64_t used_row_bytes(const RowFormat& format, uint64_t count);
/// Bytes of scratch for the encoder, a multiple of 16. Nothing in it is carried.
[[nodiscard]] uint64_t row_state_bytes(const RowFormat& format);

struct EncodeRowsArguments {
  drivers::cuda::DevicePtr gradient = 0;  ///< rows × row_elements, aligned to 16 bytes
  float scale = 1;
  drivers::cuda::DevicePtr encoded =
      0;  ///< encoded_row_bytes(), aligned to 16; what is used is written
  drivers::cuda::DevicePtr state = 0;   ///< row_state_bytes(), aligned to 16
  drivers::cuda::DevicePtr report = 0;  ///< as in EncodeArguments
};

struct CombineRowsArguments {
  std::span<const drivers::cuda::DevicePtr> encoded;  ///< one per node, added in this order
  float scale = 1;
  drivers::cuda::DevicePtr output = 0;  ///< rows × row_elements of dtype; overwritten
};

/// One tensor and its place in a buffer. No alignment is asked; multiples of 16 bytes are fastest.
struct Segment {
  drivers::cuda::DevicePtr tensor = 0;
  uint64_t offset = 0;  ///< bytes from the buffer's start
  uint64_t bytes = 0;
};

}  // namespace paceline::device::cuda
