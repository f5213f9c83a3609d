#include "device/cuda/reference.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <vector>

#include "device/cuda/enqueue.h"
#include "device/cuda/reference_kernels.h"

namespace paceline::device::cuda::reference {
namespace {

template <class Argument, void (*kRun)(const Argument&)>
void unwrap(void** arguments) {
  kRun(*static_cast<const Argument*>(arguments[0]));
}

#define PACELINE_BY_DTYPE(argument, kernel)                             \
  unwrap<argument, kernel<Float32>>, unwrap<argument, kernel<Float16>>, \
      unwrap<argument, kernel<BFloat16>>

/// In the order of KernelId.
constexpr std::array<KernelFunction, kKernelCount> kFunctions = {
    unwrap<DenseEncode, encode_dense<Float32, Float32>>,
    unwrap<DenseEncode, encode_dense<Float32, Float16>>,
    unwrap<DenseEncode, encode_dense<Float32, BFloat16>>,
    unwrap<DenseEncode, encode_dense<Float16, Float16>>,
    unwrap<DenseEncode, encode_dense<Float16, BFloat16>>,
    unwrap<DenseEncode, encode_dense<BFloat16, Float16>>,
    unwrap<DenseEncode, encode_dense<BFloat16, BFloat16>>,
    unwrap<DenseCombine, combine_dense<Float32, Float32>>,
    unwrap<DenseCombine, combine_dense<Float16, Float32>>,
    unwrap<DenseCombine, combine_dense<BFloat16, Float32>>,
    unwrap<DenseCombine, combine_dense<Float16, Float16>>,
    unwrap<DenseCombine, combine_dense<BFloat16, Float16>>,
    unwrap<DenseCombine, combine_dense<Float16, BFloat16>>,
    unwrap<DenseCombine, combine_dense<BFloat16, BFloat16>>,
    PACELINE_BY_DTYPE(Int8Encode, encode_int8),
    PACELINE_BY_DTYPE(Int8Combine, combine_int8),
    PACELINE_BY_DTYPE(TopK, sample_coarse),
    PACELINE_BY_DTYPE(TopK, sample_fine),
    PACELINE_BY_DTYPE(TopK, select_top_k),
    PACELINE_BY_DTYPE(TopK, select_top_k),
    PACELINE_BY_DTYPE(TopK, select_top_k),
    PACELINE_BY_DTYPE(TopK, select_top_k),
    unwrap<TopK, gather_top_k>,
    unwrap<TopK, gather_top_k>,
    unwrap<TopK, gather_top_k>,
    PACELINE_BY_DTYPE(TopKCombine, combine_top_k),
    unwrap<RowsEncode, flag_rows<uint32_t>>,
    unwrap<RowsEncode, flag_rows<uint16_t>>,
    unwrap<RowsEncode, list_rows>,
    unwrap<RowsEncode, encode_rows<Float32, Float32>>,
    unwrap<RowsEncode, encode_rows<Float16, Float16>>,
    unwrap<RowsEncode, encode_rows<BFloat16, BFloat16>>,
    unwrap<RowsEncode, encode_rows<Float32, Float16>>,
    unwrap<RowsEncode, encode_rows<BFloat16, Float16>>,
    unwrap<RowsEncode, encode_rows<Float32, BFloat16>>,
    unwrap<RowsCombine, combine_rows<Float32, Float32>>,
    unwrap<RowsCombine, combine_rows<Float16, Float16>>,
    unwrap<RowsCombine, combine_rows<BFloat16, BFloat16>>,
    unwrap<RowsCombine, combine_rows<Float16, Float32>>,
    unwrap<RowsCombine, combine_rows<Float16, BFloat16>>,
    unwrap<RowsCombine, combine_rows<BFloat16, Float32>>,
    unwrap<CopySegments, copy_segments>,
};

#undef PACELINE_BY_DTYPE

constexpr std::array<NamedKernel, kKernelCount> named() {
  std::array<NamedKernel, kKernelCount> all{};
  for (int i = 0; i < kKernelCount; ++i) all[i] = {kKernelNames[i], kFunctions[i]};
  return all;
}
constexpr auto kNamed = named();

class HostLauncher : public Launcher {
 public:
  Status clear(drivers::cuda::DevicePtr memory, uint64_t bytes) override {
    std::memset(at<void>(memory), 0, bytes);
    return Status::ok();
  }
  Status launch(KernelId kernel, uint32_t /*blocks*/, uint32_t /*threads*/,
                void* argument) override {
    kFunctions[static_cast<int>(kernel)](&argument);
    return Status::ok();
  }
  [[nodiscard]] uint32_t multiprocessors() const override { return 1; }
};

}  // namespace

std::span<const NamedKernel> kernels() { return kNamed; }

std::span<const Image> images() {
  static const std::vector<Image> all = [] {
    std::vector<Image> found;
    for (const char* file : kKernelFiles) {
      const auto is_it = [&](const Image& i) { return std::string_view(i.file) == file; };
      if (std::none_of(found.begin(), found.end(), is_it)) found.push_back({"", file});
    }
    return found;
  }();
  return all;
}

Status encode(const WireFormat& format, const EncodeArguments& arguments) {
  HostLauncher launcher;
  return enqueue_encode(launcher, format, arguments);
}

Status combine(const WireFormat& format, const CombineArguments& arguments) {
  HostLauncher launcher;
  return enqueue_combine(launcher, format, arguments);
}

Status encode_rows(const RowFormat& format, const EncodeRowsArguments& arguments) {
  HostLauncher launcher;
  return enqueue_encode_rows(launcher, format, arguments);
}

Status combine_rows(const RowFormat& format, const CombineRowsArguments& arguments) {
  HostLauncher launcher;
  return enqueue_combine_rows(launcher, format, arguments);
}

Status pack(std::span<const Segment> segments, drivers::cuda::DevicePtr buffer) {
  HostLauncher launcher;
  return enqueue_copy(launcher, segments, buffer, Direction::kPack);
}

Status unpack(std::span<const Segment> segments, drivers::cuda::DevicePtr buffer) {
  HostLauncher launcher;
  return enqueue_copy(launcher, segments, buffer, Direction::kUnpack);
}

}  // namespace paceline::device::cuda::reference
