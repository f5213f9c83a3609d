// Finite numbers that the wire's type can't hold are counted and said once, by the rank that sends them.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/log.h"
#include "device/cuda/numbers.h"
#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

using device::cuda::WireCodec;

constexpr uint64_t kCount = 3000;

struct Case {
  float value;
  WireCodec codec = WireCodec::kFp16;
  DType dtype = DType::kFloat32;
  uint64_t row_elements = 0;
  double factor = 1;
};

class Saturation : public testing::Test {
 protected:
  void SetUp() override { log::forget_keys(); }
  void TearDown() override {
    unsetenv("PACELINE_GRADIENT_SCALE");
    unsetenv("PACELINE_LOG_LEVEL");
    log::set_level(log::Level::kWarning);
  }

  /// All-reduces of ones, with `value` in the middle of rank 1's: what each rank has counted after each, and all that was
  /// written to standard error.
  struct Outcome {
    std::vector<uint64_t> counts[2];
    std::string said;
    float middle = 0;  ///< of the last sum
  };
  static Outcome run(const std::vector<Case>& cases) {
    Outcome outcome;
    Cluster cluster({});
    testing::internal::CaptureStderr();
    cluster.run([&](Rank r) {
      auto made = cluster.create(r);
      ASSERT_TRUE(made.is_ok()) << made.status().message();
      auto& path = **made;
      for (const auto& c : cases) {
        const Tensor data(cluster, r, kCount * sizeof(float));
        for (uint64_t i = 0; i < kCount; ++i) {
          const float v = r == 1 && i == kCount / 2 ? c.value : 1.0F;
          if (c.dtype == DType::kFloat16)
            data.as<uint16_t>()[i] = device::cuda::Float16::narrow(v);
          else
            data.as<float>()[i] = v;
        }
        AllReduce a;
        a.data = data.address();
        a.count = kCount;
        a.dtype = c.dtype;
        a.codec = static_cast<int>(c.codec);
        a.row_elements = c.row_elements;
        a.factor = c.factor;
        a.name = "bucket 3 of model 1";
        carry(cluster, path, a);
        outcome.counts[r].push_back(path.statistics().saturated);
        if (r == 0 && c.dtype == DType::kFloat32) outcome.middle = data.as<float>()[kCount / 2];
      }
      EXPECT_TRUE(path.destroy().is_ok());
    });
    outcome.said = testing::internal::GetCapturedStderr();
    return outcome;
  }
  static size_t lines(const std::string& text) {
    return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  }
  using Counts = std::vector<uint64_t>;
};

TEST_F(Saturation, IsCountedEachTimeAndSaidOnce) {
  const auto o = run({{1.0F}, {1e6F}, {65504.0F}, {-1e6F}});
  EXPECT_EQ(o.counts[1], (Counts{0, 1, 1, 2}));
  EXPECT_EQ(o.counts[0], (Counts{0, 0, 0, 0})) << "its numbers are ones";
  EXPECT_EQ(o.middle, 1 - 65504.0F);
  EXPECT_EQ(lines(o.said), 1U) << o.said;
  for (const char* part :
       {"[paceline] warning: rank 1: bucket 3 of model 1 (all-reduce of [3000] of float32 as fp16)",
        "beyond fp16's 65504, which are sent as the largest one", "PACELINE_GRADIENT_SCALE",
        "bf16 in fp16's place"})
    EXPECT_NE(o.said.find(part), std::string::npos) << part << ": " << o.said;
}

TEST_F(Saturation, IsCountedAndNotSaidAtTheLogLevelOfErrors) {
  setenv("PACELINE_LOG_LEVEL", "error", 1);
  const auto o = run({{1e6F}});
  EXPECT_EQ(o.counts[1], (Counts{1}));
  EXPECT_EQ(o.said, "");
}

TEST_F(Saturation, IsNoneOfWhatFits) {
  const auto o = run({{1.0F},
                      {1e6F, WireCodec::kExact},
                      {1e6F, WireCodec::kBf16},
                      {1e6F, WireCodec::kInt8},
                      {INFINITY},
                      {NAN}});
  for (const auto& counts : o.counts) EXPECT_EQ(counts, Counts(6, 0));
  EXPECT_EQ(o.said, "");
}

TEST_F(Saturation, OfRowsAndOfWhatHasTheTypeAlready) {
  const auto rows = run({{1e6F, WireCodec::kFp16, DType::kFloat32, 10}});
  EXPECT_EQ(rows.counts[1], (Counts{1}));
  log::forget_keys();
  const auto halves = run({{60000.0F, WireCodec::kExact, DType::kFloat16, 0, 2}});
  EXPECT_EQ(halves.counts[1], (Counts{1}));
  EXPECT_NE(halves.said.find("beyond fp16's 65504"), std::string::npos) << halves.said;
  EXPECT_EQ(halves.said.find("PACELINE_GRADIENT_SCALE"), std::string::npos)
      << "it is no part of that: " << halves.said;
  log::forget_keys();
  const auto bf16 = run({{3.4e38F, WireCodec::kBf16}});
  EXPECT_EQ(bf16.counts[1], (Counts{1}));
  EXPECT_NE(bf16.said.find("beyond bf16's 3.39e38"), std::string::npos) << bf16.said;
}

TEST_F(Saturation, EndsWithTheScaleThatItsLineNames) {
  setenv("PACELINE_GRADIENT_SCALE", "0.01", 1);
  const auto o = run({{1e6F}});
  EXPECT_EQ(o.counts[1], (Counts{0}));
  EXPECT_NEAR(o.middle, 1e6F, 1e3F);
  EXPECT_EQ(o.said, "");
}

}  // namespace
}  // namespace paceline::gpu
