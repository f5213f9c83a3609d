// Codecs on the device: what the path for CUDA tensors does to a piece of a gradient before and after the wire.
//
// Every call enqueues on a stream and returns. The sizes are known beforehand (the host never reads a count back).
// The same functions exist as plain C++ in reference.h: the kernels are checked against them bit by bit, and the
// simulated device of drivers/cuda/mock.h runs them.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "base/types.h"
#include "drivers/cuda/api.h"

namespace paceline::device::cuda {

enum class WireCodec : int { kExact = 0, kFp16 = 1, kBf16 = 2, kTopK = 3, kInt8 = 4 };

/// What a piece travels as.
struct WireFormat {
  WireCodec codec = WireCodec::kExact;
  DType dtype = DType::kFloat32;  ///< of the gradient: float32, float16 or bfloat16
  double ratio = 0.01;            ///< top-k: entries at most floor(ratio × elements), at least 1
  bool fp16_values = true;        ///< top-k
};

/// Bytes that the encoding of `elements` takes on the wire: fixed by the format, a multiple of 16.
[[nodiscard]] uint64_t encoded_bytes(const WireFormat& format, uint64_t elements);

struct EncodeArguments {
  drivers::cuda::DevicePtr gradient = 0;  ///< `elements` of format.dtype, aligned to 16 bytes
  uint64_t elements = 0;
  float scale = 1;  ///< multiplied in before encoding (1 / ranks for an average)
  drivers::cuda::DevicePtr residual = 0;  ///< float32; top-k and int8 (0: no error feedback)
  drivers::cuda::DevicePtr next_residual =
      0;                                  ///< where the new residual goes; may equal `residual`
  drivers::cuda::DevicePtr velocity = 0;  ///< float32; top-k with momentum correction
  float momentum = 0;
  drivers::cuda::DevicePtr encoded = 0;  ///< encoded_bytes(), aligned to 16 bytes
  drivers::cuda::DevicePtr state =
      0;  ///< top-k: kStateBytes that stay with the piece from step to step
  drivers::cuda::DevicePtr report =
      0;  ///< uint32: becomes non-zero when the gradient holds an Inf or NaN
};
inline constexpr uint64_t kStateBytes = 4096;

struct CombineArguments {
  std::span<const drivers::cuda::DevicePtr> encoded;  ///< one per node, added in this order
  uint64_t elements = 0;
  float scale = 1;                      ///< multiplied into the sum
  drivers::cuda::DevicePtr output = 0;  ///< format.dtype; overwritten
};

class Kernels {
 public:
  /// Loads the module for the current context. kUnsupported: no code for this device, naming its compute capability.
  static Result<Kernels> load(const drivers::cuda::Api& api);

  Status encode(const WireFormat& format, const EncodeArguments& arguments,
                drivers::cuda::Stream stream) const;
  /// output = scale × (decode(encoded[0]) + decode(encoded[1]) + …), in float32, rounded to the gradient's dtype once.
  Status combine(const WireFormat& format, const CombineArguments& arguments,
                 drivers::cuda::Stream stream) const;

 private:
  const drivers::cuda::Api* api_ = nullptr;
  drivers::cuda::Module module_ = nullptr;
};

}  // namespace paceline::device::cuda
