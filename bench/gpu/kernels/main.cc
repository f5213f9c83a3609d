// gpu_kernels check | sanitize | measure [--elements N] [--json FILE]
#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

#include "check.h"
#include "measure.h"

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  uint64_t elements = 100000000;
  std::string json;
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string_view option = argv[i];
    if (option == "--elements")
      elements = std::strtoull(argv[i + 1], nullptr, 10);
    else if (option == "--json")
      json = argv[i + 1];
    else
      bench::fail(fmt::format("no option {}", option));
  }
  if ((mode != "check" && mode != "sanitize" && mode != "measure") || elements == 0)
    bench::fail("say check, sanitize, or measure [--elements N] [--json FILE]");
  const bench::Gpu gpu;
  const auto kernels = paceline::device::cuda::Kernels::load(gpu.api(), 0);
  if (!kernels.is_ok()) bench::fail(kernels.status().to_string());
  if (mode == "measure") {
    bench::measure(gpu, *kernels, elements, json);
    return 0;
  }
  const auto extent = mode == "check" ? bench::Extent::kFull : bench::Extent::kSanitizer;
  const bool codecs = bench::check(gpu, *kernels, extent);
  return bench::check_tensors(gpu, *kernels, extent) && codecs ? 0 : 1;
}
