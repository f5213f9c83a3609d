// A new loss scale multiplies what error feedback keeps, wherever parameters begin in memory.
#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

using device::cuda::WireCodec;

class LossScale : public testing::TestWithParam<std::tuple<WireCodec, int>> {};  // nodes

TEST_P(LossScale, MultipliesEveryResidual) {
  constexpr uint64_t kFirst = 1003, kSecond = 10, kCount = kFirst + kSecond + 70'001;
  const WireCodec codec = std::get<0>(GetParam());
  Cluster cluster({.nodes = std::get<1>(GetParam())});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 64 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4).is_ok());
    const auto& api = cluster.machine().api();
    cu::DevicePtr data = 0;
    ASSERT_EQ(api.mem_alloc(&data, kCount * 4), 0);
    std::vector<float> values(kCount);
    for (uint64_t i = 0; i < kCount; ++i)
      values[i] = static_cast<float>((i * 37 + static_cast<uint64_t>(r)) % 1009) - 400.5F;
    cu::Stream stream = nullptr;
    ASSERT_EQ(api.stream_create_with_priority(&stream, 1, 0), 0);
    ASSERT_EQ(api.memcpy_htod_async(data, values.data(), kCount * 4, stream), 0);
    AllReduce a;
    a.data = data;
    a.count = kCount;
    a.codec = static_cast<int>(codec);
    a.ratio = 0.01;
    a.stream = stream;
    a.segments = {{1, 0, kFirst}, {2, 0, kSecond}, {3, 0, kCount - kFirst - kSecond}};
    ASSERT_TRUE(path.all_reduce(a).is_ok());
    bool finite = false;
    ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
    ASSERT_TRUE(path.commit_residuals().is_ok());
    const auto read = [&] {
      std::vector<float> all(kCount);
      float* to = all.data();
      for (const auto& s : a.segments) {
        EXPECT_TRUE(path.read_residual(s.key, {to, s.elements}).is_ok());
        to += s.elements;
      }
      return all;
    };
    const auto before = read();
    auto scaled = path.scale_residuals(0.5);
    ASSERT_TRUE(scaled.is_ok()) << scaled.message();
    const auto after = read();
    uint64_t kept = 0;
    for (uint64_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(after[i], before[i] * 0.5F) << i;
      kept += static_cast<uint64_t>(before[i] != 0);
    }
    EXPECT_GT(kept, kCount / 4);
    EXPECT_FALSE(path.scale_residuals(0).is_ok());
    // The second one begins at an address that no kernel takes, and has all of its elements ahead of the first aligned one
    // or some behind it.
    const uint64_t keys[] = {2, 3};
    ASSERT_TRUE(path.scale_residuals(3, std::span(keys).first(1)).is_ok());
    const auto second = read();
    ASSERT_TRUE(path.scale_residuals(0.25, std::span(keys).subspan(1)).is_ok());
    const auto third = read();
    for (uint64_t i = 0; i < kCount; ++i) {
      const bool in_second = i >= kFirst && i < kFirst + kSecond;
      ASSERT_EQ(second[i], after[i] * (in_second ? 3.0F : 1.0F)) << i;
      ASSERT_EQ(third[i], second[i] * (i >= kFirst + kSecond ? 0.25F : 1.0F)) << i;
    }
    EXPECT_TRUE(path.scale_residuals(2, std::span(keys).first(0)).is_ok());
    EXPECT_EQ(read(), third);
    EXPECT_TRUE(path.destroy().is_ok());
    EXPECT_EQ(api.mem_free(data), 0);
  });
}

// On three nodes sums owe something, too.
INSTANTIATE_TEST_SUITE_P(Codecs, LossScale,
                         testing::Values(std::tuple(WireCodec::kTopK, 2),
                                         std::tuple(WireCodec::kInt8, 2),
                                         std::tuple(WireCodec::kInt8, 3)));

}  // namespace
}  // namespace paceline::gpu
