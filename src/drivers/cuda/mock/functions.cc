// The driver's functions on the simulated machine.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "drivers/cuda/mock/state.h"
#include "drivers/cuda/mock/unseen.h"

namespace paceline::drivers::cuda::mock {
namespace {

constexpr CudaResult kInvalidValue = 1;
constexpr CudaResult kOutOfMemory = 2;
constexpr CudaResult kInvalidDevice = 101;
constexpr CudaResult kNoContext = 201;
constexpr CudaResult kNoPeerAccess = 217;
constexpr CudaResult kNotFound = 500;
constexpr CudaResult kAlreadyRegistered = 712;
constexpr CudaResult kNotRegistered = 713;
constexpr CudaResult kUnknown = 999;
// Fresh memory is no zeros: as floats these bytes are large and strange.
constexpr int kPoison = 0xcd;

/// The thread's current context, and the machine that it is of: an earlier one's is none.
thread_local ContextTag* current_context = nullptr;
thread_local uint64_t current_machine = 0;

ContextTag* current_of(const Machine::State& state) {
  return current_machine == state.number ? current_context : nullptr;
}

#define ENTER(name)                               \
  auto* const state = machine();                  \
  if (state == nullptr) return kNoContext;        \
  ContextTag* const current = current_of(*state); \
  if (auto injected = state->enter(name, current); injected != 0) return injected

#define ENTER_CONTEXT(name)                 \
  ENTER(name);                              \
  ContextTag* const device = current;       \
  if (device == nullptr) return kNoContext; \
  (void)device

/// Something that a GPU may have to stand still for. With the device's mutex held.
void count_allocation(ContextTag& device) {
  ++device.counts.allocations;
  if (device.counts.pending_waits > 0) ++device.counts.allocations_in_wait;
}

CudaResult init(unsigned) {
  ENTER("init");
  return 0;
}
CudaResult driver_get_version(int* version) {
  ENTER("driver_get_version");
  *version = state->options.driver_version;
  return 0;
}
CudaResult get_error_name(CudaResult error, const char** name) {
  static constexpr std::pair<CudaResult, const char*> kNames[] = {
      {1, "CUDA_ERROR_INVALID_VALUE"},
      {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {101, "CUDA_ERROR_INVALID_DEVICE"},
      {201, "CUDA_ERROR_INVALID_CONTEXT"},
      {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
      {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
      {500, "CUDA_ERROR_NOT_FOUND"},
      {600, "CUDA_ERROR_NOT_READY"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"},
      {999, "CUDA_ERROR_UNKNOWN"}};
  for (const auto& [e, n] : kNames) {
    if (e == error) {
      *name = n;
      return 0;
    }
  }
  return kInvalidValue;
}
CudaResult get_error_string(CudaResult, const char** text) {
  *text = "as the test asked for";
  return 0;
}
CudaResult device_get_count(int* count) {
  ENTER("device_get_count");
  *count = state->options.devices;
  return 0;
}
CudaResult device_get(Device* device, int ordinal) {
  ENTER("device_get");
  if (ordinal < 0 || ordinal >= state->options.devices) return kInvalidDevice;
  *device = ordinal;
  return 0;
}
CudaResult device_get_attribute(int* value, int attribute, Device) {
  ENTER("device_get_attribute");
  constexpr int kMultiprocessors = 16;
  constexpr int kMajor = 75;
  constexpr int kMinor = 76;
  *value = attribute == kMultiprocessors ? 4
           : attribute == kMajor         ? 9
           : attribute == kMinor         ? 0
                                         : 1;
  return 0;
}
CudaResult device_primary_ctx_retain(Context* context, Device ordinal) {
  ENTER("device_primary_ctx_retain");
  *context = state->devices[static_cast<size_t>(ordinal)].get();
  return 0;
}
CudaResult device_primary_ctx_release(Device) {
  ENTER("device_primary_ctx_release");
  return 0;
}
CudaResult ctx_set_current(Context context) {
  if (machine() != nullptr) {
    current_context = context;
    current_machine = machine()->number;
  }
  ENTER("ctx_set_current");
  return 0;
}
CudaResult ctx_get_current(Context* context) {
  ENTER("ctx_get_current");
  *context = current;
  return 0;
}
CudaResult ctx_get_stream_priority_range(int* least, int* greatest) {
  ENTER_CONTEXT("ctx_get_stream_priority_range");
  *least = 0;
  *greatest = -5;
  return 0;
}

CudaResult module_load_data(Module* module, const void*) {
  ENTER_CONTEXT("module_load_data");
  {
    std::lock_guard lock(device->mutex);
    count_allocation(*device);
    ++device->counts.objects;
  }
  std::lock_guard lock(state->mutex);
  state->modules.push_back(std::make_unique<ModuleTag>());
  state->modules.back()->device = device;
  *module = state->modules.back().get();
  return 0;
}
CudaResult module_unload(Module module) {
  ENTER_CONTEXT("module_unload");
  std::lock_guard lock(module->device->mutex);
  count_allocation(*module->device);
  --module->device->counts.objects;
  return 0;
}
CudaResult module_get_function(Function* function, Module, const char* name) {
  ENTER_CONTEXT("module_get_function");
  std::lock_guard lock(state->mutex);
  auto found = state->kernels.find(name);
  if (found == state->kernels.end()) return kNotFound;
  *function = &found->second;
  return 0;
}
CudaResult launch_kernel(Function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                         unsigned by, unsigned bz, unsigned shared, Stream stream, void** arguments,
                         void**) {
  ENTER_CONTEXT("launch_kernel");
  if (gx == 0 || gy == 0 || gz == 0 || bx * by * bz == 0 || bx * by * bz > 1024)
    return kInvalidValue;
  std::vector<std::vector<std::byte>> copies;
  for (size_t i = 0; i < function->body.argument_sizes.size(); ++i) {
    const auto* from = static_cast<const std::byte*>(arguments[i]);
    copies.emplace_back(from, from + function->body.argument_sizes[i]);
  }
  Item item;
  item.stream = device->resolve(stream);
  item.run = [grid = Grid{gx, gy, gz, bx, by, bz, shared}, copies = std::move(copies),
              function]() mutable {
    std::vector<void*> pointers;
    pointers.reserve(copies.size());
    for (auto& c : copies) pointers.push_back(c.data());
    function->body.run(grid, pointers.data());
  };
  device->enqueue(std::move(item));
  return 0;
}

CudaResult allocate(ContextTag& device, std::unordered_map<uintptr_t, size_t>& from,
                    uint64_t& in_use, size_t bytes, uint64_t limit, void** memory) {
  if (bytes == 0) return kInvalidValue;
  std::lock_guard lock(device.mutex);
  count_allocation(device);
  if (in_use + bytes > limit) return kOutOfMemory;
  const size_t rounded = (bytes + 255) / 256 * 256;
  *memory = std::aligned_alloc(256, rounded);
  if (*memory == nullptr) return kOutOfMemory;
  std::memset(*memory, kPoison, rounded);
  from[reinterpret_cast<uintptr_t>(*memory)] = bytes;
  in_use += bytes;
  return 0;
}
/// As on a GPU, it first waits for everything that the device was given to do.
CudaResult release(ContextTag& device, std::unordered_map<uintptr_t, size_t>& from,
                   uint64_t& in_use, uintptr_t address) {
  std::unique_lock lock(device.mutex);
  count_allocation(device);
  auto found = from.find(address);
  if (found == from.end()) return kInvalidValue;
  if (!device.wait_idle(lock)) return kUnknown;
  in_use -= found->second;
  from.erase(address);
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
CudaResult mem_alloc(DevicePtr* memory, size_t bytes) {
  ENTER_CONTEXT("mem_alloc");
  void* made = nullptr;
  auto error =
      allocate(*device, device->memory, device->counts.memory, bytes, state->options.memory, &made);
  *memory = reinterpret_cast<DevicePtr>(made);
  return error;
}
CudaResult mem_free(DevicePtr memory) {
  ENTER_CONTEXT("mem_free");
  {
    const std::scoped_lock lock(state->mutex, device->mutex);
    if (state->open.contains(memory)) ++device->counts.freed_while_open;
  }
  return release(*device, device->memory, device->counts.memory, memory);
}
CudaResult mem_host_alloc(void** memory, size_t bytes, unsigned) {
  ENTER_CONTEXT("mem_host_alloc");
  return allocate(*device, device->pinned, device->counts.pinned, bytes, UINT64_MAX / 2, memory);
}
CudaResult mem_free_host(void* memory) {
  ENTER_CONTEXT("mem_free_host");
  return release(*device, device->pinned, device->counts.pinned,
                 reinterpret_cast<uintptr_t>(memory));
}
CudaResult mem_host_register(void* memory, size_t bytes, unsigned) {
  ENTER_CONTEXT("mem_host_register");
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(memory);
  if (bytes == 0 || address % page != 0 || bytes % page != 0) return kInvalidValue;
  std::lock_guard lock(device->mutex);
  if (!device->registered.emplace(address, bytes).second) return kAlreadyRegistered;
  count_allocation(*device);
  device->counts.pinned += bytes;
  return 0;
}
CudaResult mem_host_unregister(void* memory) {
  ENTER_CONTEXT("mem_host_unregister");
  std::lock_guard lock(device->mutex);
  auto found = device->registered.find(reinterpret_cast<uintptr_t>(memory));
  if (found == device->registered.end()) return kNotRegistered;
  count_allocation(*device);
  device->counts.pinned -= found->second;
  device->registered.erase(found);
  return 0;
}
CudaResult mem_host_get_device_pointer(DevicePtr* to, void* host, unsigned) {
  ENTER_CONTEXT("mem_host_get_device_pointer");
  *to = reinterpret_cast<DevicePtr>(host);
  return 0;
}

CudaResult copy(ContextTag& device, void* to, const void* from, size_t bytes, Stream stream) {
  Item item;
  item.stream = device.resolve(stream);
  item.run = [=, faulty = &machine()->faulty] {
    // After a fault flags are released, and copies run beside what they would have waited for: nobody uses what they bring.
    const Unseen unseen(*faulty);
    std::memcpy(to, from, bytes);
  };
  device.enqueue(std::move(item));
  return 0;
}
CudaResult memcpy_dtoh_async(void* to, DevicePtr from, size_t bytes, Stream stream) {
  ENTER_CONTEXT("memcpy_dtoh_async");
  return copy(*device, to, reinterpret_cast<const void*>(from), bytes, stream);
}
CudaResult memcpy_htod_async(DevicePtr to, const void* from, size_t bytes, Stream stream) {
  ENTER_CONTEXT("memcpy_htod_async");
  return copy(*device, reinterpret_cast<void*>(to), from, bytes, stream);
}
/// Whether an allocation that begins at or before `at` and reaches beyond it ends within these bytes.
bool is_overrun(ContextTag& device, DevicePtr at, size_t bytes) {
  std::lock_guard lock(device.mutex);
  return std::any_of(device.memory.begin(), device.memory.end(), [&](const auto& allocation) {
    const auto [first, size] = allocation;
    return first <= at && at < first + size && at + bytes > first + size;
  });
}
CudaResult memcpy_dtod_async(DevicePtr to, DevicePtr from, size_t bytes, Stream stream) {
  ENTER_CONTEXT("memcpy_dtod_async");
  if (is_overrun(*device, to, bytes) || is_overrun(*device, from, bytes)) return kInvalidValue;
  return copy(*device, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes,
              stream);
}
CudaResult memset_d8_async(DevicePtr to, unsigned char value, size_t count, Stream stream) {
  ENTER_CONTEXT("memset_d8_async");
  Item item;
  item.stream = device->resolve(stream);
  item.run = [=] { std::memset(reinterpret_cast<void*>(to), value, count); };
  device->enqueue(std::move(item));
  return 0;
}

// Between processes there is nothing to open: the machine is this one's.
struct IpcTicket {
  pid_t process;
  DevicePtr memory;
};
CudaResult ipc_get_mem_handle(IpcMemHandle* handle, DevicePtr memory) {
  ENTER_CONTEXT("ipc_get_mem_handle");
  {
    std::lock_guard lock(device->mutex);
    if (!device->memory.contains(memory)) return kInvalidValue;
  }
  const IpcTicket ticket{getpid(), memory};
  static_assert(sizeof ticket <= sizeof handle->bytes);
  std::memcpy(handle->bytes, &ticket, sizeof ticket);
  return 0;
}
CudaResult ipc_open_mem_handle(DevicePtr* memory, IpcMemHandle handle, unsigned) {
  ENTER_CONTEXT("ipc_open_mem_handle");
  IpcTicket ticket{};
  std::memcpy(&ticket, handle.bytes, sizeof ticket);
  if (ticket.process != getpid()) return kNoPeerAccess;
  const std::scoped_lock lock(state->mutex, device->mutex);
  count_allocation(*device);
  ++device->counts.objects;
  state->open.insert(ticket.memory);
  *memory = ticket.memory;
  return 0;
}
CudaResult ipc_close_mem_handle(DevicePtr memory) {
  ENTER_CONTEXT("ipc_close_mem_handle");
  const std::scoped_lock lock(state->mutex, device->mutex);
  const auto found = state->open.find(memory);
  if (found == state->open.end()) return kInvalidValue;
  state->open.erase(found);
  count_allocation(*device);
  --device->counts.objects;
  return 0;
}

CudaResult stream_create_with_priority(Stream* stream, unsigned, int) {
  ENTER_CONTEXT("stream_create_with_priority");
  std::lock_guard lock(device->mutex);
  count_allocation(*device);
  ++device->counts.objects;
  *stream = device->add_stream();
  return 0;
}
CudaResult stream_destroy(Stream stream) {
  ENTER("stream_destroy");
  std::lock_guard lock(stream->device->mutex);
  count_allocation(*stream->device);
  --stream->device->counts.objects;
  return 0;
}
CudaResult stream_query(Stream stream) {
  ENTER_CONTEXT("stream_query");
  auto* s = device->resolve(stream);
  std::lock_guard lock(device->mutex);
  return s->completed == s->enqueued ? 0 : kNotReady;
}

/// Waits until `done`; with the device's mutex taken here.
template <class Done>
CudaResult wait_for(ContextTag& device, Done done) {
  std::unique_lock lock(device.mutex);
  const auto patience = std::chrono::duration<double>(device.options->patience_s);
  const bool ok =
      device.changed.wait_for(lock, patience, [&] { return device.lost != 0 || done(); });
  if (device.lost != 0) return device.lost;
  return ok ? 0 : kUnknown;
}
CudaResult stream_synchronize(Stream stream) {
  ENTER_CONTEXT("stream_synchronize");
  auto* s = device->resolve(stream);
  return wait_for(*device, [&] { return s->completed == s->enqueued; });
}
CudaResult stream_is_capturing(Stream stream, int* status) {
  ENTER_CONTEXT("stream_is_capturing");
  const auto* s = device->resolve(stream);
  const std::lock_guard lock(device->mutex);
  *status = s->capturing ? 1 : 0;  // CU_STREAM_CAPTURE_STATUS_ACTIVE
  return 0;
}
CudaResult thread_exchange_stream_capture_mode(int* mode) {
  ENTER("thread_exchange_stream_capture_mode");
  *mode = 0;
  return 0;
}
CudaResult stream_wait_event(Stream stream, Event event, unsigned) {
  ENTER_CONTEXT("stream_wait_event");
  uint64_t wanted = 0;
  {
    std::lock_guard lock(event->device->mutex);
    wanted = event->recorded;
  }
  Item item;
  item.stream = device->resolve(stream);
  item.ready = [event, wanted] { return event->completed >= wanted; };
  device->enqueue(std::move(item));
  return 0;
}
CudaResult stream_wait_value32(Stream stream, DevicePtr address, uint32_t value, unsigned flags) {
  ENTER_CONTEXT("stream_wait_value32");
  if (flags != kWaitValueGeq) return kInvalidValue;
  Item item;
  item.stream = device->resolve(stream);
  item.waits_for_value = true;
  item.ready = [address, value] {
    const uint32_t seen = __atomic_load_n(reinterpret_cast<uint32_t*>(address), __ATOMIC_ACQUIRE);
    return static_cast<int32_t>(seen - value) >= 0;
  };
  device->enqueue(std::move(item));
  return 0;
}
CudaResult stream_write_value32(Stream stream, DevicePtr address, uint32_t value, unsigned) {
  ENTER_CONTEXT("stream_write_value32");
  Item item;
  item.stream = device->resolve(stream);
  item.run = [address, value] {
    __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
  };
  device->enqueue(std::move(item));
  return 0;
}

CudaResult event_create(Event* event, unsigned) {
  ENTER_CONTEXT("event_create");
  std::lock_guard lock(device->mutex);
  count_allocation(*device);
  ++device->counts.objects;
  device->events.push_back(std::make_unique<EventTag>());
  device->events.back()->device = device;
  *event = device->events.back().get();
  return 0;
}
CudaResult event_destroy(Event event) {
  ENTER("event_destroy");
  std::lock_guard lock(event->device->mutex);
  count_allocation(*event->device);
  --event->device->counts.objects;
  return 0;
}
CudaResult event_record(Event event, Stream stream) {
  ENTER_CONTEXT("event_record");
  Item item;
  item.stream = device->resolve(stream);
  uint64_t generation = 0;
  {
    std::lock_guard lock(device->mutex);
    generation = ++event->recorded;
  }
  item.finish = [event, generation] { event->completed = std::max(event->completed, generation); };
  device->enqueue(std::move(item));
  return 0;
}
CudaResult event_query(Event event) {
  ENTER_CONTEXT("event_query");
  std::lock_guard lock(device->mutex);
  return event->completed >= event->recorded ? 0 : kNotReady;
}
CudaResult event_synchronize(Event event) {
  ENTER_CONTEXT("event_synchronize");
  return wait_for(*device, [&] { return event->completed >= event->recorded; });
}

}  // namespace

const Api& functions() {
  static const Api api = [] {
    Api a;
    a.init = init;
    a.driver_get_version = driver_get_version;
    a.get_error_name = get_error_name;
    a.get_error_string = get_error_string;
    a.device_get_count = device_get_count;
    a.device_get = device_get;
    a.device_get_attribute = device_get_attribute;
    a.device_primary_ctx_retain = device_primary_ctx_retain;
    a.device_primary_ctx_release = device_primary_ctx_release;
    a.ctx_set_current = ctx_set_current;
    a.ctx_get_current = ctx_get_current;
    a.ctx_get_stream_priority_range = ctx_get_stream_priority_range;
    a.module_load_data = module_load_data;
    a.module_unload = module_unload;
    a.module_get_function = module_get_function;
    a.launch_kernel = launch_kernel;
    a.mem_alloc = mem_alloc;
    a.mem_free = mem_free;
    a.mem_host_alloc = mem_host_alloc;
    a.mem_free_host = mem_free_host;
    a.mem_host_register = mem_host_register;
    a.mem_host_unregister = mem_host_unregister;
    a.mem_host_get_device_pointer = mem_host_get_device_pointer;
    a.memcpy_dtoh_async = memcpy_dtoh_async;
    a.memcpy_htod_async = memcpy_htod_async;
    a.memcpy_dtod_async = memcpy_dtod_async;
    a.memset_d8_async = memset_d8_async;
    a.ipc_get_mem_handle = ipc_get_mem_handle;
    a.ipc_open_mem_handle = ipc_open_mem_handle;
    a.ipc_close_mem_handle = ipc_close_mem_handle;
    a.stream_create_with_priority = stream_create_with_priority;
    a.stream_destroy = stream_destroy;
    a.stream_query = stream_query;
    a.stream_synchronize = stream_synchronize;
    a.stream_is_capturing = stream_is_capturing;
    a.thread_exchange_stream_capture_mode = thread_exchange_stream_capture_mode;
    a.stream_wait_event = stream_wait_event;
    a.stream_wait_value32 = stream_wait_value32;
    a.stream_write_value32 = stream_write_value32;
    a.event_create = event_create;
    a.event_destroy = event_destroy;
    a.event_record = event_record;
    a.event_query = event_query;
    a.event_synchronize = event_synchronize;
    return a;
  }();
  return api;
}

}  // namespace paceline::drivers::cuda::mock
