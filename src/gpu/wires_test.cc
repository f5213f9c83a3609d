// Several threads on the wire: how many, what goes over which, and that the end of one is the end of all.
#include <atomic>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kCount = 50021;

struct Step {
  Cluster& cluster;
  Rank rank;
  Path& path;
  Status run(const Tensor& tensor, int codec = 0) const {
    AllReduce a;
    a.data = tensor.address();
    a.count = kCount;
    a.codec = codec;
    a.name = "bucket";
    PACELINE_ASSIGN(auto id, path.all_reduce(a));
    PACELINE_RETURN_IF_ERROR(path.join(id, nullptr));
    bool finite = false;
    PACELINE_RETURN_IF_ERROR(path.wait_arrival(30, finite));
    return cluster.machine().api().stream_synchronize(nullptr) == 0
               ? Status::ok()
               : Status(Code::kUnavailable, "the stream has failed");
  }
};

ClusterOptions with_wires(int wires, int nodes = 2, int local_size = 1) {
  ClusterOptions o;
  o.nodes = nodes;
  o.local_size = local_size;
  o.wires = wires;
  return o;
}

TEST(Wires, TheStartLineSaysHowMany) {
  for (int wires : {1, 3}) {
    Cluster cluster(with_wires(wires));
    cluster.run([&](Rank r) {
      auto made = cluster.create(r);
      ASSERT_TRUE(made.is_ok()) << made.status().message();
      const auto& line = (*made)->describe();
      EXPECT_EQ(line.find("3 threads on the wire") != std::string::npos, wires == 3) << line;
      EXPECT_EQ(line.find("thread") != std::string::npos, wires == 3) << line;
      EXPECT_TRUE((*made)->destroy().is_ok());
    });
  }
}

TEST(Wires, NumbersThatDifferAreNamed) {
  Cluster cluster(with_wires(1));
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.wire_threads = 2 + r});
    EXPECT_EQ(made.status().code(), Code::kMismatch);
    EXPECT_NE(made.status().message().find("PACELINE_WIRE_THREADS is"), std::string::npos)
        << made.status().message();
    EXPECT_NE(made.status().message().find(fmt::format("on rank {}", 1 - r)), std::string::npos)
        << made.status().message();
  });
}

TEST(Wires, TooManyAreRefusedByName) {
  Cluster cluster(with_wires(1));
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.wire_threads = r == 0 ? 9 : 8});
    EXPECT_EQ(made.status().code(), Code::kInvalidArgument);
    EXPECT_NE(made.status().message().find("9 threads on the wire"), std::string::npos)
        << made.status().message();
  });
}

// Each wire carries its share of one operation, and all together what the plan says.
TEST(Wires, OneOperationUsesAllOfThem) {
  constexpr int kWires = 3;
  Cluster cluster(with_wires(kWires, 3));
  std::vector<std::vector<paceline_comm*>> companions(3);
  cluster.run([&](Rank r) {
    auto drivers = cluster.drivers();
    drivers.companion = [&, make = drivers.companion](paceline_comm* comm) {
      auto made = make(comm);
      companions[static_cast<size_t>(r)].push_back(*made);
      return made;
    };
    PathOptions options;
    options.device = r;
    options.wire_threads = kWires;
    options.least_slice = kMostWires * kSliceAlign;
    auto made = Path::create(drivers, cluster.comm(r), options);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    Tensor tensor(cluster, r, kCount * sizeof(float));
    std::fill_n(tensor.as<float>(), kCount, static_cast<float>(r));
    const Step step{cluster, r, path};
    ASSERT_TRUE(step.run(tensor).is_ok());
    EXPECT_EQ(tensor.as<float>()[kCount - 1], 3.0F);
    PathRequest q;
    q.shape = {3, 1, r, 0};
    q.count = kCount;
    q.piece_bytes = kPieceBytes;
    const auto bytes = build_path(q)->wire_bytes;
    // Sums may come from all others before this rank has sent its own.
    ASSERT_TRUE(path.reserve(kCount * 4, kCount * 4).is_ok());
    EXPECT_EQ(path.statistics().wire_bytes, bytes);
    // Two messages to each of two nodes: every one in a slice a wire, alike but for rounding.
    for (auto* comm : companions[static_cast<size_t>(r)]) {
      const auto sent = static_cast<double>(comm->runner->counters().payload_sent);
      EXPECT_NEAR(sent / static_cast<double>(bytes), 1.0 / kWires, 0.02);
    }
    EXPECT_TRUE(path.destroy().is_ok());
  });
}

