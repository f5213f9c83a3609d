#include "drivers/cuda/loader.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <mutex>
#include <type_traits>

namespace paceline::drivers::cuda {
namespace {

struct Library {
  Api api;
  Status status;
};

constexpr int kStubLibrary = 34;  // CUDA_ERROR_STUB_LIBRARY

template <class F>
bool bind(void* library, F& function, const char* name) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  return function != nullptr;
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

/// The first function that is missing; nullptr: none.
const char* bind_all(void* library, Api& a) {
#define PACELINE_BIND(member, name) \
  if (!bind(library, a.member, name)) return name
  PACELINE_BIND(init, "cuInit");
  PACELINE_BIND(driver_get_version, "cuDriverGetVersion");
  PACELINE_BIND(get_error_name, "cuGetErrorName");
  PACELINE_BIND(get_error_string, "cuGetErrorString");
  PACELINE_BIND(device_get_count, "cuDeviceGetCount");
  PACELINE_BIND(device_get, "cuDeviceGet");
  PACELINE_BIND(device_get_attribute, "cuDeviceGetAttribute");
  PACELINE_BIND(device_primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  PACELINE_BIND(device_primary_ctx_release, "cuDevicePrimaryCtxRelease_v2");
  PACELINE_BIND(ctx_set_current, "cuCtxSetCurrent");
  PACELINE_BIND(ctx_get_current, "cuCtxGetCurrent");
  PACELINE_BIND(ctx_get_stream_priority_range, "cuCtxGetStreamPriorityRange");
  PACELINE_BIND(module_load_data, "cuModuleLoadData");
  PACELINE_BIND(module_unload, "cuModuleUnload");
  PACELINE_BIND(module_get_function, "cuModuleGetFunction");
  PACELINE_BIND(launch_kernel, "cuLaunchKernel");
  PACELINE_BIND(mem_alloc, "cuMemAlloc_v2");
  PACELINE_BIND(mem_free, "cuMemFree_v2");
  PACELINE_BIND(mem_host_alloc, "cuMemHostAlloc");
  PACELINE_BIND(mem_free_host, "cuMemFreeHost");
  PACELINE_BIND(mem_host_register, "cuMemHostRegister_v2");
  PACELINE_BIND(mem_host_unregister, "cuMemHostUnregister");
  PACELINE_BIND(mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2");
  PACELINE_BIND(memcpy_dtoh_async, "cuMemcpyDtoHAsync_v2");
  PACELINE_BIND(memcpy_htod_async, "cuMemcpyHtoDAsync_v2");
  PACELINE_BIND(memcpy_dtod_async, "cuMemcpyDtoDAsync_v2");
  PACELINE_BIND(memset_d8_async, "cuMemsetD8Async");
  PACELINE_BIND(ipc_get_mem_handle, "cuIpcGetMemHandle");
  PACELINE_BIND(ipc_open_mem_handle, "cuIpcOpenMemHandle_v2");
  PACELINE_BIND(ipc_close_mem_handle, "cuIpcCloseMemHandle");
  PACELINE_BIND(stream_create_with_priority, "cuStreamCreateWithPriority");
  PACELINE_BIND(stream_destroy, "cuStreamDestroy_v2");
  PACELINE_BIND(stream_query, "cuStreamQuery");
  PACELINE_BIND(stream_synchronize, "cuStreamSynchronize");
  PACELINE_BIND(stream_is_capturing, "cuStreamIsCapturing");
  PACELINE_BIND(thread_exchange_stream_capture_mode, "cuThreadExchangeStreamCaptureMode");
  PACELINE_BIND(stream_wait_event, "cuStreamWaitEvent");
  PACELINE_BIND(stream_wait_value32, "cuStreamWaitValue32_v2");
  PACELINE_BIND(stream_write_value32, "cuStreamWriteValue32_v2");
  PACELINE_BIND(event_create, "cuEventCreate");
  PACELINE_BIND(event_destroy, "cuEventDestroy_v2");
  PACELINE_BIND(event_record, "cuEventRecord");
  PACELINE_BIND(event_query, "cuEventQuery");
  PACELINE_BIND(event_synchronize, "cuEventSynchronize");
#undef PACELINE_BIND
  return nullptr;
}

Status open(Api& api) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return {
        Code::kUnavailable,
        fmt::format("no CUDA driver: libcuda.so.1 can't be loaded ({}); install NVIDIA's driver "
                    "(in a container: start it with the GPUs, `--gpus all`)",
                    why == nullptr ? "no reason given" : why)};
  }
  const char* missing = bind_all(library, api);
  int version = 0;
  // Toolkits come with a libcuda.so to link against, in which every function fails.
  if (const int error = missing == nullptr ? api.driver_get_version(&version) : 0; error != 0) {
    Dl_info found{};
    ::dladdr(reinterpret_cast<void*>(api.driver_get_version), &found);
    return {Code::kUnavailable,
            fmt::format("{} is no CUDA driver: it does not tell its version (error {}{}); take its "
                        "folder out of LD_LIBRARY_PATH, or install NVIDIA's driver",
                        found.dli_fname == nullptr ? "libcuda.so.1" : found.dli_fname, error,
                        error == kStubLibrary ? ", a toolkit's stub" : "")};
  }
  if (api.driver_get_version != nullptr) api.driver_get_version(&version);
  if (missing != nullptr || version < kOldestDriver) {
    return {Code::kUnavailable,
            fmt::format("the CUDA driver is too old: it offers CUDA {}{}{}; stream memory "
                        "operations need a driver for CUDA {} or later (515 and up)",
                        version_text(version), missing == nullptr ? "" : " and lacks ",
                        missing == nullptr ? "" : missing, version_text(kOldestDriver))};
  }
  return Status::ok();
}

}  // namespace

Result<const Api*> load() {
  static const Library* const library = [] {
    auto* made = new Library();  // as long as the process: threads may still use it at its end
    made->status = open(made->api);
    return made;
  }();
  if (!library->status) return library->status;
  return &library->api;
}

Status check_device(const Api& api, int ordinal) {
  if (auto error = api.init(0); error != 0) return explain(api, error, "init");
  int count = 0;
  if (auto error = api.device_get_count(&count); error != 0)
    return explain(api, error, "device_get_count");
  if (count == 0)
    return {Code::kUnavailable,
            "the CUDA driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"};
  if (ordinal < 0 || ordinal >= count)
    return {Code::kInvalidArgument,
            fmt::format("there is no CUDA device {}: this process sees {} (CUDA_VISIBLE_DEVICES "
                        "chooses them)",
                        ordinal, count)};
  return Status::ok();
}

}  // namespace paceline::drivers::cuda
