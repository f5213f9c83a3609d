#include "drivers/nccl/mock/cliques.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

namespace paceline::drivers::nccl::mock {
namespace {

constexpr int kRanks = 3;

/// `body(rank, comm, stream, cuda, nccl)` in a thread per rank with a device and a stream.
template <class F>
void with_ranks(cuda::mock::Machine& machine, Cliques& cliques, F body) {
  const auto& api = cliques.api();
  UniqueId id{};
  ASSERT_EQ(api.get_unique_id(&id), 0);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      const auto& cu = machine.api();
      cuda::Context context = nullptr;
      ASSERT_EQ(cu.device_primary_ctx_retain(&context, r), 0);
      ASSERT_EQ(cu.ctx_set_current(context), 0);
      cuda::Stream stream = nullptr;
      ASSERT_EQ(cu.stream_create_with_priority(&stream, 1, 0), 0);
      Comm comm = nullptr;
      Config config;
      ASSERT_EQ(api.comm_init_rank_config(&comm, kRanks, id, r, &config), 0);
      body(r, comm, stream, cu, api);
    });
  }
  for (auto& t : threads) t.join();
}

TEST(Cliques, CollectivesGiveWhatTheyPromise) {
  cuda::mock::Machine machine({.devices = kRanks});
  Cliques cliques(machine);
  with_ranks(machine, cliques, [](int r, Comm comm, cuda::Stream s, const auto& cu, const auto& n) {
    std::array<float, 6> data{};
    for (size_t i = 0; i < 6; ++i) data[i] = static_cast<float>(i * 10) + static_cast<float>(r);
    // In place: this rank's two elements.
    ASSERT_EQ(n.reduce_scatter(data.data(), &data[2 * static_cast<size_t>(r)], 2, Type::kFloat32,
                               Op::kSum, comm, s),
              0);
    ASSERT_EQ(cu.stream_synchronize(s), 0);
    EXPECT_EQ(data[2 * static_cast<size_t>(r)], 60.0F * static_cast<float>(r) + 3);
    ASSERT_EQ(
        n.all_gather(&data[2 * static_cast<size_t>(r)], data.data(), 2, Type::kFloat32, comm, s),
        0);
    float last = r == 2 ? 7.0F : 0.0F;
    ASSERT_EQ(n.group_start(), 0);
    ASSERT_EQ(n.broadcast(&last, &last, 1, Type::kFloat32, 2, comm, s), 0);
    ASSERT_EQ(n.all_reduce(&data[5], &data[5], 1, Type::kFloat32, Op::kSum, comm, s), 0);
    ASSERT_EQ(n.group_end(), 0);
    ASSERT_EQ(cu.stream_synchronize(s), 0);
    EXPECT_EQ(data[0], 3);
    EXPECT_EQ(data[4], 123);
    EXPECT_EQ(data[5], 3 * 153);
    EXPECT_EQ(last, 7);
    ASSERT_EQ(n.comm_destroy(comm), 0);
  });
  EXPECT_EQ(cliques.open(), 0);
  EXPECT_EQ(cliques.disagreement(), "");
}

