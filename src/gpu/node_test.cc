// The communicators inside a node: in which order its ranks use them.
#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

// NCCL may hold a call until all ranks of the node have made it. Rank 0 makes the second operation's reduce-scatter at once;
// rank 1's comes after the first one's all-gather has begun.
TEST(Node, ACallThatConnectsDoesNotHoldUpTheOtherCommunicator) {
  ClusterOptions o;
  o.local_size = 2;
  Cluster cluster(o);
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 16 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    constexpr uint64_t kCounts[] = {5000, 50000};  // sizes that were not warmed up
    ASSERT_TRUE(path.reserve(55000 * sizeof(float), 50000 * sizeof(float)).is_ok());
    const auto& api = cluster.machine().api();
    cu::Stream stream = nullptr;
    ASSERT_EQ(api.stream_create_with_priority(&stream, 1, 0), 0);
    std::vector<std::unique_ptr<Tensor>> tensors;
    uint64_t last = 0;
    for (const uint64_t count : kCounts) {
      if (!tensors.empty() && r % 2 == 1)
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
      tensors.push_back(std::make_unique<Tensor>(cluster, r, count * sizeof(float)));
      auto* const values = tensors.back()->as<float>();
      for (uint64_t i = 0; i < count; ++i) values[i] = static_cast<float>(r + 1);
      AllReduce a;
      a.data = tensors.back()->address();
      a.count = count;
      a.average = false;
      a.stream = stream;
      auto id = path.all_reduce(a);
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      last = *id;
    }
    ASSERT_TRUE(path.join(last, stream).is_ok());
    bool finite = false;
    const auto status = path.wait_arrival(0, finite);
    ASSERT_TRUE(status.is_ok()) << status.message();
    ASSERT_EQ(api.stream_synchronize(stream), 0);
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(tensors[i]->as<float>()[0], 10);
      EXPECT_EQ(tensors[i]->as<float>()[kCounts[i] - 1], 10);
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

// The same, without chance: NCCL holds the reduce-scatter's call until another thread has made the all-gather's. (Its
// functions take no context.)
std::atomic<bool> is_held{false}, has_gathered{false}, was_in_time{false};
thread_local bool scatters = false;

nc::NcclResult scatter_call(const void* /*from*/, void* /*to*/, size_t /*count*/, nc::Type /*type*/,
                            nc::Op /*op*/, nc::Comm /*comm*/, cu::Stream /*stream*/) {
  scatters = true;
  return 0;
}

nc::NcclResult gather_call(const void* /*from*/, void* /*to*/, size_t /*count*/, nc::Type /*type*/,
                           nc::Comm /*comm*/, cu::Stream /*stream*/) {
  has_gathered = true;
  return 0;
}

nc::NcclResult end_call() {
  if (!scatters) return 0;
  is_held = true;
  for (int i = 0; i < 2000 && !has_gathered; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  was_in_time = has_gathered.load();
  return 0;
}

TEST(Node, ACallThatNcclHoldsLeavesTheOtherCommunicatorFree) {
  nc::Api api;
  api.group_start = [] { return nc::NcclResult{0}; };
  api.group_end = end_call;
  api.reduce_scatter = scatter_call;
  api.all_gather = gather_call;
  Node node(api, 2, 0);
  PathPlan plan;
  plan.shard = 1;
  plan.tail.elements = 0;
  std::array<float, 2> data{};
  const auto address = reinterpret_cast<uint64_t>(data.data());
  std::thread held([&] { EXPECT_TRUE(node.reduce_scatter(plan, address, nullptr)); });
  while (!is_held) std::this_thread::yield();
  EXPECT_TRUE(node.all_gather(plan, address, nullptr));
  held.join();
  EXPECT_TRUE(was_in_time);
}

// Kernels that a backward pass uses for the first time hold up all that their device is given later until all before has
// ended. On rank 0 the first operation comes in before them, on rank 1 after them, and after the second reduce-scatter,
// for which rank 0 is needed: NCCL's kernels must stand in one order on both all the same.
TEST(Node, WhatHoldsUpADeviceBetweenBucketsHoldsUpNoOtherRankForEver) {
  ClusterOptions o;
  o.local_size = 2;
  o.timeout_s = 5;
  o.machine.patience_s = 10;
  Cluster cluster(o);
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    constexpr uint64_t kCount = 5000;
    ASSERT_TRUE(path.reserve(2 * kCount * 4, kCount * 4).is_ok());
    std::vector<std::unique_ptr<Tensor>> tensors;
    uint64_t last = 0;
    const auto sleep_for = [](int ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    };
    if (r >= 2) sleep_for(50);  // the other node: nothing has come yet when rank 1 is through
    for (int i = 0; i < 2; ++i) {
      tensors.push_back(std::make_unique<Tensor>(cluster, r, kCount * 4));
      std::fill_n(tensors.back()->as<float>(), kCount, static_cast<float>(r + i));
      AllReduce a;
      a.data = tensors.back()->address();
      a.count = kCount;
      a.codec = 0;
      auto id = path.all_reduce(a);
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      last = *id;
      if (r == 0 && i == 0) sleep_for(150);
      cluster.machine().add_barrier(nullptr, r);
    }
    ASSERT_TRUE(path.join(last, nullptr).is_ok());
    bool finite = false;
    const auto status = path.wait_arrival(0, finite);
    ASSERT_TRUE(status.is_ok()) << status.message();
    ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
    for (int i = 0; i < 2; ++i)
      EXPECT_EQ(tensors[static_cast<size_t>(i)]->as<float>()[kCount - 1],
                static_cast<float>(6 + 4 * i));
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

// Ranks that wait for single operations, each at its own time, and see them in place; a neighbour may be anywhere else.
class Waits : public OnShapes {};

TEST_P(Waits, ForSingleOperationsFindThemInPlace) {
  Cluster cluster(options());
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.lanes = 2, .piece_bytes = 16 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    constexpr uint64_t kCount = 9000;
    constexpr int kOperations = 6;
    constexpr int kSteps = 5;
    ASSERT_TRUE(path.reserve(kOperations * kCount * 4, kCount * 4));
    std::vector<std::unique_ptr<Tensor>> tensors;
    for (int i = 0; i < kOperations; ++i)
      tensors.push_back(std::make_unique<Tensor>(cluster, r, kCount * 4));
    std::mt19937 random(static_cast<unsigned>(r));
    const auto dally = [&] {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 800));
    };
    for (int step = 0; step < kSteps; ++step) {
      std::vector<uint64_t> ids;
      for (auto& tensor : tensors) {
        std::fill_n(tensor->as<float>(), kCount, static_cast<float>(r + step));
        AllReduce a;
        a.data = tensor->address();
        a.count = kCount;
        a.codec = 0;
        auto id = path.all_reduce(a);
        ASSERT_TRUE(id) << id.status().message();
        ids.push_back(*id);
        dally();
      }
      float wanted = 0;
      for (Rank other = 0; other < cluster.size(); ++other)
        wanted += static_cast<float>(other + step);
      for (size_t i = 0; i < ids.size(); ++i) {
        bool finite = false;
        dally();
        ASSERT_TRUE(path.wait_operation(ids[i], 20, finite));
        EXPECT_TRUE(path.arrived(ids[i]));
        // On the host, without a join: it is there.
        ASSERT_EQ(tensors[i]->as<float>()[kCount - 1], wanted);
      }
      ASSERT_TRUE(path.join(ids.back(), nullptr));
      ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, Waits,
                         testing::Values(ClusterShape{2, 2, 0}, ClusterShape{2, 2, 1},
                                         ClusterShape{3, 2, 0}, ClusterShape{2, 2, 8, 2}));

}  // namespace
}  // namespace paceline::gpu
