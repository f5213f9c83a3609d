// A rank whose memory is used up while it computes: its operation fails by name on all ranks, and whoever drives goes on.
// Not under ThreadSanitizer, whose operators new and delete nobody may replace (the linker says so).
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define OPERATORS_ARE_TAKEN
#endif
#endif
#ifndef OPERATORS_ARE_TAKEN
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "codec/codec.h"
#include "engine/engine_test_util.h"

namespace {
/// Of this thread: what is longer is not to be had; 0: everything is.
thread_local std::size_t longest = 0;

void* allocate(std::size_t bytes) {
  void* memory = longest > 0 && bytes > longest ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*bytes*/) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t /*bytes*/) noexcept { std::free(memory); }

namespace paceline::engine {
namespace {

TEST(Memory, NoneToEncodeWithFailsTheOperationByName) {
  constexpr std::size_t kElements = 400'000;
  Cluster cluster(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(kElements, 1));
  for (Rank r = 0; r < 2; ++r) {
    Operation o;
    o.count = kElements;
    o.input = o.output = data[static_cast<std::size_t>(r)].data();
    o.codec.codec = plan::Codec::kTopK;
    o.codec.ratio = 0.5;
    o.name = "bucket";
    ASSERT_TRUE(cluster[r].submit(o, cluster.now));
  }
  codec::forget_topk_sizes();  // what other tests have left would do
  std::vector<OpId> ended;
  longest = kElements;
  EXPECT_NO_THROW(cluster[0].progress(cluster.now, ended));
  longest = 0;
  EXPECT_TRUE(cluster.drive([&] { return !cluster[0].health() && !cluster[1].health(); }));
  for (Rank r = 0; r < 2; ++r) {
    EXPECT_EQ(cluster[r].health().code(), Code::kResourceExhausted);
    EXPECT_NE(cluster[r].health().message().find("'bucket' on rank 0 (host host-a): no memory"),
              std::string::npos)
        << cluster[r].health().message();
  }
}

}  // namespace
}  // namespace paceline::engine
#endif
