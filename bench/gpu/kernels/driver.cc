#include "driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

namespace bench {
namespace {

template <class F>
void find(void* library, F& function, const char* name) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) fail(fmt::format("libcuda.so.1 has no {}", name));
}

}  // namespace

void fail(const std::string& message) {
  fmt::print(stderr, "gpu_kernels: {}\n", message);
  std::exit(1);
}

Gpu::Gpu() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) fail(fmt::format("no CUDA driver: {}", dlerror()));
  int (*get_name)(char*, int, int) = nullptr;
  find(library, api_.init, "cuInit");
  find(library, api_.driver_get_version, "cuDriverGetVersion");
  find(library, api_.get_error_name, "cuGetErrorName");
  find(library, api_.get_error_string, "cuGetErrorString");
  find(library, api_.device_get, "cuDeviceGet");
  find(library, get_name, "cuDeviceGetName");
  find(library, api_.device_get_attribute, "cuDeviceGetAttribute");
  find(library, api_.device_primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  find(library, api_.ctx_set_current, "cuCtxSetCurrent");
  find(library, api_.module_load_data, "cuModuleLoadData");
  find(library, api_.module_get_function, "cuModuleGetFunction");
  find(library, api_.launch_kernel, "cuLaunchKernel");
  find(library, api_.mem_alloc, "cuMemAlloc_v2");
  find(library, api_.mem_free, "cuMemFree_v2");
  find(library, api_.memcpy_dtoh_async, "cuMemcpyDtoHAsync_v2");
  find(library, api_.memcpy_htod_async, "cuMemcpyHtoDAsync_v2");
  find(library, api_.memcpy_dtod_async, "cuMemcpyDtoDAsync_v2");
  find(library, api_.memset_d8_async, "cuMemsetD8Async");
  find(library, api_.stream_create_with_priority, "cuStreamCreateWithPriority");
  find(library, api_.stream_synchronize, "cuStreamSynchronize");
  find(library, api_.event_create, "cuEventCreate");
  find(library, api_.event_destroy, "cuEventDestroy_v2");
  find(library, api_.event_record, "cuEventRecord");
  find(library, api_.event_synchronize, "cuEventSynchronize");
  find(library, elapsed_, "cuEventElapsedTime");

  must(api_.init(0), "cuInit");
  must(api_.driver_get_version(&driver_version_), "cuDriverGetVersion");
  paceline::drivers::cuda::Context context = nullptr;
  char name[256] = {};
  must(get_name(name, sizeof(name), 0), "cuDeviceGetName");
  name_ = name;
  must(api_.device_primary_ctx_retain(&context, 0), "cuDevicePrimaryCtxRetain");
  must(api_.ctx_set_current(context), "cuCtxSetCurrent");
  must(api_.stream_create_with_priority(&stream_, paceline::drivers::cuda::kStreamNonBlocking, 0),
       "cuStreamCreateWithPriority");
}

void Gpu::must(int result, const char* what) const {
  if (result == 0) return;
  const char* text = nullptr;
  api_.get_error_string(result, &text);
  fail(fmt::format("{}: CUDA error {}: {}", what, result, text != nullptr ? text : "unknown"));
}

void Gpu::wait() const { must(api_.stream_synchronize(stream_), "cuStreamSynchronize"); }

Event Gpu::record() const {
  Event event = nullptr;
  must(api_.event_create(&event, 0), "cuEventCreate");
  must(api_.event_record(event, stream_), "cuEventRecord");
  return event;
}

double Gpu::elapsed(Event from, Event to) const {
  float milliseconds = 0;
  must(elapsed_(&milliseconds, from, to), "cuEventElapsedTime");
  return milliseconds;
}

double Gpu::between(Event from, Event to) const {
  must(api_.event_synchronize(to), "cuEventSynchronize");
  const double milliseconds = elapsed(from, to);
  must(api_.event_destroy(from), "cuEventDestroy");
  must(api_.event_destroy(to), "cuEventDestroy");
  return milliseconds;
}

Memory::Memory(const Gpu& gpu, uint64_t bytes) : gpu_(&gpu), bytes_(bytes) {
  if (bytes != 0) gpu.must(gpu.api().mem_alloc(&address_, bytes), "cuMemAlloc");
}

Memory::Memory(const Gpu& gpu, const void* from, uint64_t bytes) : Memory(gpu, bytes) {
  write(from, bytes);
}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Memory::~Memory() {
  if (address_ != 0) gpu_->api().mem_free(address_);
}

void Memory::fill(unsigned char byte) const {
  if (bytes_ == 0) return;
  gpu_->must(gpu_->api().memset_d8_async(address_, byte, bytes_, gpu_->stream()),
             "cuMemsetD8Async");
}

void Memory::write(const void* from, uint64_t bytes) const {
  gpu_->must(gpu_->api().memcpy_htod_async(address_, from, bytes, gpu_->stream()),
             "cuMemcpyHtoDAsync");
  gpu_->wait();
}

void Memory::read(void* to, uint64_t bytes, uint64_t offset) const {
  gpu_->must(gpu_->api().memcpy_dtoh_async(to, address_ + offset, bytes, gpu_->stream()),
             "cuMemcpyDtoHAsync");
  gpu_->wait();
}

}  // namespace bench
