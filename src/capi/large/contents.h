// For tests of more than 2 GiB: what goes in, what must come out, and memory for it.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>

#include "base/shared_memory.h"
#include "capi/processes.h"

namespace paceline::capi::large {

/// Bytes of a buffer: many of a plan's pieces begin beyond 31 bits, and it is no multiple of anything.
inline constexpr uint64_t kBytes = (uint64_t{1} << 31) + (16 << 20) + 4099;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;

/// ThreadSanitizer keeps account of each byte in several others.
inline bool is_thread_sanitized() {
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
  return true;
#endif
#endif
  return false;
}

inline uint64_t available_bytes() {
  std::ifstream in("/proc/meminfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("MemAvailable:"))
      return std::stoull(line.substr(line.find(':') + 1)) * 1024;
  return 0;
}

/// Skips the test, and says why, where the machine is too small for it.
#define PACELINE_NEEDS_GIB(gib)                                                               \
  do {                                                                                        \
    if (is_thread_sanitized()) GTEST_SKIP() << "ThreadSanitizer's account of 2 GiB takes 16"; \
    if (available_bytes() < (gib)*kGiB)                                                       \
      GTEST_SKIP() << "less than " << (gib) << " GiB of memory is free";                      \
  } while (0)

/// `count` elements that take no memory to speak of: a few pages, mapped again and again. They repeat in no length
/// that divides a power of two, so an element that comes 2 or 4 GiB from its place is a wrong one.
template <class T>
class Row {
 public:
  static constexpr uint64_t kPeriod = 257 * 4096 / sizeof(T);

  /// `element(i)` is asked once for each i below kPeriod, in order.
  Row(uint64_t count, const std::function<T(uint64_t)>& element)
      : count_(count), mapped_((count + kPeriod - 1) / kPeriod * kPeriod * sizeof(T)) {
    constexpr uint64_t kOnce = kPeriod * sizeof(T);
    auto once = SharedMemory::create(kOnce, SharedMemory::Pages::kReserve, MemorySources());
    must(once.status().is_ok());
    auto* first = reinterpret_cast<T*>(once->data());
    for (uint64_t i = 0; i < kPeriod; ++i) first[i] = element(i);
    void* all =
        ::mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    must(all != MAP_FAILED);
    for (uint64_t at = 0; at < mapped_; at += kOnce)
      must(::mmap(static_cast<std::byte*>(all) + at, kOnce, PROT_READ, MAP_SHARED | MAP_FIXED,
                  once->fd(), 0) != MAP_FAILED);
    data_ = static_cast<const T*>(all);
  }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  ~Row() { ::munmap(const_cast<T*>(data_), mapped_); }

  [[nodiscard]] const T* data() const { return data_; }
  [[nodiscard]] uint64_t count() const { return count_; }
  /// Whether `data` holds elements [from, from + count); says where it first doesn't.
  [[nodiscard]] bool is_in(const T* data, uint64_t count, uint64_t from = 0) const {
    const T* mine = data_ + from;
    if (std::memcmp(data, mine, count * sizeof(T)) == 0) return true;
    const auto at = std::mismatch(mine, mine + count, data).first - mine;
    std::fprintf(stderr, "of %lu elements the first wrong one is number %ld\n", count, at);
    return false;
  }

 private:
  static void must(bool is_so) {
    if (is_so) return;
    std::perror("no memory for what is to be compared");
    std::abort();
  }

  uint64_t count_;
  uint64_t mapped_;
  const T* data_ = nullptr;
};

/// Small whole numbers, whose sums and roundings are exact in every type and codec; from 0 on where T has no sign.
template <class T>
Row<T> random_row(uint64_t count, unsigned seed) {
  std::mt19937 random(seed);
  const int least = std::is_signed_v<T> ? -63 : 0;
  return Row<T>(count,
                [&](uint64_t) { return static_cast<T>(least + static_cast<int>(random() % 127)); });
}
template <class T>
Row<T> sum(const Row<T>& a, const Row<T>& b) {
  return Row<T>(a.count(), [&](uint64_t i) { return static_cast<T>(a.data()[i] + b.data()[i]); });
}

/// What comes out. Huge pages, where the system gives them: a million small ones cost more time than the sums.
template <class T>
class Memory {
 public:
  explicit Memory(uint64_t count) {
    const uint64_t bytes = (count * sizeof(T) / kHugePage + 1) * kHugePage;
    data_.reset(static_cast<T*>(std::aligned_alloc(kHugePage, bytes)));
    if (data_ != nullptr) (void)::madvise(data_.get(), bytes, MADV_HUGEPAGE);
  }
  [[nodiscard]] T* data() const { return data_.get(); }

 private:
  static constexpr uint64_t kHugePage = 2U << 20;
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T[], Free> data_;
};

/// Starts so many ranks, each of which runs `rank_main(rank, store, seed)`, 0 for success, and expects it of all.
template <class RankMain>
void expect_of_all(int ranks, const RankMain& rank_main) {
  const unsigned seed = std::random_device{}();
  Processes processes(ranks,
                      [&](int rank, FileStore& store) { return rank_main(rank, store, seed); });
  for (int r = 0; r < ranks; ++r)
    EXPECT_EQ(processes.wait(r, 110), 0) << "rank " << r << ", seed " << seed;
}

}  // namespace paceline::capi::large
