// Faults within a node: a neighbour that is lost between the network and NCCL's part of an operation, and an end that others
// are told of while the script already gives everything back.
#include <array>
#include <atomic>
#include <thread>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kCount = 4096;

// NCCL whose all-gather, or whose end, takes as long as a test wants. (Its functions take no context.)
nc::Api slow_nccl;
const nc::Api* whole_nccl = nullptr;
std::atomic<bool> holds_gather{false}, gather_fails{false};
std::atomic<bool> is_freed{false}, outlived{false};

Drivers drivers_with_slow_nccl(Cluster& cluster) {
  auto drivers = cluster.drivers();
  drivers.nccl = [](const std::string&) -> Result<const nc::Api*> { return &slow_nccl; };
  return drivers;
}

Result<std::unique_ptr<Path>> create(const Drivers& drivers, Cluster& cluster, Rank rank,
                                     const std::string& node_reduce = "auto") {
  PathOptions options;
  options.node_reduce = node_reduce;
  options.device = rank;
  options.least_slice = kMostWires * kSliceAlign;
  options.wire_threads = 1;
  options.node_gather = "nccl";
  return Path::create(drivers, cluster.comm(rank), options);
}

/// An exact sum of a tensor that is filled with ones here.
AllReduce of_ones(const Tensor& tensor) {
  std::fill_n(tensor.as<float>(), kCount, 1.0F);
  AllReduce a;
  a.data = tensor.address();
  a.count = kCount;
  a.codec = 0;
  return a;
}

void sleep_for_ms(int time) { std::this_thread::sleep_for(std::chrono::milliseconds(time)); }

/// From now on drivers_with_slow_nccl()'s all-gathers wait for a test, as those of a process that is stopped, then gone.
void let_gathers_be_held(Cluster& cluster) {
  whole_nccl = &cluster.cliques().api();
  slow_nccl = *whole_nccl;
  holds_gather = gather_fails = false;
  slow_nccl.all_gather = [](const void* from, void* to, size_t count, nc::Type type, nc::Comm comm,
                            cu::Stream stream) -> nc::NcclResult {
    while (holds_gather && !gather_fails) sleep_for_ms(1);
    return gather_fails ? 1 : whole_nccl->all_gather(from, to, count, type, comm, stream);
  };
}

// The host waits for one operation, then lets an update run behind it. What a neighbour's all-gather has not brought must
// not count as arrived.
TEST(NodeFaults, AnOperationIsThereWhenItsAllGatherIs) {
  Cluster cluster({.nodes = 2, .local_size = 2, .timeout_s = 30});
  cluster.machine().expect_faults();
  let_gathers_be_held(cluster);
  std::atomic<int> ready{0}, called{0};
  const auto meet = [&](int times) {
    for (++ready; ready < 4 * times;) std::this_thread::yield();
  };
  cluster.run([&](Rank r) {
    auto made = create(r == 1 ? drivers_with_slow_nccl(cluster) : cluster.drivers(), cluster, r);
    ASSERT_TRUE(made) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4));
    Tensor tensor(cluster, r, kCount * 4);
    AllReduce a;
    a.data = tensor.address();
    a.count = kCount;
    a.average = true;
    a.codec = 0;
    bool finite = true;
    std::fill_n(tensor.as<float>(), kCount, 1.0F + static_cast<float>(r));
    meet(1);
    auto first = path.all_reduce(a);
    ASSERT_TRUE(first);
    ASSERT_TRUE(path.join(*first, nullptr));
    ASSERT_TRUE(path.wait_operation(*first, 20, finite));
    EXPECT_TRUE(path.arrived(*first));
    EXPECT_EQ(tensor.as<float>()[kCount - 1], 2.5F);
    meet(2);
    holds_gather = true;
    auto second = path.all_reduce(a);
    ASSERT_EQ(second.is_ok(), r != 1);
    if (r != 1) ++called;
    if (r == 0) {
      ASSERT_TRUE(path.join(*second, nullptr));
      std::thread killer([&] {
        while (called < 3) std::this_thread::yield();
        sleep_for_ms(300);
        EXPECT_FALSE(path.arrived(*second));
        path.abort("rank 1 is lost");
        gather_fails = true;
      });
      EXPECT_FALSE(path.wait_operation(*second, 20, finite));
      EXPECT_TRUE(path.arrived(*second)) << "a wait would raise at once";
      killer.join();
    } else {
      (void)path.wait_arrival(20, finite);
    }
    (void)path.destroy();
  });
}

