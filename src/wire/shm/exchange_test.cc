// Pages that are exchanged keep what they hold, also where the system can't put the others in their place.
#include "wire/shm/exchange.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/shared_memory.h"

// ThreadSanitizer ends the process where it gets no mapping of its own.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PACELINE_TEST_NEEDS_MAPPINGS 1
#endif
#endif

#ifndef PACELINE_TEST_NEEDS_MAPPINGS
namespace paceline::wire::shm {
namespace {

constexpr uint64_t kBytes = 3 << 20;

/// A process may have so many mappings and no more; all but a few of them are taken while this lives.
class FewMappings {
 public:
  explicit FewMappings(uint64_t most)
      : page_(page_size()),
        pages_(2 * most),
        begin_(
            static_cast<std::byte*>(::mmap(nullptr, pages_ * page_, PROT_NONE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    while (taken_ + 1 < pages_ && ::mprotect(begin_ + taken_ * page_, page_, PROT_READ) == 0)
      taken_ += 2;
  }
  ~FewMappings() { ::munmap(begin_, pages_ * page_); }
  FewMappings(const FewMappings&) = delete;
  FewMappings& operator=(const FewMappings&) = delete;
  [[nodiscard]] bool all_taken() const { return taken_ + 1 < pages_; }
  /// Two mappings more.
  void give_back() {
    taken_ -= 2;
    (void)::mprotect(begin_ + taken_ * page_, page_, PROT_NONE);
  }

 private:
  uint64_t page_, pages_, taken_ = 0;
  std::byte* begin_;
};

TEST(Exchange, WhatCantBeExchangedHoldsWhatItHeld) {
  uint64_t most = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> most;
  if (most == 0 || most > 1'000'000)
    GTEST_SKIP() << "this system lets a process have any number of mappings";
  const Fd file(::memfd_create("exchange", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(file.get(), kBytes), 0);
  // In the middle of other memory: to exchange it makes three mappings of one.
  auto* const around = static_cast<std::byte*>(
      ::mmap(nullptr, 3 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(around, MAP_FAILED);
  std::byte* const begin = around + kBytes;
  std::mt19937_64 random(1);
  std::vector<std::byte> held(kBytes);
  for (auto& byte : held) byte = static_cast<std::byte>(random());
  std::copy(held.begin(), held.end(), begin);
  std::vector<std::string> refused;
  {
    FewMappings few(most);
    if (!few.all_taken()) GTEST_SKIP() << "this system does not count a process's mappings";
    for (int i = 0; i < 8; ++i, few.give_back()) {
      const Status status = exchange_for_shared(begin, kBytes, file.get(), 0);
      ASSERT_TRUE(std::equal(held.begin(), held.end(), begin)) << status.message();
      if (status.is_ok()) break;
      EXPECT_EQ(status.code(), Code::kResourceExhausted);
      refused.push_back(status.message());
    }
  }
  const auto too_late = [](const std::string& text) { return text.starts_with("exchanging"); };
  EXPECT_TRUE(std::any_of(refused.begin(), refused.end(), too_late))
      << "it never failed at its end";
  ASSERT_TRUE(exchange_for_shared(begin, kBytes, file.get(), 0).is_ok());
  ASSERT_TRUE(exchange_for_private(begin, kBytes).is_ok());
  EXPECT_TRUE(std::equal(held.begin(), held.end(), begin));
  ::munmap(around, 3 * kBytes);
}

}  // namespace
}  // namespace paceline::wire::shm
#endif
