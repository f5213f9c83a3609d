// What comes spreads in a node by copies: when, what of, and what is left at the end.
#include "gpu/node_copies.h"

#include <atomic>
#include <thread>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kCount = 30011;

ClusterOptions two_by_two(const char* node_gather = "copies") {
  ClusterOptions o;
  o.nodes = 2;
  o.local_size = 2;
  o.node_gather = node_gather;
  return o;
}

/// A path that must be there.
std::unique_ptr<Path> path_of(Cluster& cluster, Rank r, const PathOptions& options = {}) {
  auto made = cluster.create(r, options);
  EXPECT_TRUE(made.is_ok()) << made.status().message();
  return made ? std::move(*made) : nullptr;
}

Result<uint64_t> sum_of(Path& path, const Tensor& tensor, uint64_t count = kCount) {
  AllReduce a;
  a.data = tensor.address();
  a.count = count;
  a.codec = 0;
  return path.all_reduce(a);
}

void sleep_for_ms(int time) { std::this_thread::sleep_for(std::chrono::milliseconds(time)); }

/// What rank r has at element i in step `step`: random, and a small integer, so that sums are exact in any order.
float value(Rank r, int step, uint64_t i) {
  uint64_t x = (i * 64 + static_cast<uint64_t>(r)) * 1024 + static_cast<uint64_t>(step);
  x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9;
  return static_cast<float>(static_cast<int>(x >> 53) - 1024);
}

void fill(const Tensor& tensor, Rank r, int step) {
  for (uint64_t i = 0; i < kCount; ++i) tensor.as<float>()[i] = value(r, step, i);
}

/// The first element that is not what four ranks' add up to; kCount: none.
uint64_t first_wrong(const Tensor& tensor, int step) {
  for (uint64_t i = 0; i < kCount; ++i) {
    float sum = 0;
    for (Rank r = 0; r < 4; ++r) sum += value(r, step, i);
    if (tensor.as<float>()[i] != sum) return i;
  }
  return kCount;
}

void expect_sum_of_step(Cluster& cluster, Path& path, Rank r, const Tensor& tensor, int step) {
  fill(tensor, r, step);
  auto id = sum_of(path, tensor);
  ASSERT_TRUE(id.is_ok()) << id.status().message();
  ASSERT_TRUE(path.join(*id, nullptr).is_ok());
  bool finite = false;
  ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
  ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
  EXPECT_EQ(first_wrong(tensor, step), kCount) << step;
}

// All has come over the network everywhere, but one rank's GPU has yet to add it up.
TEST(NodeCopies, NoRankReadsWhatIsNotInPlaceYet) {
  for (const bool ahead : {false, true}) {
    Cluster cluster(two_by_two());
    constexpr std::string_view kCombines = "combine";
    static constexpr size_t kSizes[] = {
#define PACELINE_ARGUMENT_SIZE(name, argument) sizeof(device::cuda::argument),
        PACELINE_KERNELS(PACELINE_ARGUMENT_SIZE)
#undef PACELINE_ARGUMENT_SIZE
    };
    std::atomic<uintptr_t> late{0};
    size_t i = 0;
    for (const auto& kernel : device::cuda::reference::kernels()) {
      const size_t size = kSizes[i++];
      if (std::string_view(kernel.name).find(kCombines) == std::string_view::npos) continue;
      cluster.machine().add_kernel(kernel.name,
                                   {{size}, [&late, run = kernel.run](const auto&, void* const* a) {
                                      if (late != 0) sleep_for_ms(20);
                                      void* copy = a[0];
                                      run(&copy);
                                    }});
    }
    cluster.run([&](Rank r) {
      auto path = path_of(cluster, r, {.ahead = ahead});
      ASSERT_NE(path, nullptr);
      Tensor tensor(cluster, r, kCount * 4);
      late = 1;
      for (int step = 0; step < 5; ++step) expect_sum_of_step(cluster, *path, r, tensor, step);
      EXPECT_TRUE(path->destroy().is_ok());
    });
  }
}

// Copies out of a slot take long on one rank; what comes two operations later would go into the same slot.
TEST(NodeCopies, ASlotIsWrittenAgainWhenAllHaveReadIt) {
  ClusterOptions o = two_by_two();
  o.machine.delays_us = 3000;
  Cluster cluster(o);
  cluster.run([&](Rank r) {
    auto path = path_of(cluster, r);
    ASSERT_NE(path, nullptr);
    constexpr int kBuckets = 12;
    std::vector<std::unique_ptr<Tensor>> tensors;
    uint64_t last = 0;
    for (int b = 0; b < kBuckets; ++b) {
      tensors.push_back(std::make_unique<Tensor>(cluster, r, kCount * 4));
      fill(*tensors.back(), r, b);
      auto id = sum_of(*path, *tensors.back());
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      last = *id;
    }
    ASSERT_TRUE(path->join(last, nullptr).is_ok());
    ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
    for (int b = 0; b < kBuckets; ++b)
      EXPECT_EQ(first_wrong(*tensors[static_cast<size_t>(b)], b), kCount) << b;
    EXPECT_TRUE(path->destroy().is_ok());
  });
}

// One GPU that can't read its neighbour's memory: NCCL gathers on all ranks, and the line at the start says why.
TEST(NodeCopies, WhereOneGpuCanNotReadAnotherNcclGathers) {
  Cluster cluster(two_by_two("auto"));
  cluster.machine().fail("ipc_open_mem_handle", 1, 217, 3);
  cluster.run([&](Rank r) {
    auto path = path_of(cluster, r);
    ASSERT_NE(path, nullptr);
    EXPECT_NE(path->describe().find(
                  "NCCL in the node (no copies: rank 3: the memory of local rank 0's GPU: the two "
                  "GPUs can't read each other's memory"),
              std::string::npos)
        << path->describe();
    Tensor tensor(cluster, r, kCount * 4);
    expect_sum_of_step(cluster, *path, r, tensor, 0);
    EXPECT_TRUE(path->destroy().is_ok());
  });
  for (Rank r = 0; r < cluster.size(); ++r) {
    EXPECT_EQ(cluster.machine().counts(r).memory, 0U);
    EXPECT_EQ(cluster.machine().counts(r).objects, 0U);
  }
}

