// Many steps: operations that overlap, memory that is used again, delays at random.
#include <atomic>
#include <future>
#include <random>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

struct Load {
  int nodes, local_size, lanes, queues;
  bool reversed;  ///< buckets are handed over in the opposite order every other step
  int wires = default_wires();
  uint64_t usual_in_node = 0;  ///< bytes; larger ones are several operations
  int steps = 25;
};

class StepsOf : public testing::TestWithParam<Load> {};

// Pinned memory for a fraction of a step: operations are cut, take memory that earlier ones still use, and wait for it on
// the device.
TEST_P(StepsOf, SumsAreRightAndAlikeOverManySteps) {
  const auto load = GetParam();
  ClusterOptions o;
  o.nodes = load.nodes;
  o.local_size = load.local_size;
  o.machine.hardware_queues = load.queues;
  o.machine.delays_us = 150;
  o.machine.seed = 5;
  o.wires = load.wires;
  Cluster cluster(o);
  const std::vector<uint64_t> sizes = {30011, 7, 12000, 1, 20480};
  const auto size = static_cast<size_t>(cluster.size());
  std::vector<std::vector<float>> ends(size);
  const auto steps = [&](Rank r) {
    auto made = cluster.create(r, {.lanes = load.lanes,
                                   .piece_bytes = 16 * 1024,
                                   .least_host_bytes = 160 * 1024,
                                   .usual_in_node = load.usual_in_node});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(1024, 1024).is_ok());
    const auto allocations = cluster.machine().counts(r).allocations;
    std::mt19937 delays(static_cast<unsigned>(r));
    std::vector<std::unique_ptr<Tensor>> tensors;
    for (auto n : sizes) tensors.push_back(std::make_unique<Tensor>(cluster, r, n * sizeof(float)));
    for (int step = 0; step < load.steps; ++step) {
      for (size_t i = 0; i < sizes.size(); ++i) {
        const size_t b = load.reversed && step % 2 == 1 ? sizes.size() - 1 - i : i;
        for (uint64_t k = 0; k < sizes[b]; ++k)
          tensors[b]->as<float>()[k] =
              static_cast<float>((r + 1) * (step + 1)) + static_cast<float>(k % 97);
        AllReduce a;
        a.data = tensors[b]->address();
        a.count = sizes[b];
        a.codec = 0;
        a.name = "bucket " + std::to_string(b);
        auto id = path.all_reduce(a);
        ASSERT_TRUE(id.is_ok()) << id.status().message();
        if (delays() % 8 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(delays() % 500));
        ASSERT_TRUE(path.join(*id, nullptr).is_ok());
      }
      bool finite = false;
      auto status = path.wait_arrival(0, finite);
      ASSERT_TRUE(status.is_ok()) << status.message();
      ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
      const auto ranks = static_cast<float>(size);
      const float all = ranks * (ranks + 1) / 2 * static_cast<float>(step + 1);
      for (size_t b = 0; b < sizes.size(); ++b) {
        for (uint64_t k = 0; k < sizes[b]; ++k)
          ASSERT_EQ(tensors[b]->as<float>()[k], all + ranks * static_cast<float>(k % 97))
              << "step " << step << " bucket " << b << " element " << k;
      }
    }
    EXPECT_EQ(cluster.machine().counts(r).allocations, allocations);
    // Streams that wait slow down all others: see launcher.h. (The caller's own stream is one of two. Where the node's ranks
    // give each other gradients the way out waits for those, for a moment.)
    const bool ahead = load.queues != 0;
    EXPECT_LE(cluster.machine().counts(r).most_streams_in_wait,
              ahead ? 1U : 2U + (load.local_size > 1 ? 1 : 0));
    EXPECT_TRUE(path.destroy().is_ok());
  };
  cluster.run(steps, 180);  // a sanitizer is slow
}

INSTANTIATE_TEST_SUITE_P(
    Loads, StepsOf,
    testing::Values(Load{2, 1, 1, 0, false}, Load{2, 2, 4, 0, true}, Load{2, 2, 1, 1, true},
                    Load{3, 1, 4, 0, true}, Load{3, 2, 2, 1, false}, Load{2, 1, 1, 0, true, 2},
                    Load{2, 2, 4, 0, true, 3}, Load{3, 1, 4, 0, true, 2},
                    Load{2, 2, 2, 0, true, 2, 32768}, Load{3, 2, 1, 0, true, 1, 65536},
                    Load{2, 2, 1, 1, false, 1, 32768}),
    [](const auto& info) {
      const auto& l = info.param;
      return fmt::format("{}x{}_{}lanes_{}queues{}_{}wires{}", l.nodes, l.local_size, l.lanes,
                         l.queues, l.reversed ? "_reversed" : "", l.wires,
                         l.usual_in_node > 0 ? "_cut" : "");
    });

