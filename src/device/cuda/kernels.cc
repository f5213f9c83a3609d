#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "device/cuda/codec.h"
#include "device/cuda/enqueue.h"
#include "device/cuda/images.h"
#include "drivers/cuda/loader.h"

namespace paceline::device::cuda {
namespace {

using namespace drivers::cuda;

// CUdevice_attribute
constexpr int kMultiprocessorCount = 16;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
// CUresult
constexpr CudaResult kInvalidImage = 200;
constexpr CudaResult kNoBinaryForGpu = 209;
constexpr CudaResult kInvalidPtx = 218;
constexpr CudaResult kUnsupportedPtxVersion = 222;

Result<int> attribute(const Api& api, int which, Device device) {
  int value = 0;
  const CudaResult result = api.device_get_attribute(&value, which, device);
  if (result != 0)
    return explain(api, result, fmt::format("attribute {} of device {}", which, device));
  return value;
}

Result<Module> load_image(const Api& api, const Image& image, Device device) {
  Module module = nullptr;
  const CudaResult result = api.module_load_data(&module, image.data);
  if (result == 0) return module;
  if (result != kInvalidImage && result != kNoBinaryForGpu && result != kInvalidPtx &&
      result != kUnsupportedPtxVersion)
    return explain(api, result, fmt::format("loading {} on device {}", image.file, device));
  PACELINE_ASSIGN(const int major, attribute(api, kComputeCapabilityMajor, device));
  PACELINE_ASSIGN(const int minor, attribute(api, kComputeCapabilityMinor, device));
  return Status(
      Code::kUnsupported,
      fmt::format("no device code for compute capability {}.{} (device {}): it needs 8.0 or "
                  "later, and a driver that knows this library's PTX ({}); "
                  "PACELINE_CUDA_PATH=torch keeps torch's own all-reduce",
                  major, minor, device, explain(api, result, image.file).message()));
}

class StreamLauncher : public Launcher {
 public:
  StreamLauncher(const Api& api, std::span<const Function> functions, int multiprocessors,
                 Stream stream)
      : api_(api), functions_(functions), multiprocessors_(multiprocessors), stream_(stream) {}

  Status clear(DevicePtr memory, uint64_t bytes) override {
    const CudaResult result = api_.memset_d8_async(memory, 0, bytes, stream_);
    return result == 0 ? Status::ok() : explain(api_, result, "clearing a codec's state");
  }
  Status launch(KernelId kernel, uint32_t blocks, uint32_t threads, void* argument) override {
    const int index = static_cast<int>(kernel);
    void* arguments[] = {argument};
    const CudaResult result = api_.launch_kernel(functions_[static_cast<size_t>(index)], blocks, 1,
                                                 1, threads, 1, 1, 0, stream_, arguments, nullptr);
    return result == 0 ? Status::ok() : explain(api_, result, kKernelNames[index]);
  }
  [[nodiscard]] uint32_t multiprocessors() const override {
    return static_cast<uint32_t>(multiprocessors_);
  }

 private:
  const Api& api_;
  std::span<const Function> functions_;
  int multiprocessors_;
  Stream stream_;
};

}  // namespace

Result<Kernels> Kernels::load(const Api& api, Device device) {
  return load(api, device, cuda::images());
}

Result<Kernels> Kernels::load(const Api& api, Device device, std::span<const Image> images) {
  if (images.empty())
    return Status(
        Code::kUnsupported,
        "this build of paceline holds no device code: it was made where nvcc was missing; "
        "install the CUDA toolkit (nvcc on PATH or in /usr/local/cuda) and build again");
  Kernels kernels;
  kernels.api_ = &api;
  PACELINE_ASSIGN(kernels.multiprocessors_, attribute(api, kMultiprocessorCount, device));
  const char* file = "";
  Module module = nullptr;
  for (int i = 0; i < kKernelCount; ++i) {
    if (std::string_view(file) != kKernelFiles[i]) {
      file = kKernelFiles[i];
      const auto image = std::find_if(images.begin(), images.end(), [&](const Image& candidate) {
        return std::string_view(candidate.file) == file;
      });
      auto loaded = load_image(api, *image, device);
      if (!loaded) {
        kernels.unload();
        return loaded.status();
      }
      kernels.modules_.push_back(module = *loaded);
    }
    Function function = nullptr;
    const CudaResult result = api.module_get_function(&function, module, kKernelNames[i]);
    if (result != 0) {
      kernels.unload();
      return explain(api, result, kKernelNames[i]);
    }
    kernels.functions_.push_back(function);
  }
  return kernels;
}

void Kernels::unload() {
  for (auto* module : modules_) api_->module_unload(module);
  modules_.clear();
  functions_.clear();
}

Status Kernels::encode(const WireFormat& format, const EncodeArguments& arguments,
                       Stream stream) const {
  StreamLauncher launcher(*api_, functions_, multiprocessors_, stream);
  return enqueue_encode(launcher, format, arguments);
}

Status Kernels::combine(const WireFormat& format, const CombineArguments& arguments,
                        Stream stream) const {
  StreamLauncher launcher(*api_, functions_, multiprocessors_, stream);
  return enqueue_combine(launcher, format, arguments);
}

Status Kernels::encode_rows(const RowFormat& format, const EncodeRowsArguments& arguments,
                            Stream stream) const {
  StreamLauncher launcher(*api_, functions_, multiprocessors_, stream);
  return enqueue_encode_rows(launcher, format, arguments);
}

Status Kernels::combine_rows(const RowFormat& format, const CombineRowsArguments& arguments,
                             Stream stream) const {
  StreamLauncher launcher(*api_, functions_, multiprocessors_, stream);
  return enqueue_combine_rows(launcher, format, arguments);
}

Status Kernels::pack(std::span<const Segment> segments, DevicePtr buffer, Stream stream) const {
  StreamLauncher launcher(*api_, functions_, multiprocessors_, stream);
  return enqueue_copy(launcher, segments, buffer, Direction::kPack);
}

Status Kernels::unpack(std::span<const Segment> segments, DevicePtr buffer, Stream stream) const {
  StreamLauncher launcher(*api_, functions_, multiprocessors_, stream);
  return enqueue_copy(launcher, segments, buffer, Direction::kUnpack);
}

}  // namespace paceline::device::cuda
