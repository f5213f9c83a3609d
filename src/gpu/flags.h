// The words through which GPU and host order each other, in pinned memory.
//
// Every word only grows (modulo 2^32), and is written by one side: `out` words by streams as a piece has been copied to
// the host, `in` words by the host as a piece has come over the network. A stream waits until the difference to what it
// waits for is not negative, which is how the driver compares too. release() moves the host's words 2^30 ahead, so that
// every wait passes, those that are yet to be enqueued too: nothing may wait for ever after a fault.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "drivers/cuda/api.h"

namespace paceline::gpu {

/// At least `value` has been reached.
inline bool reached(uint32_t word, uint32_t value) {
  return static_cast<int32_t>(word - value) >= 0;
}

class Flags {
 public:
  static constexpr size_t kLine = 64;  ///< a word per cache line
  static constexpr int kGates = 8;
  static size_t bytes(int lanes) { return kLine * (8 + kGates + 3 * static_cast<size_t>(lanes)); }

  Flags() = default;
  /// `memory`: bytes(lanes), zeros. spread: by NCCL, to the node's other ranks, after what is done.
  Flags(std::byte* memory, bool spread) : memory_(memory), spread_(spread) {}

  // Written by streams.
  [[nodiscard]] uint32_t* out() const { return word(0); }  ///< pieces and ends copied to the host
  [[nodiscard]] uint32_t* done() const {
    return word(1);
  }  ///< operations whose host memory was read
  [[nodiscard]] uint32_t* sums(int lane) const {
    return word(8 + kGates + 3 * lane);
  }  ///< two hops
  [[nodiscard]] uint32_t* waited() const {
    return word(5 + kGates);
  }  ///< operations whose memory the way out has waited for
  [[nodiscard]] uint32_t* given() const {
    return word(6 + kGates);
  }  ///< operations whose parts this rank has given to the node's others
  [[nodiscard]] uint32_t* finished() const {
    return spread_ ? word(4 + kGates) : done();
  }  ///< operations whose result is in place
  // Written by the host.
  [[nodiscard]] uint32_t* retired() const {
    return word(2);
  }  ///< operations whose host memory is free
  [[nodiscard]] uint32_t* met() const {
    return word(3);
  }  ///< operations that have arrived on all ranks of the node
  [[nodiscard]] uint32_t* brought() const {
    return word(7 + kGates);
  }  ///< operations whose parts all ranks of the node have given to each other
  [[nodiscard]] uint32_t* in(int lane) const { return word(9 + kGates + 3 * lane); }
  [[nodiscard]] uint32_t* back(int lane) const { return word(10 + kGates + 3 * lane); }
  /// A float that kernels read: 0, or 1 where they must change nothing; see Pump::gate().
  [[nodiscard]] uint32_t* gate(int index) const { return word(4 + index); }

  static uint32_t load(const uint32_t* w) { return __atomic_load_n(w, __ATOMIC_ACQUIRE); }
  static void store(uint32_t* w, uint32_t value) { __atomic_store_n(w, value, __ATOMIC_RELEASE); }
  static drivers::cuda::DevicePtr address(const uint32_t* w) {
    return reinterpret_cast<drivers::cuda::DevicePtr>(w);
  }

 private:
  [[nodiscard]] uint32_t* word(int index) const {
    return reinterpret_cast<uint32_t*>(memory_ + kLine * static_cast<size_t>(index));
  }
  std::byte* memory_ = nullptr;
  bool spread_ = false;
};

}  // namespace paceline::gpu
