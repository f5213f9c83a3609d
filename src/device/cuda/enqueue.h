// From a codec's arguments to launches: checks, layout, grids. Shared by the device (kernels.cc) and the reference.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/cuda/codec.h"
#include "device/cuda/kernel_arguments.h"

namespace paceline::device::cuda {

/// Where launches go.
class Launcher {
 public:
  virtual ~Launcher() = default;
  /// Sets `bytes` to zero.
  virtual Status clear(drivers::cuda::DevicePtr memory, uint64_t bytes) = 0;
  /// `argument` is the kernel's struct; it is copied.
  virtual Status launch(KernelId kernel, uint32_t blocks, uint32_t threads, void* argument) = 0;
  /// Of the device: grids are sized by them.
  [[nodiscard]] virtual uint32_t multiprocessors() const = 0;
};

/// kInvalidArgument names what is wrong; nothing has been launched then.
Status enqueue_encode(Launcher& launcher, const WireFormat& format,
                      const EncodeArguments& arguments);
Status enqueue_combine(Launcher& launcher, const WireFormat& format,
                       const CombineArguments& arguments);
Status enqueue_encode_rows(Launcher& launcher, const RowFormat& format,
                           const EncodeRowsArguments& arguments);
Status enqueue_combine_rows(Launcher& launcher, const RowFormat& format,
                            const CombineRowsArguments& arguments);

enum class Direction { kPack, kUnpack };
Status enqueue_copy(Launcher& launcher, std::span<const Segment> segments,
                    drivers::cuda::DevicePtr buffer, Direction direction);

/// kInvalidArgument when it is missing though needed, or not aligned to 16 bytes.
Status check_aligned(drivers::cuda::DevicePtr pointer, const char* what, bool needed);

}  // namespace paceline::device::cuda
