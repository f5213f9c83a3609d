// Every kernel against the reference, bit by bit, and against float64.
#pragma once

#include "device/cuda/codec.h"
#include "driver.h"

namespace bench {

enum class Extent {
  kFull,      ///< all sizes up to 100 million elements
  kSanitizer  ///< small sizes: each access is watched
};

/// Prints one line per codec; false when anything differed.
bool check(const Gpu& gpu, const paceline::device::cuda::Kernels& kernels, Extent extent);
/// The same for sparse rows and segments.
bool check_tensors(const Gpu& gpu, const paceline::device::cuda::Kernels& kernels, Extent extent);

}  // namespace bench
