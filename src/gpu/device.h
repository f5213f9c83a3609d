// One GPU as the path uses it: its context, streams, events and memory, all made before the first operation.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "drivers/cuda/api.h"

namespace paceline::gpu {

namespace cu = drivers::cuda;

/// Makes the device's context current for a scope; the caller's comes back.
class CurrentContext {
 public:
  CurrentContext(const cu::Api& api, cu::Context context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  const cu::Api& api_;
  cu::Context before_ = nullptr;
  bool changed_ = false;
  Status status_;
};

/// Owns what it hands out until release() or its end, which need the context to be current, and streams that are done.
class DeviceObjects {
 public:
  explicit DeviceObjects(const cu::Api& api) : api_(api) {}
  DeviceObjects(const DeviceObjects&) = delete;
  DeviceObjects& operator=(const DeviceObjects&) = delete;
  ~DeviceObjects() { release(); }

  /// Of the highest priority, not ordered with the legacy stream.
  Result<cu::Stream> stream();
  Result<cu::Event> event();
  /// `purpose` is for the error: "512 MiB of device memory for residuals: …".
  Result<cu::DevicePtr> memory(size_t bytes, const char* purpose);
  /// Pinned; the device sees it at the same address (unified addressing).
  Result<std::byte*> pinned(size_t bytes, const char* purpose);
  /// Pinned too, but pages of the process's own where the driver takes them: of these the kernel can send without a
  /// copy (wire/tcp/page_lender.h), of the driver's it can't. A forked process does not have them.
  Result<std::byte*> pinned_pages(size_t bytes, const char* purpose);
  void release();
  /// Forgets everything without giving it back: a GPU that still works on it must not lose it.
  void abandon();

  [[nodiscard]] uint64_t device_bytes() const { return device_bytes_; }
  [[nodiscard]] uint64_t pinned_bytes() const { return pinned_bytes_; }
  [[nodiscard]] const std::vector<cu::Stream>& streams() const { return streams_; }

 private:
  const cu::Api& api_;
  std::vector<cu::Stream> streams_;
  std::vector<cu::Event> events_;
  std::vector<cu::DevicePtr> memory_;
  std::vector<void*> pinned_;
  std::vector<std::pair<void*, size_t>> pages_;
  uint64_t device_bytes_ = 0, pinned_bytes_ = 0;
};

/// "1.50 GiB".
std::string bytes_text(uint64_t bytes);

}  // namespace paceline::gpu
