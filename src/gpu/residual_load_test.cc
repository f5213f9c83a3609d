// Residuals of a checkpoint: back into the memory of one step, and into that of other ranks.
#include <cmath>
#include <mutex>
#include <random>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kElements = 1'000'000;
constexpr uint64_t kKey = 7;

/// A pass over one parameter of kElements; `scale` 0: of zeros. What has arrived is in the result.
std::vector<float> pass(Cluster& cluster, Path& path, Rank r, float scale, double momentum = 0) {
  Tensor tensor(cluster, r, kElements * sizeof(float));
  std::mt19937_64 random(static_cast<uint64_t>(r));
  std::normal_distribution<float> normal;
  for (uint64_t i = 0; i < kElements; ++i) tensor.as<float>()[i] = scale * normal(random);
  AllReduce a;
  a.data = tensor.address();
  a.count = kElements;
  a.codec = static_cast<int>(device::cuda::WireCodec::kTopK);
  a.ratio = 0.05;
  a.momentum = momentum;
  a.segments = {{kKey, 0, kElements}};
  a.name = "bucket";
  carry(cluster, path, a);
  EXPECT_TRUE(path.commit_residuals().is_ok());
  return {tensor.as<float>(), tensor.as<float>() + kElements};
}

std::vector<float> read(Path& path) {
  std::vector<float> values(kElements);
  EXPECT_TRUE(path.read_residual(kKey, values).is_ok());
  return values;
}

std::vector<float> read_velocity(Path& path) {
  std::vector<float> values(kElements);
  EXPECT_TRUE(path.read_velocity(kKey, values).is_ok());
  return values;
}

