// The device code that was built into this library: fatbins, with machine code for some architectures and PTX.
#pragma once

#include <span>

namespace paceline::device::cuda {

struct Image {
  const void* data;
  const char* file;  ///< what it was compiled from, without .cu
};

/// Empty where the build found no CUDA compiler.
[[nodiscard]] std::span<const Image> images();

}  // namespace paceline::device::cuda
