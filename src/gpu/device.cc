#include "gpu/device.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include "drivers/cuda/loader.h"

namespace paceline::gpu {

CurrentContext::CurrentContext(const cu::Api& api, cu::Context context) : api_(api) {
  if (auto error = api_.ctx_get_current(&before_); error != 0) {
    status_ = cu::explain(api_, error, "ctx_get_current");
    return;
  }
  if (before_ == context) return;
  if (auto error = api_.ctx_set_current(context); error != 0)
    status_ = cu::explain(api_, error, "ctx_set_current");
  changed_ = true;
}

CurrentContext::~CurrentContext() {
  if (changed_) api_.ctx_set_current(before_);
}

std::string bytes_text(uint64_t bytes) {
  const auto b = static_cast<double>(bytes);
  if (bytes >= 1ULL << 30) return fmt::format("{:.2f} GiB", b / (1 << 30));
  if (bytes >= 1ULL << 20) return fmt::format("{:.1f} MiB", b / (1 << 20));
  return fmt::format("{} bytes", bytes);
}

Result<cu::Stream> DeviceObjects::stream() {
  int least = 0;
  int greatest = 0;
  PACELINE_CUDA_CALL(api_, ctx_get_stream_priority_range, &least, &greatest);
  cu::Stream s = nullptr;
  PACELINE_CUDA_CALL(api_, stream_create_with_priority, &s, cu::kStreamNonBlocking, greatest);
  streams_.push_back(s);
  return s;
}

Result<cu::Event> DeviceObjects::event() {
  cu::Event e = nullptr;
  PACELINE_CUDA_CALL(api_, event_create, &e, cu::kEventDisableTiming);
  events_.push_back(e);
  return e;
}

Result<cu::DevicePtr> DeviceObjects::memory(size_t bytes, const char* purpose) {
  cu::DevicePtr p = 0;
  if (auto error = api_.mem_alloc(&p, bytes); error != 0)
    return cu::explain(api_, error,
                       fmt::format("{} of device memory for {}", bytes_text(bytes), purpose));
  memory_.push_back(p);
  device_bytes_ += bytes;
  return p;
}

Result<std::byte*> DeviceObjects::pinned(size_t bytes, const char* purpose) {
  void* p = nullptr;
  if (auto error = api_.mem_host_alloc(&p, bytes, cu::kHostAllocPortable | cu::kHostAllocDeviceMap);
      error != 0)
    return cu::explain(api_, error,
                       fmt::format("{} of pinned host memory for {}", bytes_text(bytes), purpose));
  pinned_.push_back(p);
  pinned_bytes_ += bytes;
  return static_cast<std::byte*>(p);
}

Result<std::byte*> DeviceObjects::pinned_pages(size_t bytes, const char* purpose) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t whole = (bytes + page - 1) / page * page;
  void* p = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return pinned(bytes, purpose);
  // Few page table entries; and a child must not make the GPU's pages a copy's.
  (void)madvise(p, whole, MADV_HUGEPAGE);
  (void)madvise(p, whole, MADV_DONTFORK);
  if (api_.mem_host_register(p, whole, cu::kHostRegisterPortable | cu::kHostRegisterDeviceMap) ==
      0) {
    cu::DevicePtr seen = 0;
    if (api_.mem_host_get_device_pointer(&seen, p, 0) == 0 &&
        seen == reinterpret_cast<cu::DevicePtr>(p)) {
      pages_.emplace_back(p, whole);
      pinned_bytes_ += whole;
      return static_cast<std::byte*>(p);
    }
    api_.mem_host_unregister(p);
  }
  munmap(p, whole);
  return pinned(bytes, purpose);
}

void DeviceObjects::release() {
  for (auto* s : streams_) api_.stream_destroy(s);
  for (auto* e : events_) api_.event_destroy(e);
  for (auto m : memory_) api_.mem_free(m);
  for (auto* p : pinned_) api_.mem_free_host(p);
  for (auto [p, bytes] : pages_) {
    api_.mem_host_unregister(p);
    munmap(p, bytes);
  }
  abandon();
}

void DeviceObjects::abandon() {
  streams_.clear();
  events_.clear();
  memory_.clear();
  pinned_.clear();
  pages_.clear();
  device_bytes_ = pinned_bytes_ = 0;
}

}  // namespace paceline::gpu
