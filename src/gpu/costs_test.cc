// What a small bucket costs: calls of the driver on the host, and what kernels wait for.
#include <algorithm>
#include <map>
#include <random>

#include "base/clock.h"
#include "drivers/cuda/mock/unseen.h"
#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

using Calls = std::map<std::string, uint64_t>;

/// A rank's gradient in a step: small whole numbers, which fp16 and sums of a few keep as they are. By rows only the
/// first one is not zero.
std::vector<float> gradient(Rank rank, int step, uint64_t count, uint64_t row_elements = 0) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) * 100 + static_cast<uint64_t>(step));
  std::vector<float> values(count);
  for (uint64_t i = 0; i < (row_elements > 0 ? row_elements : count); ++i)
    values[i] = static_cast<float>(static_cast<int>(random() % 101) - 50);
  return values;
}

void expect_sum(const Tensor& tensor, Rank ranks, int step, uint64_t count,
                uint64_t row_elements = 0) {
  std::vector<double> wanted(count);
  for (Rank r = 0; r < ranks; ++r) {
    const auto one = gradient(r, step, count, row_elements);
    for (uint64_t i = 0; i < count; ++i) wanted[i] += one[i];
  }
  for (uint64_t i = 0; i < count; ++i)
    ASSERT_EQ(tensor.as<float>()[i], wanted[i]) << "element " << i << ", step " << step;
}

/// Of the thread that submits; the launcher's may come at any time.
Calls calls_so_far(Cluster& cluster) {
  Calls calls;
  for (const auto& name : cluster.machine().called())
    calls[name] = cluster.machine().calls_of_this_thread(name);
  return calls;
}

/// Calls of rank 0 for its third small bucket, when nothing else is under way.
Calls calls_of_a_bucket(bool ahead, int nodes, int local_size, uint64_t bytes,
                        uint64_t row_elements = 0, const char* node_reduce = "",
                        uint64_t small_model = 0) {
  Cluster cluster({.nodes = nodes, .local_size = local_size});
  Calls calls;
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.lanes = 4,
                                   .usual_in_node = kUsualInNode,
                                   .small_model = small_model,
                                   .ahead = ahead,
                                   .node_gather = "copies",
                                   .node_reduce = node_reduce});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(3 * bytes, bytes).is_ok());
    Tensor tensor(cluster, r, bytes);
    for (int i = 0; i < 3; ++i) {
      std::ranges::copy(gradient(r, i, bytes / 4, row_elements), tensor.as<float>());
      const auto before = calls_so_far(cluster);
      AllReduce a;
      a.data = tensor.address();
      a.count = bytes / 4;
      a.codec = 1;
      a.row_elements = row_elements;
      a.prompt = row_elements > 0;  // no thread does it
      auto id = path.all_reduce(a);
      ASSERT_TRUE(id.is_ok());
      if (r == 0 && i == 2) {
        for (const auto& [name, n] : calls_so_far(cluster)) {
          const auto was = before.find(name);
          if (const auto more = n - (was == before.end() ? 0 : was->second); more > 0)
            calls[name] = more;
        }
      }
      ASSERT_TRUE(path.join(*id, nullptr).is_ok());
      bool finite = false;
      ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
      ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
      expect_sum(tensor, cluster.size(), i, bytes / 4, row_elements);
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
  return calls;
}

std::string text_of(const Calls& calls) {
  std::string text;
  uint64_t sum = 0;
  for (const auto& [name, n] : calls) {
    text += fmt::format("{} {}, ", name, n);
    sum += n;
  }
  return text + fmt::format("{} in all", sum);
}

TEST(Costs, ASmallBucketsCallsOfTheDriver) {
  for (const auto bytes : {uint64_t{64} << 10, uint64_t{4} << 20}) {
    for (const auto& [nodes, local_size] : {std::pair{2, 1}, {2, 2}}) {
      const auto calls = calls_of_a_bucket(true, nodes, local_size, bytes);
      Calls wanted = {{"ctx_get_current", 1},
                      {"event_record", local_size > 1 ? 5U : 4U},
                      {"launch_kernel", 2},
                      {"memcpy_dtoh_async", 2},
                      {"memcpy_htod_async", 1},
                      {"stream_is_capturing", 1},
                      {"stream_wait_event", local_size > 1 ? 4U : 3U},
                      {"stream_wait_value32", local_size > 1 ? 2U : 1U},
                      {"stream_write_value32", local_size > 1 ? 3U : 2U}};
      if (local_size > 1)
        wanted["memcpy_dtod_async"] = 2;  // the shard to its slot, the other one's
      EXPECT_EQ(calls, wanted) << nodes << " x " << local_size << ", " << bytes
                               << " bytes: " << text_of(calls);
    }
  }
}