TEST(NodeCopies, WhereTheyAreAskedForAndCanNotBeAllRanksSayWhy) {
  Cluster cluster(two_by_two());
  cluster.machine().fail("ipc_open_mem_handle", 1, 217, 3);
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_FALSE(made.is_ok());
    EXPECT_NE(made.status().message().find("PACELINE_NODE_GATHER=copies can't be: rank 3: "),
              std::string::npos)
        << made.status().message();
  });
}

TEST(NodeCopies, WhatAShardHasNoRoomForNcclGathers) {
  Cluster cluster(two_by_two());
  cluster.run([&](Rank r) {
    // The tail of an all-reduce by rows may be as long as some rows.
    auto path = path_of(cluster, r, {.usual_in_node = 64 * 1024});
    ASSERT_NE(path, nullptr);
    constexpr uint64_t kRow = 600000;
    constexpr uint64_t kRows = 3;
    Tensor tensor(cluster, r, kRows * kRow * 4);
    std::fill_n(tensor.as<float>(), kRows * kRow, 0.0F);
    // Ranks 0 and 3 have the first row, the others one each.
    const uint64_t mine = static_cast<uint64_t>(r % 3) * kRow;
    for (uint64_t i = 0; i < kRow; ++i) tensor.as<float>()[mine + i] = value(r, 0, i);
    AllReduce a;
    a.data = tensor.address();
    a.count = kRows * kRow;
    a.codec = 0;
    a.row_elements = kRow;
    auto id = path->all_reduce(a);
    ASSERT_TRUE(id.is_ok()) << id.status().message();
    ASSERT_TRUE(path->join(*id, nullptr).is_ok());
    ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < kRow; ++i) {
      const float* at = tensor.as<float>() + i;
      wrong += at[0] != value(0, 0, i) + value(3, 0, i);
      wrong += at[kRow] != value(1, 0, i);
      wrong += at[2 * kRow] != value(2, 0, i);
    }
    EXPECT_EQ(wrong, 0U);
    EXPECT_TRUE(path->destroy().is_ok());
  });
}

// One that is told otherwise, or has few hardware queues: where it has no room for what others would give, NCCL adds up.
TEST(NodeCopies, WhereOneRankHasNoRoomForGradientsNobodyGives) {
  uint64_t usual = 0;  // calls to warm up
  for (const Rank lacks : {-1, 1, 2}) {
    auto options = two_by_two();
    options.node_reduce = "copies";
    Cluster cluster(options);
    cluster.run([&](Rank r) {
      auto path = path_of(cluster, r, {.only_prompt = r == lacks});
      ASSERT_NE(path, nullptr);
      Tensor tensor(cluster, r, kCount * 4);
      for (int step = 0; step < 3; ++step) expect_sum_of_step(cluster, *path, r, tensor, step);
      EXPECT_TRUE(path->destroy().is_ok());
    });
    const auto calls = cluster.cliques().calls("reduce_scatter");
    if (lacks < 0) usual = calls;
    EXPECT_EQ(calls > usual, lacks >= 0) << lacks;
  }
}

// A rank that is through gives nothing back that a neighbour, who comes later, has still open.
TEST(NodeCopies, NobodysMemoryIsGivenBackWhileOthersHaveItOpen) {
  Cluster cluster(two_by_two());
  cluster.run([&](Rank r) {
    auto path = path_of(cluster, r);
    ASSERT_NE(path, nullptr);
    Tensor tensor(cluster, r, kCount * 4);
    fill(tensor, r, 0);
    auto id = sum_of(*path, tensor);
    ASSERT_TRUE(id.is_ok()) << id.status().message();
    bool finite = false;
    ASSERT_TRUE(path->wait_arrival(0, finite).is_ok());
    if (r % 2 == 1) sleep_for_ms(100);
    EXPECT_TRUE(path->destroy().is_ok());
  });
  for (Rank r = 0; r < cluster.size(); ++r) {
    const auto counts = cluster.machine().counts(r);
    EXPECT_EQ(counts.freed_while_open, 0U);
    EXPECT_EQ(counts.memory, 0U);
    EXPECT_EQ(counts.objects, 0U);
  }
}

// After a fault a neighbour's copies may still be under way: what they read stays.
TEST(NodeCopies, AfterAFaultTheSlotsStay) {
  Cluster cluster(two_by_two());
  cluster.machine().expect_faults();
  std::atomic<int> arrived{0};
  cluster.run([&](Rank r) {
    auto path = path_of(cluster, r);
    ASSERT_NE(path, nullptr);
    Tensor tensor(cluster, r, kCount * 4);
    fill(tensor, r, 0);
    ASSERT_TRUE(sum_of(*path, tensor).is_ok());
    bool finite = false;
    ASSERT_TRUE(path->wait_arrival(0, finite).is_ok());
    for (++arrived; arrived < cluster.size();) sleep_for_ms(1);
    if (r == 0) path->abort("as the test says");
    while (path->wait_arrival(1, finite)) sleep_for_ms(1);
    (void)path->destroy();
  });
  for (Rank r = 0; r < cluster.size(); ++r)
    EXPECT_EQ(cluster.machine().counts(r).freed_while_open, 0U);
}

}  // namespace
}  // namespace paceline::gpu