/// A path that has reserved what one step of the parameter needs, and no more.
std::unique_ptr<Path> path_of(Cluster& cluster, Rank r) {
  auto made = cluster.create(r, {.piece_bytes = 64 * 1024, .usual_in_node = 400'000});
  EXPECT_TRUE(made.is_ok()) << made.status().message();
  EXPECT_TRUE((*made)->reserve(4 * kElements, 4 * kElements).is_ok());
  return std::move(*made);
}

// Large all-reduces are several, and so a rank's part of a parameter has gaps.
TEST(ResidualLoad, WhatARankHadGoesBackBeforeTheFirstPassAndAfterSome) {
  std::vector<std::vector<float>> saved(4);
  std::vector<uint64_t> of_a_step(4);
  for (const int passes : {2, 0}) {
    Cluster cluster({.nodes = 2, .local_size = 2});
    cluster.run([&](Rank r) {
      auto path = path_of(cluster, r);
      for (int i = 0; i < passes; ++i) pass(cluster, *path, r, 1);
      auto& mine = saved[static_cast<size_t>(r)];
      auto& memory = of_a_step[static_cast<size_t>(r)];
      if (passes > 0) {
        mine = read(*path);
        memory = path->statistics().residual_bytes;
      }
      EXPECT_GT(std::count(mine.begin(), mine.end(), 0.0F), kElements / 2) << "others' shards";
      const Status written = path->write_residual(kKey, mine);
      ASSERT_TRUE(written.is_ok()) << written.message();
      EXPECT_EQ(path->statistics().residual_bytes, memory);
      EXPECT_EQ(read(*path), mine);
      pass(cluster, *path, r, 1);
      EXPECT_TRUE(path->destroy().is_ok());
    });
  }
}

// Momentum correction goes on where it was: the next averages are those of ranks that were never interrupted.
TEST(ResidualLoad, VelocitiesGoBackBesideResiduals) {
  constexpr double kMomentum = 0.9;
  struct Saved {
    std::vector<float> residual, velocity, next, residual_after, velocity_after;
  };
  std::vector<Saved> saved(4);
  for (const bool resumed : {false, true}) {
    Cluster cluster({.nodes = 2, .local_size = 2});
    cluster.run([&](Rank r) {
      auto path = path_of(cluster, r);
      auto& mine = saved[static_cast<size_t>(r)];
      if (!resumed) {
        EXPECT_EQ(read_velocity(*path), std::vector<float>(kElements)) << "there is none yet";
        for (int i = 0; i < 3; ++i) pass(cluster, *path, r, 1, kMomentum);
        mine.residual = read(*path);
        mine.velocity = read_velocity(*path);
        EXPECT_NE(mine.residual, mine.velocity);
        EXPECT_GT(kElements - static_cast<uint64_t>(
                                  std::count(mine.velocity.begin(), mine.velocity.end(), 0.0F)),
                  kElements / 8);
      } else {
        ASSERT_TRUE(path->write_velocity(kKey, std::vector<float>(kElements)).is_ok()) << "nothing";
        ASSERT_TRUE(path->write_residual(kKey, mine.residual).is_ok());
        const Status written = path->write_velocity(kKey, mine.velocity);
        ASSERT_TRUE(written.is_ok()) << written.message();
        EXPECT_EQ(read(*path), mine.residual);
        EXPECT_EQ(read_velocity(*path), mine.velocity);
        EXPECT_FALSE(path->write_velocity(kKey, {}).is_ok());
      }
      const auto next = pass(cluster, *path, r, 1, kMomentum);
      if (!resumed) mine.next = next;
      EXPECT_EQ(next, mine.next);
      if (!resumed) mine.residual_after = read(*path);
      if (!resumed) mine.velocity_after = read_velocity(*path);
      EXPECT_EQ(read(*path), mine.residual_after);
      EXPECT_EQ(read_velocity(*path), mine.velocity_after);
      // A new loss scale multiplies both.
      const uint64_t keys[] = {kKey};
      ASSERT_TRUE(path->scale_residuals(0.5, keys).is_ok());
      auto half = mine.velocity_after;
      for (auto& value : half) value *= 0.5F;
      EXPECT_EQ(read_velocity(*path), half);
      ASSERT_TRUE(path->write_residual(kKey, {}).is_ok());
      EXPECT_EQ(read_velocity(*path), std::vector<float>(kElements)) << "a forgotten parameter's";
      EXPECT_TRUE(path->destroy().is_ok());
    });
  }
}

// Even shares, as a checkpoint of any number of ranks is dealt out: they reach whoever has them to send, and nothing is lost.
TEST(ResidualLoad, SharesOfAnotherNumberOfRanksFindTheirOwners) {
  for (const int passes : {2, 0}) {
    Cluster cluster({.nodes = 2, .local_size = 2});
    std::mutex mutex;
    std::vector<double> arrived(kElements), left(kElements);
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> total(kElements);
    for (auto& value : total) value = normal(random);
    cluster.run([&](Rank r) {
      auto path = path_of(cluster, r);
      for (int i = 0; i < passes; ++i) pass(cluster, *path, r, 1);
      std::vector<float> share(kElements);
      const auto first = kElements * static_cast<uint64_t>(r) / 4;
      std::copy_n(total.begin() + static_cast<int64_t>(first), kElements / 4,
                  share.begin() + static_cast<int64_t>(first));
      const Status written = path->write_residual(kKey, share);
      ASSERT_TRUE(written.is_ok()) << written.message();
      EXPECT_EQ(read(*path), share);
      for (int i = 0; i < 3; ++i) {
        const auto sum = pass(cluster, *path, r, 0);
        for (uint64_t k = 0; r == 0 && k < kElements; ++k) arrived[k] += sum[k];
      }
      const auto rest = read(*path);
      {
        std::lock_guard lock(mutex);
        for (uint64_t k = 0; k < kElements; ++k) left[k] += rest[k];
      }
      EXPECT_TRUE(path->destroy().is_ok());
    });
    double worst = 0, sent = 0;
    for (uint64_t k = 0; k < kElements; ++k) {
      worst = std::max(worst, std::abs(arrived[k] + left[k] - total[k]));
      sent += std::abs(arrived[k]);
    }
    EXPECT_LT(worst, 1e-4) << passes;
    EXPECT_GT(sent, 1000);
  }
}

}  // namespace
}  // namespace paceline::gpu