// Everything has come over the network, and a neighbour's kernel stands still: the caller's time-out holds all the same, and
// what the wait in vain has heard of is told by the next one.
TEST(NodeFaults, AWaitForWhatHasArrivedKeepsToItsTimeout) {
  Cluster cluster({.nodes = 2, .local_size = 2, .timeout_s = 30});
  let_gathers_be_held(cluster);
  std::atomic<int> ready{0};
  cluster.run([&](Rank r) {
    auto made = create(r == 1 ? drivers_with_slow_nccl(cluster) : cluster.drivers(), cluster, r);
    ASSERT_TRUE(made) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4));
    Tensor tensor(cluster, r, kCount * 4);
    const auto a = of_ones(tensor);
    bool finite = true;
    auto first = path.all_reduce(a);  // its all-gather waits on the host, for all ranks
    ASSERT_TRUE(first && path.join(*first, nullptr) && path.wait_arrival(20, finite));
    tensor.as<float>()[7] = INFINITY;
    for (++ready; ready < 4;) std::this_thread::yield();
    holds_gather = true;
    auto second = path.all_reduce(a);  // on rank 1 while the others wait
    ASSERT_TRUE(second);
    if (r == 0) {
      std::atomic<bool> checked{false};
      std::thread end([&] {
        for (int i = 0; i < 5000 && !checked; ++i) sleep_for_ms(1);
        holds_gather = false;
      });
      Status late;  // first of what has not come, then of what has
      do {
        late = path.wait_operation(*second, 0.1, finite);
      } while (!late && late.message().find("GPUs") == std::string::npos);
      EXPECT_EQ(late.code(), Code::kTimeout) << late.message();
      EXPECT_EQ(path.wait_arrival(0.1, finite).code(), Code::kTimeout);
      checked = true;
      end.join();
    }
    finite = true;
    ASSERT_TRUE(path.wait_arrival(20, finite));
    EXPECT_FALSE(finite);
    ASSERT_TRUE(path.destroy());
  });
}

// Everything has come over the network, and a lost neighbour spoils what brings it to its place: no update may follow.
TEST(NodeFaults, AGateClosesOverWhatANeighbourHasNotBrought) {
  Cluster cluster({.nodes = 2, .local_size = 2, .timeout_s = 30});
  cluster.machine().expect_faults();
  let_gathers_be_held(cluster);
  std::atomic<int> ready{0};
  cluster.run([&](Rank r) {
    auto made = create(r == 1 ? drivers_with_slow_nccl(cluster) : cluster.drivers(), cluster, r);
    ASSERT_TRUE(made) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4));
    Tensor tensor(cluster, r, kCount * 4);
    const auto a = of_ones(tensor);
    bool finite = true;
    auto first = path.all_reduce(a);
    ASSERT_TRUE(first && path.join(*first, nullptr) && path.wait_arrival(20, finite));
    auto before = path.gate();
    ASSERT_TRUE(before);
    for (++ready; ready < 4;) std::this_thread::yield();
    holds_gather = true;
    auto second = path.all_reduce(a);
    if (r == 0) {
      ASSERT_TRUE(second);
      auto gate = path.gate();
      ASSERT_TRUE(gate);
      Status late;  // first of what has not come, then of what has
      do {
        late = path.wait_operation(*second, 0.1, finite);
      } while (!late && late.message().find("GPUs") == std::string::npos);
      EXPECT_EQ(*reinterpret_cast<const float*>(*gate), 0.0F);
      path.abort("rank 1 is lost");
      EXPECT_EQ(*reinterpret_cast<const float*>(*gate), 1.0F);
      EXPECT_EQ(*reinterpret_cast<const float*>(*before), 0.0F) << "that pass is in its place";
      gather_fails = true;
    } else {
      (void)path.wait_arrival(20, finite);
    }
    (void)path.destroy();
  });
}

// A guard's thread aborts; the script has heard of it and destroys the handle while NCCL is still being aborted.
TEST(NodeFaults, NothingIsFreedWhileNcclIsBeingAborted) {
  Cluster cluster({.nodes = 2, .local_size = 2});
  cluster.machine().expect_faults();
  whole_nccl = &cluster.cliques().api();
  slow_nccl = *whole_nccl;
  is_freed = outlived = false;
  slow_nccl.comm_abort = [](nc::Comm comm) -> nc::NcclResult {
    sleep_for_ms(200);
    if (is_freed) outlived = true;
    return whole_nccl->comm_abort(comm);
  };
  std::atomic<int> ready{0};
  cluster.run([&](Rank r) {
    auto made = create(r == 0 ? drivers_with_slow_nccl(cluster) : cluster.drivers(), cluster, r);
    ASSERT_TRUE(made) << made.status().message();
    auto path = std::move(*made);
    for (++ready; ready < 4;) std::this_thread::yield();
    bool finite = true;
    std::thread guard;
    if (r == 0) guard = std::thread([p = path.get()] { p->abort("rank 3 is lost"); });
    while (path->wait_arrival(1, finite)) sleep_for_ms(1);
    path.reset();
    if (r == 0) {
      is_freed = true;
      guard.join();
    }
  });
  EXPECT_FALSE(outlived);
}

