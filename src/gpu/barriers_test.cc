// What holds up a whole device now and then, wherever it comes: a kernel's first use, memory that is given back.
#include <atomic>
#include <random>
#include <thread>
#include <utility>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

struct Held {
  int nodes, local_size, lanes, queues;
  int wires = default_wires();
  device::cuda::WireCodec codec = device::cuda::WireCodec::kExact;
  const char* node_gather = "copies";
};

class Barriers : public testing::TestWithParam<Held> {};

// Each rank's device is held up at other places, at random, and each rank comes at its own time. Steps run into each other:
// what has been submitted is joined by the stream, and the host goes on. Pinned memory is short.
TEST_P(Barriers, HoldUpNoRankForEver) {
  const auto p = GetParam();
  ClusterOptions o;
  o.nodes = p.nodes;
  o.local_size = p.local_size;
  o.timeout_s = 15;
  o.machine.hardware_queues = p.queues;
  o.machine.delays_us = 100;
  o.wires = p.wires;
  o.node_gather = p.node_gather;
  Cluster cluster(o);
  constexpr int kSteps = 30;
  const std::vector<uint64_t> sizes = {20011, 7, 12000, 3000, 16384};
  // What the framework's own communication does between steps: a kernel that waits for all ranks' kernels.
  std::vector<std::atomic<int>> here(kSteps);
  cluster.run([&](Rank r) {
    auto made = cluster.create(
        r, {.lanes = p.lanes, .piece_bytes = 16 * 1024, .least_host_bytes = 160 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(1024, 1024).is_ok());
    std::mt19937 own(static_cast<unsigned>(r) + 11);
    std::mt19937 common(3);  // what all ranks do alike
    const auto dally = [&] {
      if (own() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 1500));
      if (own() % 2 == 0) cluster.machine().add_barrier(nullptr, r);
    };
    const auto& api = cluster.machine().api();
    cu::Stream everybody = nullptr;
    ASSERT_EQ(api.stream_create_with_priority(&everybody, 1, 0), 0);
    constexpr uint64_t kMoved = 5000;
    Tensor moved(cluster, r, kMoved * sizeof(float));
    std::fill_n(moved.as<float>(), kMoved, 0.0F);
    std::vector<std::unique_ptr<Tensor>> tensors;
    for (auto n : sizes) {
      tensors.push_back(std::make_unique<Tensor>(cluster, r, n * sizeof(float)));
      std::fill_n(tensors.back()->as<float>(), n, 0.0F);
    }
    for (int step = 0; step < kSteps; ++step) {
      uint64_t last = 0;
      for (size_t b = 0; b < sizes.size(); ++b) {
        AllReduce a;
        a.data = tensors[b]->address();
        a.count = sizes[b];
        a.codec = static_cast<int>(p.codec);
        a.name = "bucket " + std::to_string(b);
        auto id = path.all_reduce(a);
        ASSERT_TRUE(id.is_ok()) << id.status().message();
        last = *id;
        dally();
        if (common() % 4 == 0) {  // NCCL spreads it
          Collective c;
          c.kind = PathKind::kBroadcast;
          c.output = moved.address();
          c.count = kMoved;
          c.root = static_cast<int>(common() % static_cast<unsigned>(cluster.size()));
          auto spread = path.collective(c);
          ASSERT_TRUE(spread.is_ok()) << spread.status().message();
          last = *spread;
          dally();
        }
        if (common() % 4 == 0) {
          ASSERT_TRUE(path.join(last, nullptr).is_ok());
          dally();
        }
      }
      ASSERT_TRUE(path.join(last, everybody).is_ok());
      dally();
      cluster.machine().add_task(
          everybody, {[&here, step, seen = std::make_shared<bool>(false), all = cluster.size()] {
                        if (!std::exchange(*seen, true)) ++here[static_cast<size_t>(step)];
                        return here[static_cast<size_t>(step)] == all;
                      },
                      {}});
      cu::Event met = nullptr;
      ASSERT_EQ(api.event_create(&met, 0), 0);
      ASSERT_EQ(api.event_record(met, everybody), 0);
      ASSERT_EQ(api.stream_wait_event(nullptr, met, 0), 0);
      dally();
      if (step % 3 == 2) {
        bool finite = false;
        const auto status = path.wait_arrival(0, finite);
        ASSERT_TRUE(status.is_ok()) << "step " << step << ": " << status.message();
      }
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Barriers,
    testing::Values(
        Held{2, 1, 2, 0}, Held{2, 2, 1, 0}, Held{2, 2, 4, 0, 3}, Held{2, 2, 2, 1}, Held{2, 2, 2, 3},
        Held{3, 1, 2, 0}, Held{3, 2, 2, 0}, Held{3, 2, 2, 2},
        Held{2, 2, 2, 0, 1, device::cuda::WireCodec::kFp16},
        Held{3, 2, 2, 0, 1, device::cuda::WireCodec::kInt8}, Held{2, 3, 1, 0},
        Held{.nodes = 2, .local_size = 2, .lanes = 2, .queues = 0, .node_gather = "nccl"},
        Held{.nodes = 3, .local_size = 2, .lanes = 1, .queues = 2, .node_gather = "nccl"}),
    [](const auto& info) {
      const auto& p = info.param;
      return fmt::format("{}x{}_{}lanes_{}queues_{}wires_{}_{}", p.nodes, p.local_size, p.lanes,
                         p.queues, p.wires, static_cast<int>(p.codec), p.node_gather);
    });

}  // namespace
}  // namespace paceline::gpu
