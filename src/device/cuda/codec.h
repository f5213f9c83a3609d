// Codecs on the device: what the path for CUDA tensors does to a piece of a gradient before and after the wire.
//
// Every call enqueues on a stream and returns. The sizes are known beforehand (the host never reads a count back).
// The same functions exist as plain C++ in reference.h: the kernels are checked against them bit by bit, and the
// simulated device of drivers/cuda/mock.h runs them.
//
// Numerics. v is what a codec starts from: gradient · scale + residual, rounded once (a fused multiply-add); with
// momentum v = velocity' + residual, where velocity' = momentum · velocity + gradient · scale (the product rounded, then
// fused). The identity `decoded + new residual == v` is exact for top-k and int8, with either kind of values. Casts
// round once to nearest even; what is finite and out of range becomes the largest number of the type. All results are
// functions of the inputs alone: same inputs, same bits, on every device and on the reference.
//
// Inf or NaN. In a cast or a copy they travel as they are. A top-k tile (kTopKTile elements) or an int8 block
// (kInt8Block) that holds one decodes to NaN as a whole, and keeps its residual and velocity. `report` says so on the
// sending rank; the residual as a whole is taken back by keeping `residual`, when next_residual is another buffer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "device/cuda/tensors.h"
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

inline constexpr uint64_t kMaxElements = uint64_t{1} << 31;  ///< of one piece
inline constexpr uint32_t kMaxSources = 256;                 ///< encodings added by one combine
inline constexpr uint32_t kMaxAddends = 15;                  ///< gradients added by one encode

/// Bytes that the encoding of `elements` takes on the wire: fixed by the format, a multiple of 16. layout.h draws it.
[[nodiscard]] uint64_t encoded_bytes(const WireFormat& format, uint64_t elements);
/// Bytes of EncodeArguments::state, a multiple of 16; 0 for codecs other than top-k. About 17 MB for 100 M elements at
/// 1 %, 4 % of a float32 gradient; never more than 1.5 times it.
[[nodiscard]] uint64_t state_bytes(const WireFormat& format, uint64_t elements);
/// Entries that top-k may send; 0 for other codecs.
[[nodiscard]] uint64_t top_k_entries(const WireFormat& format, uint64_t elements);

inline constexpr uint32_t kReportNonFinite = 1;  ///< an Inf or NaN in the gradient, scaled
inline constexpr uint32_t kReportSaturated = 2;  ///< a cast met a number that its type can't hold
inline constexpr uint32_t kReportCorrupted = 4;  ///< combine met an impossible count or position
inline constexpr uint32_t kReportRows = 8;       ///< more rows than the capacity; see tensors.h

struct EncodeArguments {
  drivers::cuda::DevicePtr gradient = 0;  ///< `elements` of format.dtype, aligned to 16 bytes
  /// top-k: more gradients of that kind, read in the same pass. `gradient` below is then gradient + addends[0] + …, in
  /// float32, rounded to the dtype once: what combine makes of them as kExact.
  std::span<const drivers::cuda::DevicePtr> addends;
  uint64_t elements = 0;  ///< at most kMaxElements
  float scale = 1;        ///< multiplied in before encoding (1 / ranks for an average)
  drivers::cuda::DevicePtr residual = 0;  ///< float32; top-k and int8 (0: no error feedback)
  drivers::cuda::DevicePtr next_residual =
      0;                                  ///< where the new residual goes; may equal `residual`
  drivers::cuda::DevicePtr velocity = 0;  ///< float32; top-k with momentum correction
  drivers::cuda::DevicePtr next_velocity =
      0;  ///< may equal `velocity`; zero where |v| reached the threshold
  float momentum = 0;
  /// encoded_bytes(), aligned to 16 bytes; every byte is written. kExact: may equal `gradient`.
  drivers::cuda::DevicePtr encoded = 0;
  /// top-k: state_bytes() of scratch, aligned to 16 bytes. Nothing in it is carried from call to call, so pieces that
  /// are encoded on the same stream may share it (sized for the largest).
  drivers::cuda::DevicePtr state = 0;
  uint64_t state_capacity = 0;  ///< bytes at `state`; fewer than state_bytes() are refused
  /// uint32, or 0: kReport… bits are added to it. The caller clears it.
  drivers::cuda::DevicePtr report = 0;
};

struct CombineArguments {
  std::span<const drivers::cuda::DevicePtr> encoded;  ///< one per node, added in this order
  uint64_t elements = 0;
  float scale = 1;                      ///< multiplied into the sum
  drivers::cuda::DevicePtr output = 0;  ///< format.dtype; overwritten; aligned to 16 bytes
  drivers::cuda::DevicePtr report = 0;  ///< as above; top-k
};

struct Image;  // images.h

class Kernels {
 public:
  /// Loads the code for `device` into the current context, which must be one of that device; it stays until unload(), or
  /// as long as the context. All of it is on the device afterwards: no later call loads or allocates.
  /// kUnsupported: this build holds no device code, or none for this device (naming its compute capability).
  static Result<Kernels> load(const drivers::cuda::Api& api, drivers::cuda::Device device);
  /// The same with other code: reference_images() on a simulated device.
  static Result<Kernels> load(const drivers::cuda::Api& api, drivers::cuda::Device device,
                              std::span<const Image> images);

  /// Nothing may be launched afterwards, and no launch be under way. The context is current.
  void unload();

  Status encode(const WireFormat& format, const EncodeArguments& arguments,
                drivers::cuda::Stream stream) const;
  /// output = scale × (decode(encoded[0]) + decode(encoded[1]) + …), in float32, rounded to the gradient's dtype once.
  /// What is out of the dtype's range becomes infinite, so that a loss scaler sees it.
  Status combine(const WireFormat& format, const CombineArguments& arguments,
                 drivers::cuda::Stream stream) const;

  Status encode_rows(const RowFormat& format, const EncodeRowsArguments& arguments,
                     drivers::cuda::Stream stream) const;
  /// output = scale × (encoded[0] + encoded[1] + …), rows that nobody sent zero; sums as in combine.
  Status combine_rows(const RowFormat& format, const CombineRowsArguments& arguments,
                      drivers::cuda::Stream stream) const;
  /// Copies the tensors into the buffer, or from it: one launch for each 128. They must not overlap.
  Status pack(std::span<const Segment> segments, drivers::cuda::DevicePtr buffer,
              drivers::cuda::Stream stream) const;
  Status unpack(std::span<const Segment> segments, drivers::cuda::DevicePtr buffer,
                drivers::cuda::Stream stream) const;

 private:
  const drivers::cuda::Api* api_ = nullptr;
  int multiprocessors_ = 1;
  std::vector<drivers::cuda::Function> functions_;  // by KernelId
  std::vector<drivers::cuda::Module> modules_;
};

}  // namespace paceline::device::cuda
