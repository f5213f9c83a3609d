// The processor's floating-point mode as the kernels need it.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace paceline::cpu {

/// While it lives, this thread rounds to nearest even and keeps denormals, whatever mode the caller
/// set (torch.set_flush_denormal, -ffast-math start-up code): results depend on the inputs alone.
/// Costs two register moves when the mode is right already. Only calls that the compiler can't look
/// into may lie between construction and destruction (our dispatch through function pointers is
/// such a call).
class FloatMode {
 public:
#if defined(__SSE2__)
  FloatMode() : saved_(_mm_getcsr()) {
    if ((saved_ & kModeBits) != 0) _mm_setcsr(saved_ & ~kModeBits);
  }
  ~FloatMode() {
    if ((saved_ & kModeBits) != 0) _mm_setcsr(saved_);
  }
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if ((saved_ & kModeBits) != 0) asm volatile("msr fpcr, %0" ::"r"(saved_ & ~kModeBits));
  }
  ~FloatMode() {
    if ((saved_ & kModeBits) != 0) asm volatile("msr fpcr, %0" ::"r"(saved_));
  }
#else
  FloatMode() = default;
  ~FloatMode() {}
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr uint32_t kModeBits =
      0xE040;  // rounding control, flush to zero, denormals are zero
  uint32_t saved_;
#elif defined(__aarch64__)
  static constexpr uint64_t kModeBits =
      0x03C80000;  // rounding mode, flush to zero (both), default NaN off
  uint64_t saved_ = 0;
#endif
};

}  // namespace paceline::cpu