std::vector<Load> long_runs() {
  std::vector<Load> loads;
  for (const int local_size : {1, 2}) {
    for (const int lanes : {1, 4}) {
      for (const int queues : {0, 1})
        loads.push_back({.nodes = 2,
                         .local_size = local_size,
                         .lanes = lanes,
                         .queues = queues,
                         .reversed = true,
                         .steps = 50});
    }
  }
  return loads;
}

// What comes in is launched as it comes, or (one hardware queue) enqueued with the call; each with one lane and several.
INSTANTIATE_TEST_SUITE_P(LongRuns, StepsOf, testing::ValuesIn(long_runs()), [](const auto& info) {
  const auto& l = info.param;
  return fmt::format("{}x{}_{}lanes_{}queues", l.nodes, l.local_size, l.lanes, l.queues);
});

// In a node of several a large operation is several, about alike: NCCL and the link have something to do at once.
TEST(Steps, LargeOnesAreSeveralOperationsInANodeOfSeveral) {
  struct Case {
    int local_size;
    uint64_t count;
    uint64_t operations;
  };
  // Of 16,384 elements: 3.05 times, 2.97, 1.53 and 1.47 times.
  for (const auto [local_size, count, operations] :
       {Case{1, 50000, 1}, Case{2, 50000, 3}, Case{2, 48660, 3}, Case{2, 25100, 2},
        Case{2, 24100, 1}}) {
    Cluster cluster({.nodes = 2, .local_size = local_size});
    cluster.run([&, count = count, operations = operations](Rank r) {
      auto made = cluster.create(r, {.usual_in_node = 64 * 1024});
      ASSERT_TRUE(made.is_ok());
      auto& path = **made;
      Tensor tensor(cluster, r, count * sizeof(float));
      std::fill_n(tensor.as<float>(), count, static_cast<float>(r));
      AllReduce a;
      a.data = tensor.address();
      a.count = count;
      a.name = "large";
      auto id = path.all_reduce(a);
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      EXPECT_EQ(*id, operations);
      ASSERT_TRUE(path.join(*id, nullptr).is_ok());
      bool finite = false;
      ASSERT_TRUE(path.wait_operation(*id, 0, finite).is_ok());
      ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
      const auto size = static_cast<float>(cluster.size());
      for (uint64_t i = 0; i < count; ++i)
        ASSERT_EQ(tensor.as<float>()[i], size * (size - 1) / 2) << i;
      EXPECT_TRUE(path.destroy().is_ok());
    });
  }
}

TEST(Steps, AnInfOnOneRankIsKnownOnAll) {
  Cluster cluster({.nodes = 2, .local_size = 2});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok());
    auto& path = **made;
    for (int step = 0; step < 3; ++step) {
      Tensor tensor(cluster, r, 4000);
      std::fill_n(tensor.as<float>(), 1000, 1.0F);
      if (step == 1 && r == 3) tensor.as<float>()[7] = INFINITY;
      AllReduce a;
      a.data = tensor.address();
      a.count = 1000;
      a.codec = 1;
      auto id = path.all_reduce(a);
      ASSERT_TRUE(id.is_ok());
      bool finite = false;
      ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
      EXPECT_EQ(finite, step != 1) << "rank " << r << " step " << step;
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

// What a bucket's update needs: its own arrival and no other's, in any order of asking.
TEST(Steps, OneOperationIsWaitedForByItself) {
  Cluster cluster({.nodes = 2, .local_size = 1});
  std::promise<void> first_is_there;
  auto told = first_is_there.get_future();
  std::atomic<int> done = 0;
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok());
    auto& path = **made;
    constexpr size_t kOperations = 5;
    std::vector<std::unique_ptr<Tensor>> tensors;
    std::vector<uint64_t> ids;
    for (size_t i = 0; i < kOperations; ++i) {
      if (r == 1 && i == 1) told.wait();  // the others can't arrive before that
      tensors.push_back(std::make_unique<Tensor>(cluster, r, 4000));
      std::fill_n(tensors[i]->as<float>(), 1000, static_cast<float>(r + i));
      AllReduce a;
      a.data = tensors[i]->address();
      a.count = 1000;
      a.codec = 0;
      auto id = path.all_reduce(a);
      ASSERT_TRUE(id.is_ok());
      ids.push_back(*id);
    }
    bool finite = false;
    EXPECT_EQ(path.wait_operation(0, 0, finite).code(), Code::kInvalidArgument);
    EXPECT_EQ(path.wait_operation(ids.back() + 1, 0, finite).code(), Code::kInvalidArgument);
    ASSERT_TRUE(path.wait_operation(ids[0], 0, finite).is_ok());
    EXPECT_TRUE(finite);
    EXPECT_TRUE(path.arrived(ids[0]));
    if (r == 0) {
      EXPECT_FALSE(path.arrived(ids[1]));
      EXPECT_EQ(path.wait_operation(ids[1], 0.01, finite).code(), Code::kTimeout);
      first_is_there.set_value();
    }
    for (const size_t i : {3U, 1U, 4U, 2U, 0U}) {
      ASSERT_TRUE(path.wait_operation(ids[i], 0, finite).is_ok());
      ASSERT_TRUE(path.join(ids[i], nullptr).is_ok());
      ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
      EXPECT_EQ(tensors[i]->as<float>()[999], static_cast<float>(2 * i + 1));
    }
    ++done;  // an abort reaches the others
    while (done < cluster.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    path.abort("the end of the test");
    EXPECT_TRUE(path.arrived(ids[0]));
    EXPECT_EQ(path.wait_operation(ids[0], 0, finite).code(), Code::kAborted);
    static_cast<void>(path.destroy());
  });
}

