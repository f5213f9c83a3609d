// The communicators inside a node, as a launcher and a thread that trains use them at once.
#include <chrono>
#include <thread>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

// NCCL may hold a call until all ranks of the node have made it. Rank 0 makes the second operation's reduce-scatter at once;
// rank 1's comes after the first one's all-gather, for which rank 0's launcher is needed meanwhile.
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

}  // namespace
}  // namespace paceline::gpu
