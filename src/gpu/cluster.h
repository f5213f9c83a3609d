// For tests: nodes with GPUs in one process. Ranks are threads with a simulated device each, real engines over a
// loopback network, the real path between them.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "capi/handle.h"
#include "device/cpu/casts.h"
#include "device/cuda/kernel_arguments.h"
#include "device/cuda/reference.h"
#include "drivers/cuda/mock/machine.h"
#include "drivers/nccl/mock/cliques.h"
#include "engine/loopback.h"
#include "gpu/path.h"

namespace paceline::gpu {

/// The reference of every kernel, by the kernel's name.
inline void add_reference_kernels(cu::mock::Machine& machine) {
  static constexpr size_t kSizes[] = {
#define PACELINE_ARGUMENT_SIZE(name, argument) sizeof(device::cuda::argument),
      PACELINE_KERNELS(PACELINE_ARGUMENT_SIZE)
#undef PACELINE_ARGUMENT_SIZE
  };
  size_t i = 0;
  for (const auto& kernel : device::cuda::reference::kernels()) {
    machine.add_kernel(kernel.name,
                       {{kSizes[i++]}, [run = kernel.run](const auto&, void* const* a) {
                          void* copy = a[0];
                          run(&copy);
                        }});
  }
}

/// Threads on the wire where a test asks for none: GPU_TEST_WIRES=4 build/bin/gpu_test runs all tests with three.
inline int default_wires() {
  const char* text = std::getenv("GPU_TEST_WIRES");
  return text == nullptr ? 1 : std::atoi(text);
}

/// GPU_TEST_NODE_GATHER=nccl build/bin/gpu_test runs all tests with NCCL's all-gather in the node.
inline std::string default_node_gather() {
  const char* text = std::getenv("GPU_TEST_NODE_GATHER");
  return text == nullptr ? "copies" : text;
}

/// GPU_TEST_NODE_REDUCE=nccl build/bin/gpu_test runs all tests with NCCL's reduce-scatter.
inline std::string default_node_reduce() {
  const char* text = std::getenv("GPU_TEST_NODE_REDUCE");
  return text == nullptr ? "copies" : text;
}

struct ClusterOptions {
  int nodes = 2;
  int local_size = 1;
  cu::mock::Options machine;
  double timeout_s = 20;
  Rank stopped = -1;            ///< is to be frozen: a stopped process has no deadlines
  int wires = default_wires();  ///< threads on the wire; messages are cut into short slices
  std::optional<bool> ahead;    ///< PathOptions::ahead; unset: where streams share hardware queues
  std::string node_gather = default_node_gather();
  std::string node_reduce = default_node_reduce();
};

/// A loopback channel that its network may outlive.
class Cluster {
 public:
  explicit Cluster(ClusterOptions options)
      : options_(options),
        machine_([&] {
          auto m = options.machine;
          m.devices = options.nodes * options.local_size;
          return m;
        }()),
        cliques_(machine_),
        network_(size()) {
    add_reference_kernels(machine_);
    for (Rank r = 0; r < size(); ++r) comms_.push_back(make_comm(r, network_));
    companions_made_.resize(static_cast<size_t>(size()));
    current_ = this;
  }
  ~Cluster() {
    // Engines end without goodbyes: the test is over.
    comms_.clear();
    current_ = nullptr;
  }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  [[nodiscard]] Rank size() const { return options_.nodes * options_.local_size; }
  cu::mock::Machine& machine() { return machine_; }
  drivers::nccl::mock::Cliques& cliques() { return cliques_; }
  engine::LoopbackNetwork& network() { return network_; }
  /// What the companions of number `index` (since the beginning) talk over.
  engine::LoopbackNetwork& network_beside(size_t index) {
    std::lock_guard lock(networks_mutex_);
    while (networks_beside_.size() <= index)
      networks_beside_.push_back(std::make_unique<engine::LoopbackNetwork>(size()));
    return *networks_beside_[index];
  }
  /// The rank is gone: everyone else hears of its loss, on whatever they talk to it.
  void kill(Rank rank) {
    machine_.expect_faults();
    network_.kill(rank);
    for (size_t i = 0; i < companions_made_[static_cast<size_t>(rank)]; ++i)
      network_beside(i).kill(rank);
  }
  /// The rank's threads on the wire stand still, as under SIGSTOP, until they are let go on.
  void freeze(Rank rank, bool frozen = true) {
    machine_.expect_faults();
    network_.freeze(rank, frozen);
    for (size_t i = 0; i < companions_made_[static_cast<size_t>(rank)]; ++i)
      network_beside(i).freeze(rank, frozen);
  }
  paceline_comm* comm(Rank r) { return comms_[static_cast<size_t>(r)].get(); }

  Drivers drivers() {
    Drivers d;
    d.cuda = &machine_.api();
    d.images = device::cuda::reference::images();
    d.nccl = [](const std::string&) -> Result<const nc::Api*> { return &current_->cliques_.api(); };
    d.companion = [this](paceline_comm* comm) -> Result<paceline_comm*> {
      const Rank r = comm->job->topology.rank;
      return make_comm(r, network_beside(companions_made_[static_cast<size_t>(r)]++)).release();
    };
    return d;
  }
  Result<std::unique_ptr<Path>> create(Rank r, PathOptions options = {}) {
    options.device = r;
    if (options.wire_threads == 0) options.wire_threads = options_.wires;
    if (options.usual_in_node == 0) options.usual_in_node = 2U << 20;  // memory is poisoned: little
    if (options.node_gather.empty()) options.node_gather = options_.node_gather;
    if (options.node_reduce.empty()) options.node_reduce = options_.node_reduce;
    if (options.least_given == 0) options.least_given = 64;
    options.least_slice = kMostWires * kSliceAlign;
    if (!options.ahead)
      options.ahead = options_.ahead.value_or(options_.machine.hardware_queues != 0);
    return Path::create(drivers(), comm(r), options);
  }

