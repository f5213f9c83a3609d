// Streams hold so much and no more: a script that is far ahead of its GPU waits inside the driver.
#include <chrono>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

class FullQueue : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(RanksOfANode, FullQueue, testing::Values(1, 2));

// Every rank's script is ahead of its GPU by more than a stream holds, behind an all-reduce whose gradient takes a while. It is
// inside the driver for longer than it takes until somebody asks how the GPU is, and what lets its stream go on is the
// pumps' to do.
TEST_P(FullQueue, AThreadInsideTheDriverHoldsUpNoTransfer) {
  ClusterOptions o;
  o.local_size = GetParam();
  o.timeout_s = 3;
  o.machine.queue_room = 64;
  Cluster cluster(o);
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    constexpr uint64_t kCount = 5000;
    ASSERT_TRUE(path.reserve(kCount * sizeof(float), kCount * sizeof(float)).is_ok());
    const auto& api = cluster.machine().api();
    cu::Stream stream = nullptr;
    ASSERT_EQ(api.stream_create_with_priority(&stream, 1, 0), 0);
    Tensor tensor(cluster, r, kCount * sizeof(float));
    Tensor other(cluster, r, 256);
    std::fill_n(tensor.as<float>(), kCount, static_cast<float>(r));
    const auto ready = std::chrono::steady_clock::now() + std::chrono::milliseconds(600);
    cluster.machine().add_task(
        stream, {[ready] { return std::chrono::steady_clock::now() > ready; }, [] {}});
    AllReduce a;
    a.data = tensor.address();
    a.count = kCount;
    a.stream = stream;
    auto id = path.all_reduce(a);
    ASSERT_TRUE(id.is_ok()) << id.status().message();
    ASSERT_TRUE(path.join(*id, stream).is_ok());
    for (int i = 0; i < 100; ++i)
      ASSERT_EQ(api.memset_d8_async(other.address(), 0, 256, stream), 0);
    EXPECT_GT(std::chrono::steady_clock::now(), ready);  // it had to wait
    bool finite = false;
    const auto status = path.wait_arrival(0, finite);
    ASSERT_TRUE(status.is_ok()) << status.message();
    ASSERT_EQ(api.stream_synchronize(stream), 0);
    const auto sum = static_cast<float>(cluster.size() * (cluster.size() - 1) / 2);
    EXPECT_EQ(tensor.as<float>()[0], sum);
    EXPECT_EQ(tensor.as<float>()[kCount - 1], sum);
    EXPECT_TRUE(path.destroy().is_ok());
  });
  // Not even one at its start, which may come when somebody is inside the driver already.
  EXPECT_EQ(cluster.machine().calls_of_threads("paceline-pump"), 0U);
}

}  // namespace
}  // namespace paceline::gpu
