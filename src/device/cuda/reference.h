// The codecs of codec.h as plain C++ on host memory: what the kernels are checked against, bit by bit, and what the
// simulated device runs in their place. Clear rather than fast.
#pragma once

#include <span>

#include "base/status.h"
#include "device/cuda/codec.h"
#include "device/cuda/images.h"

namespace paceline::device::cuda::reference {

/// What a launch of the kernel would do, at once; its grid does not matter. `arguments` are a launch's: one pointer to
/// the kernel's struct (kernel_arguments.h), whose addresses are host memory.
using KernelFunction = void (*)(void** arguments);

struct NamedKernel {
  const char* name;  ///< as cuModuleGetFunction takes it
  KernelFunction run;
};

/// All kernels that Kernels launches.
[[nodiscard]] std::span<const NamedKernel> kernels();
/// In place of the device code, for a simulated device: the kernels' files without content, in any build.
[[nodiscard]] std::span<const Image> images();

/// Kernels' functions on host memory.
Status encode(const WireFormat& format, const EncodeArguments& arguments);
Status combine(const WireFormat& format, const CombineArguments& arguments);
Status encode_rows(const RowFormat& format, const EncodeRowsArguments& arguments);
Status combine_rows(const RowFormat& format, const CombineRowsArguments& arguments);
Status pack(std::span<const Segment> segments, drivers::cuda::DevicePtr buffer);
Status unpack(std::span<const Segment> segments, drivers::cuda::DevicePtr buffer);

}  // namespace paceline::device::cuda::reference