  /// Runs `body(rank)` in a thread per rank; a test that hangs fails after `seconds` and ends the program, for its
  /// threads can't be stopped.
  void run(const std::function<void(Rank)>& body, int seconds = 60) {
    std::mutex mutex;
    std::condition_variable done;
    int left = size();
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(size()));
    for (Rank r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] {
        body(r);
        std::lock_guard lock(mutex);
        --left;
        done.notify_all();
      });
    }
    {
      std::unique_lock lock(mutex);
      if (!done.wait_for(lock, std::chrono::seconds(seconds), [&] { return left == 0; })) {
        std::fprintf(stderr, "%d ranks hang\n", left);
        std::abort();
      }
    }
    for (auto& t : threads) t.join();
  }

 private:
  std::unique_ptr<paceline_comm> make_comm(Rank r, engine::LoopbackNetwork& network) {
    auto comm = std::make_unique<paceline_comm>();
    comm->fork_generation = capi::fork_generation();
    auto settings = Settings::load(Face::kPaceline);
    if (settings) comm->settings = *settings;
    comm->job = std::make_unique<bootstrap::Job>();
    auto& t = comm->job->topology;
    t.rank = r;
    t.node_count = options_.nodes;
    for (Rank i = 0; i < size(); ++i) {
      bootstrap::Member m;
      m.rank = i;
      m.node = i / options_.local_size;
      m.local_rank = i % options_.local_size;
      m.host = std::string(1, static_cast<char>('a' + m.node));
      m.node_id = m.host;
      t.members.push_back(m);
    }
    const double timeout_s = r == options_.stopped ? 600 : options_.timeout_s;
    comm->options.default_timeout = static_cast<Time>(timeout_s * kSecond);
    comm->engine = engine::make_engine(comm->options, t, network.channel(r));
    comm->runner = std::make_unique<engine::Runner>(*comm->engine, network.channel(r),
                                                    engine::runner_options_for(size() * 4));
    return comm;
  }

  static inline Cluster* current_ = nullptr;
  ClusterOptions options_;
  cu::mock::Machine machine_;
  drivers::nccl::mock::Cliques cliques_;
  engine::LoopbackNetwork network_;
  std::mutex networks_mutex_;
  std::vector<std::unique_ptr<engine::LoopbackNetwork>> networks_beside_;
  std::vector<size_t> companions_made_;  ///< [ranks]
  std::vector<std::unique_ptr<paceline_comm>> comms_;
};

/// Device memory of one rank's simulated GPU, not counted as its allocations: what a framework holds.
class Tensor {
 public:
  Tensor(Cluster& cluster, Rank rank, uint64_t bytes)
      : cluster_(cluster), rank_(rank), data_(std::aligned_alloc(256, (bytes / 256 + 1) * 256)) {}
  ~Tensor() {
    cluster_.machine().wait_idle(rank_);  // as cudaFree does
    std::free(data_);
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  [[nodiscard]] cu::DevicePtr address() const { return reinterpret_cast<cu::DevicePtr>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  Cluster& cluster_;
  Rank rank_;
  void* data_;
};

/// An all-reduce from its call to its sums in the tensor.
inline void carry(Cluster& cluster, Path& path, const AllReduce& a) {
  auto id = path.all_reduce(a);
  ASSERT_TRUE(id.is_ok()) << id.status().message();
  ASSERT_TRUE(path.join(*id, nullptr).is_ok());
  bool finite = false;
  ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
  ASSERT_EQ(cluster.machine().api().stream_synchronize(nullptr), 0);
}

/// Encoding gradients at `only` (0: anywhere) takes `time` longer from now on; but a cast that is made again, beside the
/// network, reports nothing and is as fast as ever.
inline void slow_down_encoding(Cluster& cluster, std::chrono::milliseconds time,
                               cu::DevicePtr only = 0) {
  static constexpr size_t kSizes[] = {
#define PACELINE_ARGUMENT_SIZE(name, argument) sizeof(device::cuda::argument),
      PACELINE_KERNELS(PACELINE_ARGUMENT_SIZE)
#undef PACELINE_ARGUMENT_SIZE
  };
  size_t i = 0;
  for (const auto& kernel : device::cuda::reference::kernels()) {
    const size_t size = kSizes[i++];
    const bool is_cast = std::string(kernel.name).starts_with("paceline_encode_");
    if (std::string(kernel.name).find("encode") == std::string::npos) continue;
    cluster.machine().add_kernel(
        kernel.name, {{size}, [time, only, is_cast, run = kernel.run](const auto&, void* const* a) {
                        cu::DevicePtr gradient = 0;  // the first member of every encoder's argument
                        std::memcpy(&gradient, a[0], sizeof gradient);
                        device::cuda::DenseEncode cast;
                        if (is_cast) std::memcpy(&cast, a[0], sizeof cast);
                        const bool leaves = !is_cast || cast.report != 0;
                        if (leaves && (only == 0 || gradient == only))
                          std::this_thread::sleep_for(time);
                        void* copy = a[0];
                        run(&copy);
                      }});
  }
}

struct ClusterShape {
  int nodes, local_size, queues;
  int wires = default_wires();
};

/// Tests on clusters of several shapes.
class OnShapes : public testing::TestWithParam<ClusterShape> {
 protected:
  static ClusterOptions options() {
    ClusterOptions o;
    o.nodes = GetParam().nodes;
    o.local_size = GetParam().local_size;
    o.machine.hardware_queues = GetParam().queues;
    o.wires = GetParam().wires;
    return o;
  }
};

}  // namespace paceline::gpu
