// For tests: how much memory this process has from its allocator.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)  // GCC
#define PACELINE_TEST_ALLOCATOR_OF_A_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PACELINE_TEST_ALLOCATOR_OF_A_SANITIZER 1
#endif
#endif

#ifdef PACELINE_TEST_ALLOCATOR_OF_A_SANITIZER
#include <sanitizer/allocator_interface.h>
#else
#include <malloc.h>
#endif

namespace paceline::testing {

/// Bytes that malloc() and new have given and that are not freed.
inline std::size_t allocated() {
#ifdef PACELINE_TEST_ALLOCATOR_OF_A_SANITIZER
  return __sanitizer_get_current_allocated_bytes();
#else
  const struct mallinfo2 info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
#endif
}

}  // namespace paceline::testing
