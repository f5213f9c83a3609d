// The device code that was built into this library: fatbins, with machine code for some architectures and PTX.
#pragma once

#include <span>

namespace paceline::device::cuda {

struct Image {
  const void* data;
  const char* source;  ///< the file it was compiled from
};

/// Empty where the build found no CUDA compiler.
[[nodiscard]] std::span<const Image> images();

}  // namespace paceline::device::cuda
