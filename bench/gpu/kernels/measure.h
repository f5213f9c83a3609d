// Times of the kernels beside the bandwidth of a copy in the same run.
#pragma once

#include <string>

#include "device/cuda/codec.h"
#include "driver.h"

namespace bench {

/// Prints a table; writes JSON to `json` when that is not empty.
void measure(const Gpu& gpu, const paceline::device::cuda::Kernels& kernels, uint64_t elements,
             const std::string& json);

}  // namespace bench
