// Several models' residuals on one path: each model's step is kept or taken back by itself, amid the others'.
#include <barrier>
#include <cmath>
#include <mutex>
#include <numeric>
#include <random>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

/// Parameters of three models.
const std::vector<uint64_t> kParameters = {24000, 17, 72009, 32768, 555, 40001};
const std::vector<std::vector<uint64_t>> kModels = {{0, 1}, {2, 3}, {4, 5}};

struct Setting {
  int nodes, local_size;
  device::cuda::WireCodec codec;
};
class SettleApartOf : public testing::TestWithParam<Setting> {};

/// What some ranks have added up of every parameter.
using Sums = std::vector<std::vector<double>>;
Sums zeros() {
  Sums sums;
  for (const uint64_t count : kParameters) sums.emplace_back(count);
  return sums;
}

enum class End { kKeep, kTakeBack, kNone };
struct Turn {
  size_t model;
  End end;  ///< of this model's step, behind its pass
};

// Nothing is lost or kept of any model, however their steps lie in one another; in the memory of one step of each, for a
// model may take many while another one's waits.
TEST_P(SettleApartOf, NothingIsLost) {
  const auto p = GetParam();
  Cluster cluster({.nodes = p.nodes, .local_size = p.local_size});
  std::vector<Turn> turns = {{0, End::kNone}, {1, End::kTakeBack}, {2, End::kKeep}};
  std::mt19937_64 draw(5);
  for (int i = 0; i < 12; ++i)
    turns.push_back({1 + draw() % 2, draw() % 3 == 0 ? End::kTakeBack : End::kKeep});
  turns.push_back({0, End::kKeep});
  turns.push_back({2, End::kNone});
  turns.push_back({0, End::kTakeBack});
  std::mutex mutex;
  std::barrier all(cluster.size());
  Sums sent = zeros(), arrived = zeros(), left = zeros();
  std::vector<Sums> open_sent(kModels.size(), zeros()), open_arrived(kModels.size(), zeros());
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 8 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    constexpr uint64_t kBytes = 4 * 170000;
    ASSERT_TRUE(path.reserve(kBytes, kBytes).is_ok());
    std::normal_distribution<float> normal;
    const auto add = [&](Sums& to, const Tensor& tensor, const std::vector<uint64_t>& keys) {
      const std::lock_guard lock(mutex);
      uint64_t at = 0;
      for (const auto key : keys)
        for (auto& sum : to[key]) sum += tensor.as<float>()[at++];
    };
    for (size_t turn = 0; turn < turns.size(); ++turn) {
      const auto [model, end] = turns[turn];
      auto keys = kModels[model];
      if (turn % 2 == 1) std::reverse(keys.begin(), keys.end());  // other buckets, other owners
      AllReduce a;
      for (const auto key : keys) {
        a.segments.push_back({key, 0, kParameters[key]});
        a.count += kParameters[key];
      }
      Tensor tensor(cluster, r, a.count * sizeof(float));
      std::mt19937_64 random(turn * 1000 + static_cast<uint64_t>(r));
      for (uint64_t i = 0; i < a.count; ++i) tensor.as<float>()[i] = normal(random);
      add(open_sent[model], tensor, keys);
      a.data = tensor.address();
      a.codec = static_cast<int>(p.codec);
      a.ratio = 0.05;
      a.name = "bucket";
      ASSERT_NO_FATAL_FAILURE(carry(cluster, path, a));
      if (r == 0) add(open_arrived[model], tensor, keys);
      all.arrive_and_wait();
      Status settled;
      if (end == End::kKeep) settled = path.commit_residuals(keys);
      if (end == End::kTakeBack) settled = path.rollback_residuals(keys);
      ASSERT_TRUE(settled) << settled.message();
      if (r == 0 && end != End::kNone) {
        for (const auto key : keys) {
          for (uint64_t i = 0; i < kParameters[key] && end == End::kKeep; ++i) {
            sent[key][i] += open_sent[model][key][i];
            arrived[key][i] += open_arrived[model][key][i];
          }
          open_sent[model][key].assign(kParameters[key], 0);
          open_arrived[model][key].assign(kParameters[key], 0);
        }
      }
      all.arrive_and_wait();
    }
    ASSERT_TRUE(path.rollback_residuals().is_ok());  // the last model's is still open
    for (size_t key = 0; key < kParameters.size(); ++key) {
      std::vector<float> values(kParameters[key]);
      ASSERT_TRUE(path.read_residual(key, values).is_ok());
      const std::lock_guard lock(mutex);
      for (uint64_t i = 0; i < values.size(); ++i) left[key][i] += values[i];
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
  for (size_t key = 0; key < kParameters.size(); ++key) {
    double worst = 0, most_left = 0;
    for (uint64_t i = 0; i < kParameters[key]; ++i) {
      worst = std::max(worst, std::abs(arrived[key][i] + left[key][i] - sent[key][i]));
      most_left = std::max(most_left, std::abs(left[key][i]));
    }
    EXPECT_LT(worst, 1e-4 * static_cast<double>(cluster.size())) << "parameter " << key;
    if (kParameters[key] > 1000) {
      EXPECT_GT(most_left, 0.001) << "parameter " << key;
    }
  }
}

/// Of a parameter: what all ranks had, less what has arrived and what they have left.
class Balance {
 public:
  explicit Balance(uint64_t elements) : sum_(elements), open_(elements) {}
  void sent(const float* values) { add(open_, values, 1); }
  void arrived(const float* values) { add(open_, values, -1); }
  void left(const float* values) { add(sum_, values, -1); }
  void end_step(bool keep) {
    for (uint64_t i = 0; i < sum_.size(); ++i) {
      if (keep) sum_[i] += open_[i];
      open_[i] = 0;
    }
  }
  [[nodiscard]] double worst() const {
    double worst = 0;
    for (const double value : sum_) worst = std::max(worst, std::abs(value));
    return worst;
  }

 private:
  static void add(std::vector<double>& to, const float* values, double sign) {
    for (auto& value : to) value += sign * *values++;
  }
  std::vector<double> sum_, open_;
};

class SettleApart : public testing::TestWithParam<int> {};  // ranks of a node

// Buckets of sizes that leave gaps, whose order changes, first fewer and larger ones: a long time beside a step that waits.
// So large that what is reserved beyond a step is little. Of several ranks in a node each gets other shards every time.
TEST_P(SettleApart, ManyStepsTakeTheMemoryOfOne) {
  Cluster cluster({.nodes = 2, .local_size = GetParam()});
  constexpr uint64_t kWaiting = 6;
  const std::vector<uint64_t> sizes = {720'001, 240'005, 240'011, 560'003, 19, 400'021, 640'007};
  std::mutex mutex;
  std::barrier together(cluster.size());
  std::vector<Balance> balances(sizes.begin(), sizes.end());
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 256 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    const uint64_t all = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}) * sizeof(float);
    ASSERT_TRUE(path.reserve(all, all).is_ok());
    std::mt19937_64 random(static_cast<uint64_t>(r)), draw(7);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<uint64_t> keys(kWaiting);
    std::iota(keys.begin(), keys.end(), 0);
    const auto balance = [&](void (Balance::*what)(const float*), const Tensor& tensor,
                             std::span<const uint64_t> bucket) {
      const std::lock_guard lock(mutex);
      const float* values = tensor.as<float>();
      for (const auto key : bucket) {
        (balances[key].*what)(values);
        values += sizes[key];
      }
    };
    const auto send = [&](std::span<const uint64_t> bucket) {
      AllReduce a;
      for (const auto key : bucket) {
        a.segments.push_back({key, 0, sizes[key]});
        a.count += sizes[key];
      }
      Tensor tensor(cluster, r, a.count * sizeof(float));
      for (uint64_t i = 0; i < a.count; ++i) tensor.as<float>()[i] = uniform(random);
      balance(&Balance::sent, tensor, bucket);
      a.data = tensor.address();
      a.codec = static_cast<int>(device::cuda::WireCodec::kInt8);
      a.name = "bucket";
      carry(cluster, path, a);
      if (r == 0) balance(&Balance::arrived, tensor, bucket);
    };
    const auto end = [&](std::span<const uint64_t> of, bool keep) {
      together.arrive_and_wait();
      for (const auto key : of)
        if (r == 0) balances[key].end_step(keep);
      together.arrive_and_wait();
      const auto status = keep ? path.commit_residuals(of) : path.rollback_residuals(of);
      ASSERT_TRUE(status) << status.message();
    };
    const std::vector<uint64_t> waiting = {kWaiting};
    ASSERT_NO_FATAL_FAILURE(send(waiting));
    for (int step = 0; step < 16; ++step) {
      std::shuffle(keys.begin(), keys.end(), draw);
      const size_t most = step == 0 ? keys.size() : 2;
      for (size_t at = 0; at < keys.size(); at += most) {
        ASSERT_NO_FATAL_FAILURE(
            send(std::span(keys).subspan(at, std::min(most, keys.size() - at))));
      }
      ASSERT_NO_FATAL_FAILURE(end(keys, step % 4 != 3)) << "step " << step;
    }
    ASSERT_NO_FATAL_FAILURE(end(waiting, true));
    for (uint64_t key = 0; key < sizes.size(); ++key) {
      std::vector<float> values(sizes[key]);
      ASSERT_TRUE(path.read_residual(key, values).is_ok());
      const std::lock_guard lock(mutex);
      balances[key].left(values.data());
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
  for (uint64_t key = 0; key < sizes.size(); ++key)
    EXPECT_LT(balances[key].worst(), 1e-4) << "parameter " << key;
}

INSTANTIATE_TEST_SUITE_P(RanksOfANode, SettleApart, testing::Values(1, 2));

INSTANTIATE_TEST_SUITE_P(Codecs, SettleApartOf,
                         testing::Values(Setting{2, 1, device::cuda::WireCodec::kTopK},
                                         Setting{2, 2, device::cuda::WireCodec::kTopK},
                                         Setting{3, 1, device::cuda::WireCodec::kInt8},
                                         Setting{3, 2, device::cuda::WireCodec::kInt8}),
                         [](const auto& info) {
                           std::string codec = codec_name(info.param.codec);
                           std::erase(codec, '-');
                           return fmt::format("{}x{}_{}", info.param.nodes, info.param.local_size,
                                              codec);
                         });

}  // namespace
}  // namespace paceline::gpu
