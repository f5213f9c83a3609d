// The vocabulary that every layer shares: ranks, element types, reductions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace paceline {

/// Position of a process in a job (or, inside a group, in that group), counted from 0.
using Rank = int32_t;

/// Element types of buffers handed to collectives. The values are part of the C ABI (comm.h).
enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kInt8 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kUInt8 = 8,
  kBool = 9,
};
inline constexpr int kDTypeCount = 10;

/// Bytes of one element; 0 for a value outside the enumeration.
constexpr std::size_t dtype_size(DType t) {
  switch (t) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
      return 1;
  }
  return 0;
}

constexpr std::string_view dtype_name(DType t) {
  constexpr std::string_view kNames[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                         "int16",   "int32",   "int64",   "uint8",    "bool"};
  auto i = static_cast<std::size_t>(t);
  return i < kDTypeCount ? kNames[i] : "unknown";
}

constexpr bool dtype_is_float(DType t) { return static_cast<uint8_t>(t) <= 3; }

/// Element-wise reductions. Average is a sum, divided once by the group's size where the sum is
/// complete (floating types only). On bool: sum and max are "or", product and min are "and".
/// The values are part of the C ABI (comm.h).
enum class ReduceOp : uint8_t { kSum = 0, kAverage = 1, kMin = 2, kMax = 3, kProduct = 4 };

constexpr std::string_view reduce_op_name(ReduceOp op) {
  constexpr std::string_view kNames[] = {"sum", "average", "min", "max", "product"};
  auto i = static_cast<std::size_t>(op);
  return i < 5 ? kNames[i] : "unknown";
}

}  // namespace paceline
