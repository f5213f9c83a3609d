// Times of the kernels beside the bandwidth of a copy in the same run.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "device/cuda/codec.h"
#include "driver.h"

namespace bench {

struct Row {
  std::string name;
  uint64_t elements;
  double milliseconds, best, worst;
  double bytes;  ///< the fewest that must be read and written; 0: a part of another row
  std::string note;
};

inline constexpr int kRuns = 31, kWarmUp = 4;

/// Medians of single runs between two events; `run` is given the number of the run, to take other buffers each time.
/// `before` is written first: that empties the cache, and lasts until the host has enqueued the run. `after` is called
/// when the run is over.
template <class Run, class After>
Row time_of(const Gpu& gpu, const Memory& before, std::string name, uint64_t elements, double bytes,
            Run run, After after) {
  std::vector<double> times;
  for (int i = 0; i < kRuns + kWarmUp; ++i) {
    before.fill(static_cast<unsigned char>(i));
    const Event begin = gpu.record();
    run(i);
    const Event end = gpu.record();
    const double time = gpu.between(begin, end);
    if (i >= kWarmUp) times.push_back(time);
    after(i);
  }
  std::sort(times.begin(), times.end());
  return {std::move(name), elements, times[times.size() / 2], times.front(), times.back(),
          bytes,           ""};
}
template <class Run>
Row time_of(const Gpu& gpu, const Memory& before, std::string name, uint64_t elements, double bytes,
            Run run) {
  return time_of(gpu, before, std::move(name), elements, bytes, run, [](int) {});
}

/// Sparse rows and segments; `flush` is for time_of's `before`.
std::vector<Row> measure_tensors(const Gpu& gpu, const paceline::device::cuda::Kernels& kernels,
                                 const Memory& flush);

/// Prints a table; writes JSON to `json` when that is not empty.
void measure(const Gpu& gpu, const paceline::device::cuda::Kernels& kernels, uint64_t elements,
             const std::string& json);

}  // namespace bench
