// The path over real sockets: processes as nodes, each with a simulated GPU, TCP between them.
#include <gtest/gtest.h>
#include <sched.h>
#include <time.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "capi/processes.h"
#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

using capi::FileStore;
using capi::Processes;

constexpr uint64_t kCount = 200'003;

double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// A node of one rank: machine, communicator, path.
struct NodeProcess {
  NodeProcess(int rank, int size, FileStore& store, int wires = 1) : machine(cu::mock::Options{}) {
    setenv("PACELINE_NODE_ID", ("node" + std::to_string(rank)).c_str(), 1);
    setenv("PACELINE_WIRE_THREADS", wires == 0 ? "auto" : std::to_string(wires).c_str(), 1);
    setenv("PACELINE_WIRE", "tcp", 1);
    add_reference_kernels(machine);
    comm = capi::create(rank, size, store, 10);
    if (comm == nullptr) return;
    Drivers d;
    d.cuda = &machine.api();
    d.images = device::cuda::reference::images();
    d.nccl = [](const std::string&) -> Result<const nc::Api*> {
      return Status(Code::kUnavailable, "one GPU a node needs no NCCL");
    };
    auto made = Path::create(
        d, comm, {.lanes = 2, .piece_bytes = 64 * 1024, .least_slice = kMostWires * kSliceAlign});
    if (made)
      path = std::move(*made);
    else
      std::fprintf(stderr, "rank %d: %s\n", rank, made.status().message().c_str());
  }
  Result<uint64_t> reduce(std::vector<float>& data, int codec) const {
    AllReduce a;
    a.data = reinterpret_cast<uint64_t>(data.data());
    a.count = data.size();
    a.average = true;
    a.codec = codec;
    a.name = "bucket";
    return path->all_reduce(a);
  }
  cu::mock::Machine machine;
  paceline_comm* comm = nullptr;
  std::unique_ptr<Path> path;
};

/// Aligned as device memory is.
std::vector<float> make_data() { return std::vector<float>(kCount); }

struct Ranks {
  int size, wires;
};
class OverTcp : public testing::TestWithParam<Ranks> {};

TEST_P(OverTcp, SumsAreRightAndTheWireCarriesWhatThePlanSays) {
  const auto [size, wires] = GetParam();
  Processes ranks(size, [size = size, wires = wires](int rank, FileStore& store) {
    NodeProcess node(rank, size, store, wires);
    MUST(node.path != nullptr);
    auto data = make_data();
    MUST(node.path->reserve(kCount * 4, kCount * 4).is_ok());
    for (int codec : {0, 1, 4, 3, 1}) {
      for (uint64_t k = 0; k < kCount; ++k)
        data[k] = static_cast<float>(rank + static_cast<int>(k % 5));
      auto id = node.reduce(data, codec);
      MUST(id.is_ok());
      MUST(node.path->join(*id, nullptr).is_ok());
      bool finite = false;
      auto status = node.path->wait_arrival(20, finite);
      if (!status) std::fprintf(stderr, "%s\n", status.message().c_str());
      MUST(status.is_ok());
      MUST(node.machine.api().stream_synchronize(nullptr) == 0);
      const float mean = static_cast<float>(size - 1) / 2;
      for (uint64_t k = 0; k < kCount && codec != 3; ++k)
        MUST(std::abs(data[k] - mean - static_cast<float>(k % 5)) < 0.08F);
    }
    // Sums may come from all others before this rank has sent its own.
    MUST(node.path->reserve(kCount * 4, kCount * 4).is_ok());
    MUST(node.path->statistics().operations == 5);
    PathRequest q;
    q.shape = {size, 1, rank, 0};
    q.count = kCount;
    q.piece_bytes = 64 * 1024;
    q.lanes = 2;
    uint64_t wanted = 0;
    for (int codec : {0, 1, 4, 3, 1}) {
      q.format.codec = static_cast<device::cuda::WireCodec>(codec);
      q.format.fp16_values = false;
      wanted += build_path(q)->wire_bytes;
    }
    MUST(node.path->statistics().wire_bytes == wanted);
    paceline_stats s{};
    s.struct_size = sizeof s;
    MUST(paceline_comm_stats(node.comm, &s) == PACELINE_OK);
    MUST(s.payload_sent >= wanted && s.payload_sent < wanted + 64 * 1024);
    MUST(node.path->destroy().is_ok());
    MUST(paceline_comm_destroy(node.comm) == PACELINE_OK);
    return 0;
  });
  for (int r = 0; r < size; ++r) EXPECT_EQ(ranks.wait(r, 60), 0) << "rank " << r;
}