// NCCL may be the first to hear of a rank that is lost while the path is made, and says nothing of whom. By the code all know
// that there is no other way to agree on.
TEST(NodeFaults, ARankThatIsLostInTheCreationIsNamedOnAll) {
  static Cluster* killed;
  static std::atomic<bool> is_killed;
  Cluster cluster({.nodes = 2, .local_size = 2});
  killed = &cluster;
  is_killed = false;
  whole_nccl = &cluster.cliques().api();
  slow_nccl = *whole_nccl;
  slow_nccl.comm_init_rank_config = [](nc::Comm*, int, nc::UniqueId, int rank,
                                       nc::Config*) -> nc::NcclResult {
    if (rank == 0) {
      while (!is_killed) std::this_thread::yield();
      return 2;  // an unhandled system error: the other one has closed its sockets
    }
    is_killed = true;
    killed->kill(3);
    return 2;
  };
  cluster.run([&](Rank r) {
    auto made = create(r < 2 ? cluster.drivers() : drivers_with_slow_nccl(cluster), cluster, r);
    ASSERT_FALSE(made.is_ok());
    if (r == 3) return;
    EXPECT_EQ(made.status().code(), Code::kPeerLost) << r << ": " << made.status().message();
    EXPECT_NE(made.status().message().find("rank 3"), std::string::npos) << made.status().message();
  });
}

// As above, amid an operation: NCCL misses rank 3 at once, the wires a moment later.
TEST(NodeFaults, ANeighbourThatNcclMissesFirstIsNamedOnAll) {
  Cluster cluster({.nodes = 2, .local_size = 2, .timeout_s = 30});
  cluster.machine().expect_faults();
  whole_nccl = &cluster.cliques().api();
  slow_nccl = *whole_nccl;
  static std::atomic<bool> misses, has_missed;
  misses = has_missed = false;
  slow_nccl.reduce_scatter = [](const void* from, void* to, size_t count, nc::Type type, nc::Op op,
                                nc::Comm comm, cu::Stream stream) -> nc::NcclResult {
    if (!misses) return whole_nccl->reduce_scatter(from, to, count, type, op, comm, stream);
    has_missed = true;
    return nc::kRemoteError;
  };
  std::atomic<int> ready{0}, left{3};
  cluster.run([&](Rank r) {
    auto made =
        create(r == 2 ? drivers_with_slow_nccl(cluster) : cluster.drivers(), cluster, r, "nccl");
    ASSERT_TRUE(made) << made.status().message();
    auto& path = **made;
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4));
    Tensor tensor(cluster, r, kCount * 4);
    const auto a = of_ones(tensor);
    bool finite = true;
    auto first = path.all_reduce(a);
    ASSERT_TRUE(first && path.join(*first, nullptr) && path.wait_arrival(20, finite));
    for (++ready; ready < 4;) std::this_thread::yield();
    if (r == 3) {
      misses = true;
      while (!has_missed) sleep_for_ms(1);
      sleep_for_ms(100);
      cluster.kill(3);
      while (left > 0) sleep_for_ms(1);
      paceline_comm_abort(cluster.comm(3), "killed");
      return;
    }
    while (!misses) std::this_thread::yield();
    auto second = path.all_reduce(a);
    const auto status = second ? path.wait_arrival(20, finite) : second.status();
    --left;
    EXPECT_EQ(status.code(), Code::kPeerLost) << r << ": " << status.message();
    EXPECT_NE(status.message().find("rank 3 (host"), std::string::npos) << status.message();
  });
}

TEST(NodeFaults, WhatOneRankLacksInTheCreationHasOneCodeOnAll) {
  Cluster cluster({.nodes = 2, .local_size = 2});
  whole_nccl = &cluster.cliques().api();
  slow_nccl = *whole_nccl;
  slow_nccl.comm_init_rank_config = [](nc::Comm*, int, nc::UniqueId, int,
                                       nc::Config*) -> nc::NcclResult { return 2; };
  std::array<Code, 4> codes{};
  cluster.run([&](Rank r) {
    auto made = create(r == 2 ? drivers_with_slow_nccl(cluster) : cluster.drivers(), cluster, r);
    ASSERT_FALSE(made.is_ok());
    codes[static_cast<size_t>(r)] = made.status().code();
    const auto text = made.status().message();
    EXPECT_EQ(text.find("rank 2 (host b)") != std::string::npos, r != 2) << text;
  });
  for (auto code : codes) {
    EXPECT_EQ(code, codes[2]);
    EXPECT_TRUE(code != Code::kPeerLost && code != Code::kAborted && code != Code::kTimeout);
  }
}

}  // namespace
}  // namespace paceline::gpu
