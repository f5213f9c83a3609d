// Residuals over steps: nothing is lost, whoever keeps what.
#include <cmath>
#include <mutex>
#include <random>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

/// Parameters 0 … 4 of these sizes, in buckets.
const std::vector<uint64_t> kParameters = {24000, 17, 72009, 32768, 555};

struct Feedback {
  int nodes, local_size;
  device::cuda::WireCodec codec;
  uint64_t usual_in_node = 0;
};
class FeedbackOf : public testing::TestWithParam<Feedback> {};

// What was not sent stays: over all steps, what arrived and what is left are the gradients, whatever buckets were cut;
// a step that is rolled back leaves no trace.
TEST_P(FeedbackOf, NothingIsLostOverSteps) {
  const auto p = GetParam();
  Cluster cluster({.nodes = p.nodes, .local_size = p.local_size});
  const auto size = static_cast<size_t>(cluster.size());
  // Buckets as lists of parameters: rebuilt after the first step, one parameter missing in the third.
  const std::vector<std::vector<std::vector<size_t>>> steps = {{{0, 1, 2}, {3, 4}},
                                                               {{4, 3, 2}, {1, 0}},
                                                               {{4, 3, 2}, {0}},
                                                               {{4, 3, 2}, {1, 0}},
                                                               {{4, 3, 2}, {1, 0}}};
  constexpr size_t kRolledBack = 3;
  std::vector<std::vector<double>> arrived(kParameters.size()), sent(kParameters.size()),
      left(kParameters.size());
  for (size_t i = 0; i < kParameters.size(); ++i) {
    arrived[i].resize(kParameters[i]);
    sent[i].resize(kParameters[i]);
    left[i].resize(kParameters[i]);
  }
  std::mutex mutex;
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 8 * 1024, .usual_in_node = p.usual_in_node});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(4 * 130000, 4 * 130000).is_ok());
    for (size_t step = 0; step < steps.size(); ++step) {
      for (const auto& bucket : steps[step]) {
        uint64_t count = 0;
        for (auto i : bucket) count += kParameters[i];
        Tensor tensor(cluster, r, count * sizeof(float));
        std::mt19937_64 random(step * 1000 + static_cast<uint64_t>(r));
        std::normal_distribution<float> normal;
        AllReduce a;
        uint64_t at = 0;
        for (auto i : bucket) {
          a.segments.push_back({i, 0, kParameters[i]});
          for (uint64_t k = 0; k < kParameters[i]; ++k) tensor.as<float>()[at++] = normal(random);
        }
        if (step != kRolledBack) {
          std::lock_guard lock(mutex);
          at = 0;
          for (auto i : bucket)
            for (uint64_t k = 0; k < kParameters[i]; ++k) sent[i][k] += tensor.as<float>()[at++];
        }
        a.data = tensor.address();
        a.count = count;
        a.codec = static_cast<int>(p.codec);
        a.ratio = 0.05;
        a.name = "bucket";
        ASSERT_NO_FATAL_FAILURE(carry(cluster, path, a));
        if (r == 0 && step != kRolledBack) {
          std::lock_guard lock(mutex);
          at = 0;
          for (auto i : bucket)
            for (uint64_t k = 0; k < kParameters[i]; ++k) arrived[i][k] += tensor.as<float>()[at++];
        }
      }
      if (step == kRolledBack) {
        ASSERT_TRUE(path.rollback_residuals().is_ok());
      } else {
        ASSERT_TRUE(path.commit_residuals().is_ok());
      }
      if (step == 1) {  // through a checkpoint and back
        for (size_t i = 0; i < kParameters.size(); ++i) {
          std::vector<float> values(kParameters[i]);
          ASSERT_TRUE(path.read_residual(i, values).is_ok());
          ASSERT_TRUE(path.write_residual(i, values).is_ok());
        }
      }
    }
    for (size_t i = 0; i < kParameters.size(); ++i) {
      std::vector<float> values(kParameters[i]);
      ASSERT_TRUE(path.read_residual(i, values).is_ok());
      std::lock_guard lock(mutex);
      for (uint64_t k = 0; k < kParameters[i]; ++k) left[i][k] += values[k];
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
  double worst = 0;
  double most_left = 0;
  for (size_t i = 0; i < kParameters.size(); ++i) {
    for (uint64_t k = 0; k < kParameters[i]; ++k) {
      worst = std::max(worst, std::abs(arrived[i][k] + left[i][k] - sent[i][k]));
      most_left = std::max(most_left, std::abs(left[i][k]));
    }
  }
  EXPECT_LT(worst, 1e-4 * static_cast<double>(size));
  EXPECT_GT(most_left, 0.001);
}

class OwnersOf : public testing::TestWithParam<Feedback> {};

