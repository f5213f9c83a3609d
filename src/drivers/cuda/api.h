// The part of CUDA's driver API that Paceline uses, as a table of functions that is filled at run time.
//
// Declared here from the documented ABI, so that the build needs no CUDA and the same library loads without a driver.
// Names are the driver's own without their version suffix. loader.cc fills the table from libcuda.so.1; mock.h from a
// simulated device on which the tests of all host logic run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline::drivers::cuda {

using Device = int;
using DevicePtr = unsigned long long;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using CudaResult = int;  ///< CUresult; 0 is success

inline constexpr CudaResult kNotReady = 600;           // CUDA_ERROR_NOT_READY
inline constexpr unsigned kStreamNonBlocking = 1;      // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventDisableTiming = 2;     // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kHostAllocPortable = 1;      // CU_MEMHOSTALLOC_PORTABLE
inline constexpr unsigned kHostAllocDeviceMap = 2;     // CU_MEMHOSTALLOC_DEVICEMAP
inline constexpr unsigned kHostRegisterPortable = 1;   // CU_MEMHOSTREGISTER_PORTABLE
inline constexpr unsigned kHostRegisterDeviceMap = 2;  // CU_MEMHOSTREGISTER_DEVICEMAP
inline constexpr unsigned kWaitValueGeq = 0;           // CU_STREAM_WAIT_VALUE_GEQ
inline constexpr int kCaptureModeRelaxed = 2;          // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr unsigned kIpcLazyPeerAccess = 1;      // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

/// By which another process of this machine can name device memory.
struct IpcMemHandle {
  unsigned char bytes[64] = {};
};

struct Api {
  CudaResult (*init)(unsigned flags) = nullptr;
  CudaResult (*driver_get_version)(int* version) = nullptr;
  CudaResult (*get_error_name)(CudaResult error, const char** name) = nullptr;
  CudaResult (*get_error_string)(CudaResult error, const char** text) = nullptr;
  CudaResult (*device_get_count)(int* count) = nullptr;
  CudaResult (*device_get)(Device* device, int ordinal) = nullptr;
  CudaResult (*device_get_attribute)(int* value, int attribute, Device device) = nullptr;
  CudaResult (*device_primary_ctx_retain)(Context* context, Device device) = nullptr;
  CudaResult (*device_primary_ctx_release)(Device device) = nullptr;
  CudaResult (*ctx_set_current)(Context context) = nullptr;
  CudaResult (*ctx_get_current)(Context* context) = nullptr;
  CudaResult (*ctx_get_stream_priority_range)(int* least, int* greatest) = nullptr;
  CudaResult (*module_load_data)(Module* module, const void* image) = nullptr;
  CudaResult (*module_unload)(Module module) = nullptr;
  CudaResult (*module_get_function)(Function* function, Module module, const char* name) = nullptr;
  CudaResult (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                              unsigned block_x, unsigned block_y, unsigned block_z,
                              unsigned shared_bytes, Stream stream, void** arguments,
                              void** extra) = nullptr;
  CudaResult (*mem_alloc)(DevicePtr* memory, size_t bytes) = nullptr;
  CudaResult (*mem_free)(DevicePtr memory) = nullptr;
  CudaResult (*mem_host_alloc)(void** memory, size_t bytes, unsigned flags) = nullptr;
  CudaResult (*mem_free_host)(void* memory) = nullptr;
  /// Pins memory of the process's own; whole pages.
  CudaResult (*mem_host_register)(void* memory, size_t bytes, unsigned flags) = nullptr;
  CudaResult (*mem_host_unregister)(void* memory) = nullptr;
  CudaResult (*mem_host_get_device_pointer)(DevicePtr* device, void* host,
                                            unsigned flags) = nullptr;
  CudaResult (*memcpy_dtoh_async)(void* to, DevicePtr from, size_t bytes, Stream stream) = nullptr;
  CudaResult (*memcpy_htod_async)(DevicePtr to, const void* from, size_t bytes,
                                  Stream stream) = nullptr;
  CudaResult (*memcpy_dtod_async)(DevicePtr to, DevicePtr from, size_t bytes,
                                  Stream stream) = nullptr;
  CudaResult (*memset_d8_async)(DevicePtr to, unsigned char value, size_t count,
                                Stream stream) = nullptr;
  /// Of the beginning of an allocation.
  CudaResult (*ipc_get_mem_handle)(IpcMemHandle* handle, DevicePtr memory) = nullptr;
  /// Another process's memory, as this context's device sees it: its own, or a peer's.
  CudaResult (*ipc_open_mem_handle)(DevicePtr* memory, IpcMemHandle handle,
                                    unsigned flags) = nullptr;
  CudaResult (*ipc_close_mem_handle)(DevicePtr memory) = nullptr;
  CudaResult (*stream_create_with_priority)(Stream* stream, unsigned flags, int priority) = nullptr;
  CudaResult (*stream_destroy)(Stream stream) = nullptr;
  CudaResult (*stream_query)(Stream stream) = nullptr;
  CudaResult (*stream_synchronize)(Stream stream) = nullptr;
  CudaResult (*stream_is_capturing)(Stream stream, int* status) = nullptr;
  CudaResult (*thread_exchange_stream_capture_mode)(int* mode) = nullptr;
  CudaResult (*stream_wait_event)(Stream stream, Event event, unsigned flags) = nullptr;
  CudaResult (*stream_wait_value32)(Stream stream, DevicePtr address, uint32_t value,
                                    unsigned flags) = nullptr;
  CudaResult (*stream_write_value32)(Stream stream, DevicePtr address, uint32_t value,
                                     unsigned flags) = nullptr;
  CudaResult (*event_create)(Event* event, unsigned flags) = nullptr;
  CudaResult (*event_destroy)(Event event) = nullptr;
  CudaResult (*event_record)(Event event, Stream stream) = nullptr;
  CudaResult (*event_query)(Event event) = nullptr;
  CudaResult (*event_synchronize)(Event event) = nullptr;
};

}  // namespace paceline::drivers::cuda
