// What one call has worked with serves the next, on any thread, until all is forgotten.
#include "codec/kept.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <thread>
#include <vector>

#include "base/testing/allocated.h"
#include "codec/candidates.h"
#include "codec/codec.h"

namespace paceline::codec {
namespace {

using paceline::testing::allocated;

/// How many of these exist.
struct Counted {
  Counted() { ++alive; }
  ~Counted() { --alive; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  int uses = 0;
  static inline int alive = 0;
};

TEST(Kept, ThereAreAsManyAsCallsAtOnce) {
  Kept<Counted> kept;
  for (int i = 0; i < 10; ++i) {
    std::thread([&] {
      const auto loan = kept.take();
      EXPECT_EQ((*loan).uses++, i);
    }).join();
  }
  EXPECT_EQ(Counted::alive, 1);
  {
    const auto one = kept.take();
    const auto other = kept.take();
    EXPECT_NE(&*one, &*other);
  }
  EXPECT_EQ(Counted::alive, 2);
}

TEST(Kept, ForgettingFreesWhatIsIdleAndLaterWhatIsNot) {
  Kept<Counted> kept;
  const int before = Counted::alive;
  {
    { (*kept.take()).uses = 7; }
    const auto loan = kept.take();
    EXPECT_EQ((*loan).uses, 7);
    kept.forget();
    EXPECT_EQ(Counted::alive, before + 1);
  }
  EXPECT_EQ(Counted::alive, before);
  { const auto idle = kept.take(); }
  EXPECT_EQ(Counted::alive, before + 1);
  kept.forget();
  EXPECT_EQ(Counted::alive, before);
}

/// There is memory for none while `refused`.
struct Number {
  Number() {
    if (refused) throw std::bad_alloc();
  }
  uint32_t value = 0;
  static inline bool refused = false;
};

TEST(TopKScratch, AfterALackOfMemoryItHasNone) {
  topk::Scratch<Number> scratch;
  EXPECT_NE(scratch.room(10), nullptr);
  Number::refused = true;
  EXPECT_THROW(scratch.room(20), std::bad_alloc);
  Number::refused = false;
  EXPECT_NE(scratch.room(5), nullptr);
}

TEST(Kept, AnEncodersMemoryIsFreedWhereOtherSizesFollow) {
  plan::CodecSpec spec;
  spec.codec = plan::Codec::kTopK;
  spec.ratio = 0.01;
  const auto encode = [&](std::size_t elements) {
    std::vector<float> gradient(elements), before(elements), after(elements);
    for (std::size_t i = 0; i < elements; ++i)
      gradient[i] = static_cast<float>((i * 2654435761U) % 100'003) - 50'000.0F;
    const ResidualRun run{before.data(), after.data(), elements};
    std::vector<std::byte> dst(encoded_bytes(spec, DType::kFloat32, elements));
    EXPECT_GT(encode_topk(spec, gradient, {&run, 1}, dst.data()).kept, 0U);
  };
  forget_topk_sizes();  // other tests'
  encode(1000);
  const std::size_t small = allocated();
  encode(8 << 20);
  const std::size_t large = allocated();
  forget_topk_sizes();
  encode(1000);
  EXPECT_GT(large, small + (1 << 20));  // or it would show nothing
  EXPECT_LT(allocated(), small + 4096);
}

}  // namespace
}  // namespace paceline::codec
