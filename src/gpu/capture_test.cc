// Streams that are captured into a CUDA graph: flags of the network can't be replayed, so calls on them are refused.
#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kCount = 4096;

void expect_refusal(const Status& status, std::string_view kind, std::string_view name) {
  EXPECT_EQ(status.code(), Code::kUnsupported) << status.message();
  const auto text =
      fmt::format("{} '{}': its stream is being captured into a CUDA graph", kind, name);
  EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("keep the backward pass out of the capture"), std::string::npos)
      << status.message();
}

class CaptureOf : public OnShapes {};

TEST_P(CaptureOf, IsRefusedByNameAndEndsNothing) {
  Cluster cluster(options());
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 16 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4).is_ok());
    const auto& api = cluster.machine().api();
    cu::Context context = nullptr;
    ASSERT_EQ(api.device_primary_ctx_retain(&context, r), 0);
    ASSERT_EQ(api.ctx_set_current(context), 0);
    cu::Stream stream = nullptr;
    ASSERT_EQ(api.stream_create_with_priority(&stream, cu::kStreamNonBlocking, 0), 0);
    const auto ranks = static_cast<uint64_t>(cluster.size());
    Tensor tensor(cluster, r, kCount * 4), blocks(cluster, r, ranks * kCount * 4);
    std::fill_n(tensor.as<float>(), kCount, static_cast<float>(r + 1));
    std::fill_n(blocks.as<float>(), ranks * kCount, static_cast<float>(r + 1));

    AllReduce sum;
    sum.data = tensor.address();
    sum.count = kCount;
    sum.codec = 0;
    sum.stream = stream;
    sum.name = "layer1.weight";
    Collective scatter;
    scatter.kind = PathKind::kReduceScatter;
    scatter.input = blocks.address();
    scatter.output = tensor.address();
    scatter.count = kCount;
    scatter.stream = stream;
    scatter.name = "unit 3";
    scatter.scratch_bytes = path.scratch_bytes(scatter);
    Tensor scratch(cluster, r, scatter.scratch_bytes);
    scatter.scratch = scratch.address();
    Collective gather = scatter;
    gather.kind = PathKind::kAllGather;
    std::swap(gather.input, gather.output);
    Collective spread = gather;
    spread.kind = PathKind::kBroadcast;

    // Before the capture, in it, and after it again: what was refused has left nothing behind.
    for (const bool capturing : {false, true, false}) {
      cu::mock::Machine::capture(stream, capturing);
      if (capturing) {
        expect_refusal(path.all_reduce(sum).status(), "all-reduce", "layer1.weight");
        expect_refusal(path.collective(scatter).status(), "reduce-scatter", "unit 3");
        expect_refusal(path.collective(gather).status(), "all-gather", "unit 3");
        expect_refusal(path.collective(spread).status(), "broadcast", "unit 3");
        continue;
      }
      // The sum of all shards, and every shard again from blocks of that sum.
      std::fill_n(tensor.as<float>(), kCount, static_cast<float>(r + 1));
      auto id = path.all_reduce(sum);
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      ASSERT_TRUE(path.join(*id, stream).is_ok());
      id = path.collective(gather);
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      ASSERT_TRUE(path.join(*id, stream).is_ok());
      bool finite = false;
      ASSERT_TRUE(path.wait_arrival(30, finite).is_ok());
      ASSERT_EQ(api.stream_synchronize(stream), 0);
      const auto all = static_cast<float>(ranks * (ranks + 1) / 2);
      for (uint64_t k = 0; k < ranks * kCount; ++k) ASSERT_EQ(blocks.as<float>()[k], all) << k;
    }
    EXPECT_EQ(cluster.machine().counts(r).captured, 0U) << "something went into the caller's graph";
    EXPECT_TRUE(path.destroy().is_ok());
    EXPECT_EQ(api.stream_destroy(stream), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, CaptureOf,
                         testing::Values(ClusterShape{2, 1, 0}, ClusterShape{2, 2, 1},
                                         ClusterShape{3, 1, 0, 2}),
                         [](const auto& info) {
                           return fmt::format("{}x{}_{}queues_{}wires", info.param.nodes,
                                              info.param.local_size, info.param.queues,
                                              info.param.wires);
                         });

}  // namespace
}  // namespace paceline::gpu