// Rebuilt buckets make other ranks of a node owners, and with two hops other nodes sum a part: what was not sent goes with
// them, in the memory of one step.
TEST_P(OwnersOf, ResidualsFollowTheirOwners) {
  const auto p = GetParam();
  Cluster cluster({.nodes = p.nodes, .local_size = p.local_size});
  constexpr uint64_t kEach = 300000;
  std::mutex mutex;
  std::vector<double> arrived(2 * kEach), sent(2 * kEach), left(2 * kEach);
  std::vector<int> holders(2 * kEach);
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 256 * 1024, .usual_in_node = p.usual_in_node});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(4 * 2 * kEach, 4 * 2 * kEach).is_ok());
    std::mt19937_64 random(static_cast<uint64_t>(r));
    std::normal_distribution<float> normal;
    for (const bool rebuilt : {false, true, true}) {
      // Two buckets of a parameter each, then one of both: a node's second rank had the second half of each, now all of one.
      const std::vector<std::vector<uint64_t>> buckets =
          rebuilt ? std::vector<std::vector<uint64_t>>{{1, 0}}
                  : std::vector<std::vector<uint64_t>>{{0}, {1}};
      for (const auto& bucket : buckets) {
        Tensor tensor(cluster, r, bucket.size() * kEach * sizeof(float));
        AllReduce a;
        for (uint64_t i = 0; i < bucket.size() * kEach; ++i) tensor.as<float>()[i] = normal(random);
        for (const auto key : bucket) a.segments.push_back({key, 0, kEach});
        const auto add_to = [&](std::vector<double>& sums) {
          std::lock_guard lock(mutex);
          for (uint64_t i = 0; i < bucket.size() * kEach; ++i)
            sums[bucket[i / kEach] * kEach + i % kEach] += tensor.as<float>()[i];
        };
        add_to(sent);
        a.data = tensor.address();
        a.count = bucket.size() * kEach;
        a.codec = static_cast<int>(p.codec);
        a.ratio = 0.05;
        a.name = "bucket";
        ASSERT_NO_FATAL_FAILURE(carry(cluster, path, a));
        if (r == 0) add_to(arrived);
      }
      ASSERT_TRUE(path.commit_residuals().is_ok());
    }
    for (uint64_t key = 0; key < 2; ++key) {
      std::vector<float> values(kEach);
      ASSERT_TRUE(path.read_residual(key, values).is_ok());
      std::lock_guard lock(mutex);
      for (uint64_t k = 0; k < kEach; ++k) {
        left[key * kEach + k] += values[k];
        holders[key * kEach + k] += values[k] != 0 ? 1 : 0;
      }
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
  double worst = 0;
  for (size_t i = 0; i < sent.size(); ++i)
    worst = std::max(worst, std::abs(arrived[i] + left[i] - sent[i]));
  EXPECT_LT(worst, 1e-3);
  // One rank of each node keeps what it has not sent; that of a sum is one of them.
  EXPECT_LE(*std::max_element(holders.begin(), holders.end()), p.nodes);
}

std::string feedback_name(const testing::TestParamInfo<Feedback>& info) {
  std::string codec = codec_name(info.param.codec);
  std::erase(codec, '-');
  return fmt::format("{}x{}_{}{}", info.param.nodes, info.param.local_size, codec,
                     info.param.usual_in_node > 0 ? "_cut" : "");
}

INSTANTIATE_TEST_SUITE_P(Codecs, OwnersOf,
                         testing::Values(Feedback{2, 2, device::cuda::WireCodec::kTopK},
                                         Feedback{2, 2, device::cuda::WireCodec::kInt8},
                                         Feedback{3, 1, device::cuda::WireCodec::kInt8},
                                         Feedback{3, 2, device::cuda::WireCodec::kInt8},
                                         Feedback{2, 2, device::cuda::WireCodec::kTopK, 100000},
                                         Feedback{3, 2, device::cuda::WireCodec::kInt8, 100000}),
                         feedback_name);

INSTANTIATE_TEST_SUITE_P(Codecs, FeedbackOf,
                         testing::Values(Feedback{2, 1, device::cuda::WireCodec::kTopK},
                                         Feedback{2, 2, device::cuda::WireCodec::kTopK},
                                         Feedback{3, 1, device::cuda::WireCodec::kTopK},
                                         Feedback{2, 1, device::cuda::WireCodec::kInt8},
                                         Feedback{2, 2, device::cuda::WireCodec::kInt8},
                                         Feedback{3, 1, device::cuda::WireCodec::kInt8},
                                         Feedback{3, 2, device::cuda::WireCodec::kInt8},
                                         Feedback{2, 2, device::cuda::WireCodec::kTopK, 100000},
                                         Feedback{3, 2, device::cuda::WireCodec::kInt8, 100000}),
                         feedback_name);

}  // namespace
}  // namespace paceline::gpu