TEST_P(OverTcp, AKilledProcessIsNamedWithinTwoSeconds) {
  const auto [size, wires] = GetParam();
  Processes ranks(size, [size = size, wires = wires](int rank, FileStore& store) {
    NodeProcess node(rank, size, store, wires);
    MUST(node.path != nullptr);
    auto data = make_data();
    for (int i = 0; i < 100000; ++i) {
      bool finite = false;
      auto id = node.reduce(data, 1);
      auto status = id ? node.path->wait_arrival(30, finite) : id.status();
      if (i == 2) std::ofstream(store.directory() + "/busy-" + std::to_string(rank)) << "x";
      if (status) continue;
      std::ofstream(store.directory() + "/end-" + std::to_string(rank)) << status.message();
      MUST(status.code() == Code::kPeerLost || status.code() == Code::kAborted);
      MUST(!node.path->destroy() || true);
      return 0;
    }
    return 2;
  });
  for (int r = 0; r < size; ++r) ASSERT_TRUE(ranks.appears("busy-" + std::to_string(r)));
  ranks.signal(size - 1, SIGKILL);
  for (int r = 0; r + 1 < size; ++r) {
    ASSERT_TRUE(ranks.appears("end-" + std::to_string(r), 2)) << "rank " << r << " hangs";
    EXPECT_EQ(ranks.wait(r, 20), 0);
    EXPECT_NE(ranks.heard("end-" + std::to_string(r)).find(fmt::format("rank {} (host", size - 1)),
              std::string::npos)
        << ranks.heard("end-" + std::to_string(r));
  }
}

// A rank that waits for another burns no core.
TEST(WaitsOverTcp, WaitingForAnotherNodeCostsLittle) {
  Processes ranks(2, [](int rank, FileStore& store) {
    NodeProcess node(rank, 2, store);
    MUST(node.path != nullptr);
    auto data = make_data();
    const auto waits = store.directory() + "/waits";
    if (rank == 0) std::ofstream(waits) << "x";
    while (!std::filesystem::exists(waits))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(800));
    const double before = cpu_seconds();
    const Time start = SteadyClock().now();
    auto id = node.reduce(data, 1);
    MUST(id.is_ok());
    bool finite = false;
    MUST(node.path->wait_arrival(20, finite).is_ok());
    const double wall = static_cast<double>(SteadyClock().now() - start) / kSecond;
    const double used = cpu_seconds() - before;
    // The simulated GPU looks for flags itself; it is counted too.
    if (rank == 0) {
      std::fprintf(stderr, "waited %.3f s with %.3f s of CPU\n", wall, used);
      MUST(wall > 0.3 && used < 0.5 * wall);
    }
    MUST(node.path->destroy().is_ok());
    MUST(paceline_comm_destroy(node.comm) == PACELINE_OK);
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r, 60), 0) << "rank " << r;
}

// What another rank of the job needs is not taken: the choice looks at the job's ranks on the node, and at its cores.
TEST(WiresOverTcp, WhereNobodyAskedCoresDecide) {
  for (const char* local_size : {"1", "2"}) {
    Processes ranks(2, [local_size](int rank, FileStore& store) {
      setenv("WORLD_SIZE", "4", 1);
      setenv("RANK", std::to_string(2 * rank).c_str(), 1);
      setenv("LOCAL_RANK", "0", 1);
      setenv("LOCAL_WORLD_SIZE", local_size, 1);
      NodeProcess node(rank, 2, store, 0);
      MUST(node.path != nullptr);
      cpu_set_t set;
      MUST(sched_getaffinity(0, sizeof set, &set) == 0);
      const bool two = CPU_COUNT(&set) >= 4 * std::atoi(local_size);
      const auto& line = node.path->describe();
      MUST((line.find("2 threads on the wire") != std::string::npos) == two);
      MUST((line.find("thread") != std::string::npos) == two);
      MUST(node.path->destroy().is_ok());
      MUST(paceline_comm_destroy(node.comm) == PACELINE_OK);
      return 0;
    });
    for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r, 60), 0) << "rank " << r;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, OverTcp,
                         testing::Values(Ranks{2, 1}, Ranks{3, 1}, Ranks{2, 2}, Ranks{3, 3}),
                         [](const auto& info) {
                           return fmt::format("{}x1_{}wires", info.param.size, info.param.wires);
                         });

}  // namespace
}  // namespace paceline::gpu