// What is enqueued behind a join without a wait of the host: it must learn that its gradient did not come.
class Gates : public testing::TestWithParam<int> {};  // ranks of a node

TEST_P(Gates, CloseBeforeStreamsGoOn) {
  for (const int queues : {0, 1}) {
    ClusterOptions o{.nodes = 2, .local_size = GetParam()};
    o.machine.hardware_queues = queues;
    Cluster cluster(o);
    std::atomic<int> arrived = 0, submitted = 0;
    std::atomic<int> done = 0;
    cluster.run([&](Rank r) {
      auto made = cluster.create(r);
      ASSERT_TRUE(made.is_ok());
      auto& path = **made;
      const auto& api = cluster.machine().api();
      cu::Stream stream = nullptr;
      ASSERT_EQ(api.stream_create_with_priority(&stream, 1, 0), 0);
      Tensor gradient(cluster, r, 4000), seen(cluster, r, 8);
      std::fill_n(gradient.as<float>(), 1000, 1.0F);
      const auto step = [&](float* word) {
        AllReduce a;
        a.data = gradient.address();
        a.count = 1000;
        a.codec = 0;
        a.stream = stream;
        auto id = path.all_reduce(a);
        ASSERT_TRUE(id.is_ok());
        ASSERT_TRUE(path.join(*id, stream).is_ok());
        auto gate = path.gate();
        ASSERT_TRUE(gate.is_ok());
        const auto to = seen.address() + (word == seen.as<float>() ? 0 : sizeof(float));
        ASSERT_EQ(
            api.memcpy_htod_async(to, reinterpret_cast<const void*>(*gate), sizeof(float), stream),
            0);
      };
      seen.as<float>()[0] = seen.as<float>()[1] = 7;
      step(seen.as<float>());
      bool finite = false;
      const auto first = path.wait_arrival(0, finite);
      if (!first) {
        ++arrived;
        ++done;
        FAIL() << first.message();
      }
      ASSERT_EQ(api.stream_synchronize(stream), 0);
      EXPECT_EQ(seen.as<float>()[0], 0.0F);
      ++arrived;
      if (r < GetParam()) {
        while (arrived < cluster.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        step(seen.as<float>() + 1);  // the other node's part never comes
        for (++submitted; submitted < GetParam();) std::this_thread::yield();
        path.abort("the test says so");
        ASSERT_EQ(api.stream_synchronize(stream), 0);
        EXPECT_EQ(seen.as<float>()[1], 1.0F);
        EXPECT_EQ(path.gate().status().code(), Code::kAborted);
      }
      ++done;
      while (done < cluster.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      static_cast<void>(path.destroy());
    });
  }
}

// Operations whose way in is enqueued when they have come, and those that a join finds on the way, in turn, on few hardware
// queues: a stream never waits for what is not enqueued.
TEST(Steps, AJoinEnqueuesWhatItWaitsFor) {
  for (const int queues : {0, 2, 3}) {
    ClusterOptions o{.nodes = 3, .local_size = 1};
    o.machine.hardware_queues = queues;
    o.machine.delays_us = 100;
    Cluster cluster(o);
    cluster.run([&](Rank r) {
      auto made = cluster.create(r, {.lanes = 2, .piece_bytes = 16 * 1024, .ahead = false});
      ASSERT_TRUE(made.is_ok());
      auto& path = **made;
      constexpr int kTensors = 6;
      constexpr uint64_t kCount = 20000;
      ASSERT_TRUE(path.reserve(kTensors * kCount * 4, kCount * 4).is_ok());
      std::vector<std::unique_ptr<Tensor>> tensors;
      for (int i = 0; i < kTensors; ++i)
        tensors.push_back(std::make_unique<Tensor>(cluster, r, kCount * 4));
      for (int step = 0; step < 6; ++step) {
        std::vector<uint64_t> ids;
        for (int i = 0; i < kTensors; ++i) {
          std::fill_n(tensors[static_cast<size_t>(i)]->as<float>(), kCount,
                      static_cast<float>(r + i));
          AllReduce a;
          a.data = tensors[static_cast<size_t>(i)]->address();
          a.count = kCount;
          a.codec = i % 2;
          auto id = path.all_reduce(a);
          ASSERT_TRUE(id.is_ok());
          ids.push_back(*id);
          if (step % 3 == 1) {
            ASSERT_TRUE(path.join(*id, nullptr).is_ok());
          }
        }
        if (step % 3 == 2 && r == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        ASSERT_TRUE(path.join(ids.back(), nullptr).is_ok());
        ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
        for (int i = 0; i < kTensors; ++i)
          ASSERT_EQ(tensors[static_cast<size_t>(i)]->as<float>()[kCount - 1],
                    static_cast<float>(3 + 3 * i));
      }
      EXPECT_TRUE(path.destroy().is_ok());
    });
  }
}

// The optimizer of a step that has arrived runs through, whatever becomes of the next.
TEST_P(Gates, OfWhatHasArrivedStayOpen) {
  Cluster cluster({.nodes = 2, .local_size = GetParam()});
  std::atomic<int> arrived = 0, submitted = 0;
  std::atomic<int> done = 0;
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok());
    auto& path = **made;
    Tensor gradient(cluster, r, 4000);
    std::fill_n(gradient.as<float>(), 1000, 1.0F);
    AllReduce a;
    a.data = gradient.address();
    a.count = 1000;
    a.codec = 0;
    ASSERT_TRUE(path.all_reduce(a).is_ok());
    auto first = path.gate();
    ASSERT_TRUE(first.is_ok());
    bool finite = false;
    ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
    ++arrived;
    if (r < GetParam()) {
      while (arrived < cluster.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ASSERT_TRUE(path.all_reduce(a).is_ok());
      auto second = path.gate();
      ASSERT_TRUE(second.is_ok());
      EXPECT_NE(*first, *second);
      // An abort reaches the neighbour, too.
      for (++submitted; submitted < GetParam();) std::this_thread::yield();
      path.abort("the test says so");
      EXPECT_EQ(*reinterpret_cast<const float*>(*first), 0.0F);
      EXPECT_EQ(*reinterpret_cast<const float*>(*second), 1.0F);
    }
    ++done;
    while (done < cluster.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    static_cast<void>(path.destroy());
  });
}

INSTANTIATE_TEST_SUITE_P(RanksOfANode, Gates, testing::Values(1, 2));

TEST(Steps, BadArgumentsAreNamedAndEndNothing) {
  Cluster cluster({.nodes = 2, .local_size = 1});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok());
    auto& path = **made;
    Tensor tensor(cluster, r, 4000);
    AllReduce a;
    a.data = tensor.address() + 4;
    a.count = 100;
    EXPECT_NE(path.all_reduce(a).status().message().find("aligned to 16"), std::string::npos);
    a.data = tensor.address();
    a.dtype = DType::kInt32;
    EXPECT_EQ(path.all_reduce(a).status().code(), Code::kUnsupported);
    a.dtype = DType::kFloat32;
    a.codec = 9;
    EXPECT_EQ(path.all_reduce(a).status().code(), Code::kInvalidArgument);
    a.codec = 3;
    a.segments = {{1, 0, 99}};
    EXPECT_NE(path.all_reduce(a).status().message().find("99 elements, the buffer 100"),
              std::string::npos);
    EXPECT_EQ(path.join(17, nullptr).code(), Code::kInvalidArgument);
    EXPECT_EQ(path.reserve(1, 2).code(), Code::kInvalidArgument);
    bool finite = false;
    EXPECT_TRUE(path.wait_arrival(1, finite).is_ok());
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

}  // namespace
}  // namespace paceline::gpu
