// A GPU for this program alone: the driver's functions, memory, a stream, time between events.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "drivers/cuda/api.h"

namespace bench {

using paceline::drivers::cuda::Api;
using paceline::drivers::cuda::DevicePtr;
using paceline::drivers::cuda::Event;
using paceline::drivers::cuda::Stream;

class Gpu {
 public:
  /// Ends the program with a sentence when there is no driver or no device.
  Gpu();
  [[nodiscard]] const Api& api() const { return api_; }
  [[nodiscard]] Stream stream() const { return stream_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] int driver_version() const { return driver_version_; }

  /// Ends the program when a call of the driver has failed.
  void must(int result, const char* what) const;
  void wait() const;
  [[nodiscard]] Event record() const;
  /// Milliseconds between two events that have passed.
  [[nodiscard]] double elapsed(Event from, Event to) const;
  /// Milliseconds; both events are destroyed. Waits for the later one.
  [[nodiscard]] double between(Event from, Event to) const;

 private:
  Api api_;
  int (*elapsed_)(float*, Event, Event) = nullptr;
  Stream stream_ = nullptr;
  std::string name_;
  int driver_version_ = 0;
};

/// Device memory; moves, never copies.
class Memory {
 public:
  Memory() = default;
  Memory(const Gpu& gpu, uint64_t bytes);
  Memory(const Gpu& gpu, const void* from, uint64_t bytes);
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();
  [[nodiscard]] DevicePtr address() const { return address_; }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  void fill(unsigned char byte) const;
  void write(const void* from, uint64_t bytes) const;
  void read(void* to, uint64_t bytes, uint64_t offset = 0) const;
  template <class T>
  [[nodiscard]] std::vector<T> copy() const {
    std::vector<T> values(bytes_ / sizeof(T));
    read(values.data(), values.size() * sizeof(T));
    return values;
  }

 private:
  const Gpu* gpu_ = nullptr;
  DevicePtr address_ = 0;
  uint64_t bytes_ = 0;
};

[[noreturn]] void fail(const std::string& message);

}  // namespace bench
