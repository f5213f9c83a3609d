// A CUDA driver of one simulated GPU as a library of its own (libcuda.so.1), for tests of whole programs: a process that
// has loaded it before libpaceline_cuda.so finds a GPU whose memory is the host's and whose kernels are the reference's.
// $SIMULATED_CUDA_VERSION is what the driver says it offers, as cuDriverGetVersion counts: 11060 is CUDA 11.6.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "device/cuda/kernel_arguments.h"
#include "device/cuda/reference.h"
#include "drivers/cuda/mock/machine.h"

namespace {

namespace cu = paceline::drivers::cuda;
namespace codecs = paceline::device::cuda;

const cu::Api& api() {
  static const auto* const machine = [] {
    cu::mock::Options options;
    options.memory = uint64_t{4} << 30;
    if (const char* version = std::getenv("SIMULATED_CUDA_VERSION"); version != nullptr)
      options.driver_version = std::atoi(version);
    auto* made = new cu::mock::Machine(options);  // as long as the process, as a driver is
    static constexpr size_t kSizes[] = {
#define SIZE(name, argument) sizeof(codecs::argument),
        PACELINE_KERNELS(SIZE)
#undef SIZE
    };
    size_t i = 0;
    for (const auto& kernel : codecs::reference::kernels())
      made->add_kernel(kernel.name,
                       {{kSizes[i++]}, [run = kernel.run](const auto&, void* const* a) {
                          void* copy = a[0];
                          run(&copy);
                        }});
    return made;
  }();
  return machine->api();
}

template <class F>
struct Signature;
template <class... A>
struct Signature<cu::CudaResult (*cu::Api::*)(A...)> {
  template <size_t I>
  using Argument = std::tuple_element_t<I, std::tuple<A...>>;
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default"))) cu::CudaResult
#define A(member, i) Signature<decltype(&cu::Api::member)>::Argument<i>
#define F1(name, m) \
  EXPORT name(A(m, 0) a) { return api().m(a); }
#define F2(name, m) \
  EXPORT name(A(m, 0) a, A(m, 1) b) { return api().m(a, b); }
#define F3(name, m) \
  EXPORT name(A(m, 0) a, A(m, 1) b, A(m, 2) c) { return api().m(a, b, c); }
#define F4(name, m) \
  EXPORT name(A(m, 0) a, A(m, 1) b, A(m, 2) c, A(m, 3) d) { return api().m(a, b, c, d); }

F1(cuInit, init)
F1(cuDriverGetVersion, driver_get_version)
F2(cuGetErrorName, get_error_name)
F2(cuGetErrorString, get_error_string)
F1(cuDeviceGetCount, device_get_count)
F2(cuDeviceGet, device_get)
F3(cuDeviceGetAttribute, device_get_attribute)
F2(cuDevicePrimaryCtxRetain, device_primary_ctx_retain)
F1(cuDevicePrimaryCtxRelease_v2, device_primary_ctx_release)
F1(cuCtxSetCurrent, ctx_set_current)
F1(cuCtxGetCurrent, ctx_get_current)
F2(cuCtxGetStreamPriorityRange, ctx_get_stream_priority_range)
F2(cuModuleLoadData, module_load_data)
F1(cuModuleUnload, module_unload)
F3(cuModuleGetFunction, module_get_function)
F2(cuMemAlloc_v2, mem_alloc)
F1(cuMemFree_v2, mem_free)
F3(cuMemHostAlloc, mem_host_alloc)
F1(cuMemFreeHost, mem_free_host)
F3(cuMemHostRegister_v2, mem_host_register)
F1(cuMemHostUnregister, mem_host_unregister)
F3(cuMemHostGetDevicePointer_v2, mem_host_get_device_pointer)
F4(cuMemcpyDtoHAsync_v2, memcpy_dtoh_async)
F4(cuMemcpyHtoDAsync_v2, memcpy_htod_async)
F4(cuMemcpyDtoDAsync_v2, memcpy_dtod_async)
F4(cuMemsetD8Async, memset_d8_async)
F2(cuIpcGetMemHandle, ipc_get_mem_handle)
F3(cuIpcOpenMemHandle_v2, ipc_open_mem_handle)
F1(cuIpcCloseMemHandle, ipc_close_mem_handle)
F3(cuStreamCreateWithPriority, stream_create_with_priority)
F1(cuStreamDestroy_v2, stream_destroy)
F1(cuStreamQuery, stream_query)
F1(cuStreamSynchronize, stream_synchronize)
F2(cuStreamIsCapturing, stream_is_capturing)
F1(cuThreadExchangeStreamCaptureMode, thread_exchange_stream_capture_mode)
F3(cuStreamWaitEvent, stream_wait_event)
F4(cuStreamWaitValue32_v2, stream_wait_value32)
F4(cuStreamWriteValue32_v2, stream_write_value32)
F2(cuEventCreate, event_create)
F1(cuEventDestroy_v2, event_destroy)
F2(cuEventRecord, event_record)
F1(cuEventQuery, event_query)
F1(cuEventSynchronize, event_synchronize)

EXPORT cuLaunchKernel(cu::Function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                      unsigned by, unsigned bz, unsigned shared, cu::Stream stream,
                      void** arguments, void** extra) {
  return api().launch_kernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra);
}
