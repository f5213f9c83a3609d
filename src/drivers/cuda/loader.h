// Finds the CUDA driver at run time.
#pragma once

#include <string>

#include "base/status.h"
#include "drivers/cuda/api.h"

namespace paceline::drivers::cuda {

/// The driver's oldest version that will do, as cuDriverGetVersion counts: stream memory operations in their second
/// form, which need no permission from the kernel module's options, came with CUDA 11.7.
inline constexpr int kOldestDriver = 11070;

/// libcuda.so.1's functions; the library stays loaded. kUnavailable: no driver on this machine, or one that is too
/// old; the sentence says which and what to install. Thread-safe.
Result<const Api*> load();

/// What is between this process and `device`: nothing (ok), no such device, no permission. Initialises the driver.
Status check_device(const Api& api, int ordinal);

/// A failed call as a Status: "512 MiB of device memory for residuals: there is not enough memory: … (CUDA_ERROR_OUT_OF_MEMORY, 2)".
/// `what` names the call and what it was for.
Status explain(const Api& api, CudaResult error, const std::string& what);

}  // namespace paceline::drivers::cuda

/// Leaves the function with a Status that names the call when it failed.
#define PACELINE_CUDA_CALL(api, function, ...)                                                     \
  do {                                                                                             \
    if (int paceline_cuda_error_code = (api).function(__VA_ARGS__); paceline_cuda_error_code != 0) \
      return paceline::drivers::cuda::explain((api), paceline_cuda_error_code, #function);         \
  } while (0)