TEST(Cliques, ACollectiveWaitsForAllRanksAndAnAbortEndsTheWait) {
  cuda::mock::Machine machine({.devices = kRanks});
  Cliques cliques(machine);
  with_ranks(machine, cliques, [](int r, Comm comm, cuda::Stream s, const auto& cu, const auto& n) {
    float x = 1;
    ASSERT_EQ(n.all_reduce(&x, &x, 1, Type::kFloat32, Op::kSum, comm, s), 0);
    ASSERT_EQ(cu.stream_synchronize(s), 0);
    if (r == 2) return;  // never comes again
    x = 1;
    ASSERT_EQ(n.all_reduce(&x, &x, 1, Type::kFloat32, Op::kSum, comm, s), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(cu.stream_query(s), cuda::kNotReady);
    ASSERT_EQ(n.comm_abort(comm), 0);
    EXPECT_EQ(cu.stream_synchronize(s), 0);
    EXPECT_EQ(x, 1);
  });
}

TEST(Cliques, AGroupOfWhichACallFailsLaunchesNothing) {
  cuda::mock::Machine machine({.devices = kRanks});
  Cliques cliques(machine);
  cliques.fail("broadcast", 1, 1);
  with_ranks(machine, cliques, [](int, Comm comm, cuda::Stream s, const auto& cu, const auto& n) {
    float x = 1;
    float y = 1;
    ASSERT_EQ(n.all_reduce(&x, &x, 1, Type::kFloat32, Op::kSum, comm, s), 0);
    ASSERT_EQ(cu.stream_synchronize(s), 0);
    ASSERT_EQ(n.group_start(), 0);
    ASSERT_EQ(n.all_reduce(&x, &x, 1, Type::kFloat32, Op::kSum, comm, s), 0);
    const bool failed = n.broadcast(&y, &y, 1, Type::kFloat32, 0, comm, s) != 0;
    EXPECT_EQ(n.group_end() != 0, failed);
    // The others' kernel waits until they abort as well.
    if (!failed) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      EXPECT_EQ(cu.stream_query(s), cuda::kNotReady);
    }
    ASSERT_EQ(n.comm_abort(comm), 0);
    EXPECT_EQ(cu.stream_synchronize(s), 0);
    EXPECT_EQ(x, 3);
  });
}

// Two communicators of the same ranks on two streams that share a queue, issued in different orders.
TEST(Cliques, DifferentOrdersOnOneQueueHang) {
  cuda::mock::Machine machine({.devices = kRanks, .hardware_queues = 1, .patience_s = 1});
  Cliques cliques(machine);
  UniqueId second{};
  ASSERT_EQ(cliques.api().get_unique_id(&second), 0);
  with_ranks(machine, cliques, [&](int r, Comm a, cuda::Stream s, const auto& cu, const auto& n) {
    Comm b = nullptr;
    Config config;
    ASSERT_EQ(n.comm_init_rank_config(&b, kRanks, second, r, &config), 0);
    float x = 1;
    for (auto* comm : {a, b})
      ASSERT_EQ(n.all_reduce(&x, &x, 1, Type::kFloat32, Op::kSum, comm, s), 0);
    ASSERT_EQ(cu.stream_synchronize(s), 0);
    for (auto* comm : r == 0 ? std::array{a, b} : std::array{b, a})
      ASSERT_EQ(n.all_reduce(&x, &x, 1, Type::kFloat32, Op::kSum, comm, s), 0);
    EXPECT_NE(cu.stream_synchronize(s), 0);
    n.comm_abort(a);
    n.comm_abort(b);
    EXPECT_EQ(cu.stream_synchronize(s), 0);
  });
}

TEST(Cliques, ACallThatConnectsWaitsOnTheHostForAllRanks) {
  cuda::mock::Machine machine({.devices = kRanks});
  Cliques cliques(machine);
  std::atomic<int> called{0};
  with_ranks(
      machine, cliques, [&](int r, Comm comm, cuda::Stream s, const auto& cu, const auto& n) {
        float x = 1;
        if (r == 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        ++called;
        ASSERT_EQ(n.all_reduce(&x, &x, 1, Type::kFloat32, Op::kSum, comm, s), 0);
        EXPECT_EQ(called, kRanks);
        ASSERT_EQ(cu.stream_synchronize(s), 0);
        std::array<float, 64> more{};
        if (r == 2) {
          ASSERT_EQ(n.comm_abort(comm), 0);
          return;
        }
        EXPECT_NE(n.all_reduce(more.data(), more.data(), 64, Type::kFloat32, Op::kSum, comm, s), 0);
        n.comm_abort(comm);
      });
}

TEST(Cliques, DisagreementIsSeen) {
  cuda::mock::Machine machine({.devices = kRanks});
  Cliques cliques(machine);
  with_ranks(machine, cliques, [](int r, Comm comm, cuda::Stream s, const auto& cu, const auto& n) {
    std::array<float, 2> x{};
    ASSERT_EQ(n.all_reduce(x.data(), x.data(), r == 0 ? 1 : 2, Type::kFloat32, Op::kSum, comm, s),
              0);
    ASSERT_EQ(cu.stream_synchronize(s), 0);
  });
  EXPECT_NE(cliques.disagreement(), "");
}

}  // namespace
}  // namespace paceline::drivers::nccl::mock