// What the thread that trains pays; the rest is the launcher's, when the bucket has come, and where NCCL is not called a
// thread's that puts ways out on the streams.
TEST(Costs, ABucketsCallsWhenItIsSubmitted) {
  for (const auto& [local_size, gives] : {std::pair{1, false}, {2, false}, {2, true}}) {
    const auto calls =
        calls_of_a_bucket(false, 2, local_size, uint64_t{4} << 20, 0, gives ? "copies" : "nccl");
    Calls wanted = {{"ctx_get_current", 1}, {"event_record", 1}, {"stream_is_capturing", 1}};
    if (local_size == 2 && !gives) {
      wanted["launch_kernel"] = 1;
      wanted["memcpy_dtoh_async"] = 2;
      wanted["stream_wait_event"] = 1;
      wanted["stream_write_value32"] = 1;
    }
    EXPECT_EQ(calls, wanted) << local_size << ": " << text_of(calls);
  }
}

// What a host that is slower than its GPU has no time for: NCCL's call, and what follows it on the streams.
TEST(Costs, CopiesBringWhatASmallModelSends) {
  constexpr uint64_t kBytes = 4U << 20;
  const auto kernels = [&](uint64_t small_model) {
    return calls_of_a_bucket(false, 2, 2, kBytes, 0, "auto", small_model)["launch_kernel"];
  };
  EXPECT_EQ(kernels(3 * kBytes), 0U) << "a thread launches them";
  EXPECT_EQ(kernels(3 * kBytes - 1), 1U);
}

// Rows take two kernels more to encode, and a copy in for each node, as long as what it sent.
TEST(Costs, ABucketOfRowsCallsOfTheDriver) {
  auto calls = calls_of_a_bucket(false, 2, 1, uint64_t{1} << 20, 64);
  EXPECT_EQ(calls["launch_kernel"], 3U) << text_of(calls);
  EXPECT_EQ(calls["memcpy_dtoh_async"], 2U) << text_of(calls);
  calls = calls_of_a_bucket(true, 2, 1, uint64_t{1} << 20, 64);
  EXPECT_EQ(calls["launch_kernel"], 4U) << text_of(calls);
  EXPECT_EQ(calls["memcpy_htod_async"], 2U) << text_of(calls);
}

// One rank's piece comes late: NCCL's kernels of the node's other rank must not hold thread blocks until it does.
TEST(Costs, NoKernelWaitsForTheNetwork) {
  // Long beside what threads of a busy machine wait for each other.
  constexpr auto kLate = std::chrono::milliseconds(400);
  constexpr int kOperations = 5;
  constexpr uint64_t kCount = 20000;
  Cluster cluster({.nodes = 2, .local_size = 2});
  std::vector<std::unique_ptr<Tensor>> tensors;
  for (Rank r = 0; r < cluster.size(); ++r)
    tensors.push_back(std::make_unique<Tensor>(cluster, r, kCount * 4));
  // Rank 3 encodes late, so rank 1 on the other node gets its piece after rank 0 has its own.
  // (Its own half of the buffer begins there.)
  slow_down_encoding(cluster, kLate, tensors[3]->address() + kCount / 2 * 4);
  const Time began = SteadyClock().now();
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4).is_ok());
    const Tensor& tensor = *tensors[static_cast<size_t>(r)];
    for (int k = 0; k < kOperations; ++k) {
      std::ranges::copy(gradient(r, k, kCount), tensor.as<float>());
      AllReduce a;
      a.data = tensor.address();
      a.count = kCount;
      a.codec = 1;
      auto id = path.all_reduce(a);
      ASSERT_TRUE(id.is_ok());
      ASSERT_TRUE(path.join(*id, nullptr).is_ok());
      bool finite = false;
      ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
      ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
      expect_sum(tensor, cluster.size(), k, kCount);
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
  const double late_s = std::chrono::duration<double>(kLate).count() * kOperations;
  const double waited = cluster.cliques().waited("all_gather");
  EXPECT_GT(SteadyClock().now() - began, static_cast<Time>(late_s * kSecond)) << "nobody was late";
  RecordProperty("waited_ms", static_cast<int>(waited * 1e3));
  EXPECT_LT(waited, late_s / 4) << "all-gathers waited for each other, of " << late_s;
}

}  // namespace
}  // namespace paceline::gpu