class WiresOf : public testing::TestWithParam<int> {};

// A peer that is lost on a companion alone is lost: it is named on all ranks, by its own sentence, and ends the rest.
TEST_P(WiresOf, ACompanionThatFailsAloneEndsAll) {
  const int broken = GetParam();
  Cluster cluster(with_wires(3, 3));
  std::atomic<int> ready = 0;
  std::vector<Status> ends(3);
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    Tensor tensor(cluster, r, kCount * sizeof(float));
    std::fill_n(tensor.as<float>(), kCount, 1.0F);
    const Step step{cluster, r, path};
    Status status;
    for (int i = 0; status && i < 100000; ++i) {
      status = step.run(tensor, 1);
      if (i == 3) ++ready;
      if (i == 3 && r == 0) {
        while (ready < 3) std::this_thread::yield();
        cluster.network_beside(static_cast<size_t>(broken)).kill(2);
      }
    }
    ends[static_cast<size_t>(r)] = status;
    // Everything later says the same, on whichever wire; nothing hangs.
    EXPECT_EQ(step.run(tensor, 1).message(), status.message());
    while (paceline_comm_health(cluster.comm(r)) == PACELINE_OK) std::this_thread::yield();
    EXPECT_EQ(paceline_comm_health(cluster.comm(r)), static_cast<int>(status.code()));
    EXPECT_STREQ(paceline_error(cluster.comm(r)), status.message().c_str());
    EXPECT_FALSE(path.destroy().is_ok());
    EXPECT_EQ(cluster.machine().counts(r).pending_waits, 0U);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.code(), Code::kPeerLost) << end.message();
    EXPECT_NE(end.message().find("rank 2 (host c) is lost"), std::string::npos) << end.message();
    EXPECT_EQ(end.message().find("ended the job"), std::string::npos) << end.message();
  }
}
INSTANTIATE_TEST_SUITE_P(Companions, WiresOf, testing::Values(0, 1));

// What one wire can't have, no rank has: all are told at the creation, and everything is given back.
TEST(Wires, ACompanionThatCanNotBeMadeIsNamedOnAll) {
  Cluster cluster(with_wires(3, 2, 2));
  cluster.run([&](Rank r) {
    auto drivers = cluster.drivers();
    int calls = 0;
    drivers.companion = [&, make = drivers.companion](paceline_comm* comm) {
      return r == 1 && ++calls == 2 ? Result<paceline_comm*>(Status(Code::kResourceExhausted,
                                                                    "no socket, as the test says"))
                                    : make(comm);
    };
    PathOptions options;
    options.device = r;
    options.wire_threads = 3;
    auto made = Path::create(drivers, cluster.comm(r), options);
    ASSERT_FALSE(made.is_ok());
    EXPECT_NE(made.status().message().find("no socket"), std::string::npos)
        << made.status().message();
    EXPECT_EQ(made.status().message().find("rank 1 (host a)") != std::string::npos, r != 1)
        << made.status().message();
  });
  for (Rank r = 0; r < cluster.size(); ++r) {
    EXPECT_EQ(cluster.machine().counts(r).memory, 0U);
    EXPECT_EQ(cluster.machine().counts(r).pinned, 0U);
  }
}

TEST(Wires, TheyCanBeMadeAgainAfterTheEnd) {
  Cluster cluster(with_wires(2, 2, 2));
  for (int round = 0; round < 3; ++round) {
    cluster.run([&](Rank r) {
      auto made = cluster.create(r);
      ASSERT_TRUE(made.is_ok()) << made.status().message();
      Tensor tensor(cluster, r, kCount * sizeof(float));
      std::fill_n(tensor.as<float>(), kCount, 1.0F);
      const Step step{cluster, r, **made};
      ASSERT_TRUE(step.run(tensor).is_ok());
      EXPECT_EQ(tensor.as<float>()[0], 4.0F);
      EXPECT_TRUE((*made)->destroy().is_ok());
    });
  }
}

}  // namespace
}  // namespace paceline::gpu
