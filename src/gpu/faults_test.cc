// What happens when something fails: every rank comes to an end with a sentence, no stream waits for ever, nothing is
// reported as arrived that did not arrive, and everything can be given back.
#include <atomic>
#include <barrier>
#include <random>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kCount = 20011;
constexpr int kGpuFailed = 719;

/// What a rank went through.
struct Outcome {
  Status status;  ///< the first error of any call
  bool created = false;
  bool stream_ended = true;
  bool correct = true;  ///< of what was reported as arrived
  Status later;         ///< of an all-reduce after the error
};

/// A rank's program: creates, reduces `operations` times, destroys. Stops at the first error, as a framework would.
class Program {
 public:
  Program(Cluster& cluster, Rank rank, int operations, int codec = 1)
      : cluster_(cluster), rank_(rank), operations_(operations), codec_(codec) {}
  std::function<void(int operation)> before;  ///< each all-reduce
  bool leave = false;                         ///< after `before` of an operation: no more calls

  Outcome run() {
    Outcome o;
    auto made = cluster_.create(rank_, {.piece_bytes = 16 * 1024});
    o.status = made.status();
    o.created = made.is_ok();
    if (!o.created) return o;
    path_ = std::move(*made);
    const auto& api = cluster_.machine().api();
    cu::Stream stream = nullptr;  // the legacy stream: nothing of the test's own can fail
    {
      Tensor tensor(cluster_, rank_, kCount * sizeof(float));
      o.status = steps(tensor, stream, o);
      if (!o.status) {
        o.later = reduce(tensor, stream);
        // Whatever the GPU still has to do must come to an end (unless it is lost).
        const auto error = api.stream_synchronize(stream);
        o.stream_ended = error == 0 || error == kGpuFailed;
      }
    }
    auto end = path_->destroy();
    if (o.status) o.status = end;
    return o;
  }
  Path& path() { return *path_; }

 private:
  Status steps(Tensor& tensor, cu::Stream stream, Outcome& o) {
    PACELINE_RETURN_IF_ERROR(path_->reserve(kCount * 4, kCount * 4));
    for (int i = 0; i < operations_; ++i) {
      std::fill_n(tensor.as<float>(), kCount, static_cast<float>(rank_ + i));
      if (before) before(i);
      if (leave) return Status::ok();
      PACELINE_RETURN_IF_ERROR(reduce(tensor, stream));
      bool finite = false;
      PACELINE_RETURN_IF_ERROR(path_->wait_arrival(30, finite));
      if (cluster_.machine().api().stream_synchronize(stream) != 0)
        return {Code::kUnavailable, "the stream has failed"};
      // A fault that comes after arrival may still spoil what follows; the next call says so.
      bool again = false;
      if (!path_->wait_arrival(30, again)) break;
      const double ranks = cluster_.size();
      const auto wanted = static_cast<float>((ranks - 1) / 2 + i);
      for (uint64_t k = 0; k < kCount; ++k)
        o.correct = o.correct && std::abs(tensor.as<float>()[k] - wanted) < 0.01F * (wanted + 1);
    }
    return Status::ok();
  }
  Status reduce(Tensor& tensor, cu::Stream stream) {
    AllReduce a;
    a.data = tensor.address();
    a.count = kCount;
    a.average = true;
    a.codec = codec_;
    a.stream = stream;
    a.name = "bucket";
    PACELINE_ASSIGN(auto id, path_->all_reduce(a));
    return path_->join(id, stream);
  }

  Cluster& cluster_;
  Rank rank_;
  int operations_, codec_;
  std::unique_ptr<Path> path_;
};

TEST(Faults, OneNodeIsRefused) {
  ClusterOptions o;
  o.nodes = 1;
  o.local_size = 2;
  Cluster cluster(o);
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    EXPECT_EQ(made.status().code(), Code::kUnsupported);
    EXPECT_NE(made.status().message().find("NCCL alone is the best"), std::string::npos);
  });
}

/// No rank gets a path; all say what is missing, and the others whose it is.
void expect_named(Cluster& cluster, Rank r, const Drivers& drivers, const std::string& what,
                  Rank lacking) {
  PathOptions options;
  options.device = r;
  auto made = Path::create(drivers, cluster.comm(r), options);
  ASSERT_FALSE(made.is_ok());
  EXPECT_EQ(made.status().code(), Code::kUnavailable);
  const auto text = made.status().message();
  EXPECT_NE(text.find(what), std::string::npos) << text;
  EXPECT_EQ(text.find(fmt::format("rank {}", lacking)) != std::string::npos, r != lacking) << text;
}

TEST(Faults, ARankWithoutADriverIsNamedOnAll) {
  Cluster cluster({.nodes = 2, .local_size = 1});
  const cu::Api none;
  cluster.run([&](Rank r) {
    auto drivers = cluster.drivers();
    if (r == 1) {
      drivers.cuda = &none;
      drivers.missing = Status(Code::kUnavailable, "no CUDA driver: as the test says");
    }
    expect_named(cluster, r, drivers, "no CUDA driver", 1);
  });
}

TEST(Faults, ARankWithoutNcclIsNamedOnAll) {
  Cluster cluster({.nodes = 2, .local_size = 2});
  cluster.run([&](Rank r) {
    auto drivers = cluster.drivers();
    if (r == 2)
      drivers.nccl = [](const std::string&) -> Result<const drivers::nccl::Api*> {
        return Status(Code::kUnavailable, "NCCL 2.13.4 is too old: as the test says");
      };
    expect_named(cluster, r, drivers, "NCCL 2.13.4 is too old", 2);
  });
}

TEST(Faults, LanesThatDifferAreNamed) {
  Cluster cluster({.nodes = 2, .local_size = 1});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.lanes = r + 1});
    EXPECT_EQ(made.status().code(), Code::kMismatch) << made.status().message();
  });
}

TEST(Faults, ShapesThatDifferAreNamed) {
  Cluster cluster({.nodes = 2, .local_size = 1});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok());
    auto& path = **made;
    Tensor tensor(cluster, r, kCount * 4);
    std::memset(tensor.as<void>(), 0, kCount * 4);
    AllReduce a;
    a.data = tensor.address();
    a.count = kCount - static_cast<uint64_t>(r);
    a.name = "layer1.weight";
    // The other rank's report may be here before this rank has enqueued all.
    auto id = path.all_reduce(a);
    bool finite = true;
    auto status = id ? path.wait_arrival(20, finite) : id.status();
    EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
    EXPECT_NE(status.message().find("layer1.weight"), std::string::npos) << status.message();
  });
}

class FaultsOf : public OnShapes {};

TEST_P(FaultsOf, AKilledRankIsNamedOnAllOthers) {
  Cluster cluster(options());
  const Rank victim = cluster.size() - 1;
  std::vector<Outcome> outcomes(static_cast<size_t>(cluster.size()));
  std::atomic<int> left = cluster.size() - 1;
  cluster.run([&](Rank r) {
    Program p(cluster, r, 4);
    if (r == victim) {
      p.before = [&](int i) {
        p.leave = i == 2;
        if (!p.leave) return;
        cluster.kill(victim);
        while (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        // It is dead, and waits for nobody.
        paceline_comm_abort(cluster.comm(victim), "killed");
      };
    }
    outcomes[static_cast<size_t>(r)] = p.run();
    if (r != victim) --left;
  });
  for (Rank r = 0; r < victim; ++r) {
    const auto& o = outcomes[static_cast<size_t>(r)];
    EXPECT_EQ(o.status.code(), Code::kPeerLost) << o.status.message();
    EXPECT_NE(o.status.message().find(fmt::format("rank {} (host", victim)), std::string::npos)
        << o.status.message();
    EXPECT_EQ(o.later.code(), o.status.code());
    EXPECT_TRUE(o.stream_ended) << "rank " << r << "'s stream waits for ever";
    EXPECT_TRUE(o.correct);
  }
}

// The host sits in the driver, as under a full stream, and asks the path for nothing.
TEST_P(FaultsOf, AStreamThatWaitsIsLetGoThoughNobodyAsks) {
  auto o = options();
  o.machine.patience_s = 8;
  Cluster cluster(o);
  const Rank victim = cluster.size() - 1;
  std::atomic<int> left = cluster.size() - 1;
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made) << made.status().message();
    auto& path = **made;
    if (r == victim) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the others wait by then
      cluster.kill(victim);
      while (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      paceline_comm_abort(cluster.comm(victim), "killed");
      return;
    }
    Tensor tensor(cluster, r, kCount * 4);
    std::memset(tensor.as<void>(), 0, kCount * 4);
    AllReduce a;
    a.data = tensor.address();
    a.count = kCount;
    auto id = path.all_reduce(a);
    if (id && path.join(*id, nullptr)) {
      const auto error = cluster.machine().api().stream_synchronize(nullptr);
      EXPECT_TRUE(error == 0 || error == kGpuFailed) << error;
    }
    bool finite = true;
    EXPECT_EQ(path.wait_arrival(20, finite).code(), Code::kPeerLost);
    --left;
  });
}

TEST_P(FaultsOf, AnAbortReachesAllWithItsReason) {
  Cluster cluster(options());
  std::vector<Outcome> outcomes(static_cast<size_t>(cluster.size()));
  cluster.run([&](Rank r) {
    Program p(cluster, r, 4);
    p.before = [&](int i) {
      if (r == 1 && i == 2) p.path().abort("the watchdog said so");
    };
    outcomes[static_cast<size_t>(r)] = p.run();
  });
  for (Rank r = 0; r < cluster.size(); ++r) {
    const auto& o = outcomes[static_cast<size_t>(r)];
    EXPECT_EQ(o.status.code(), Code::kAborted) << o.status.message();
    EXPECT_NE(o.status.message().find("the watchdog said so"), std::string::npos)
        << o.status.message();
    EXPECT_TRUE(o.stream_ended) << "rank " << r << "'s stream waits for ever";
  }
}

TEST_P(FaultsOf, TheCommunicatorsAbortEndsThePath) {
  Cluster cluster(options());
  std::vector<Outcome> outcomes(static_cast<size_t>(cluster.size()));
  cluster.run([&](Rank r) {
    Program p(cluster, r, 4);
    p.before = [&](int i) {
      if (r == 0 && i == 1) paceline_comm_abort(cluster.comm(0), "as the test wished");
    };
    outcomes[static_cast<size_t>(r)] = p.run();
  });
  for (const auto& o : outcomes) {
    EXPECT_NE(o.status.message().find("as the test wished"), std::string::npos)
        << o.status.message();
    EXPECT_TRUE(o.stream_ended);
  }
}

TEST_P(FaultsOf, ALostGpuIsNoticedAndNamed) {
  Cluster cluster(options());
  std::vector<Outcome> outcomes(static_cast<size_t>(cluster.size()));
  cluster.run([&](Rank r) {
    Program p(cluster, r, 4);
    p.before = [&](int i) {
      if (r == 1 && i == 2) cluster.machine().lose(1, kGpuFailed);
    };
    outcomes[static_cast<size_t>(r)] = p.run();
  });
  for (Rank r = 0; r < cluster.size(); ++r) {
    const auto& o = outcomes[static_cast<size_t>(r)];
    EXPECT_FALSE(o.status.is_ok());
    EXPECT_NE(o.status.message().find("the GPU is lost"), std::string::npos) << o.status.message();
    EXPECT_TRUE(r == 1 || o.status.message().find("rank 1") != std::string::npos)
        << o.status.message();
    EXPECT_TRUE(o.stream_ended);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, FaultsOf,
                         testing::Values(ClusterShape{2, 1, 0}, ClusterShape{2, 2, 0},
                                         ClusterShape{2, 2, 1}, ClusterShape{3, 1, 0},
                                         ClusterShape{3, 2, 1}, ClusterShape{2, 1, 0, 2},
                                         ClusterShape{2, 2, 0, 3}, ClusterShape{3, 1, 0, 2}),
                         [](const auto& info) {
                           return fmt::format("{}x{}_{}queues_{}wires", info.param.nodes,
                                              info.param.local_size, info.param.queues,
                                              info.param.wires);
                         });

/// All ranks' outcomes of a run in which one call fails.
std::vector<Outcome> run_with_fault(const ClusterOptions& o,
                                    const std::function<void(Cluster&)>& fault,
                                    const std::function<void(Cluster&)>& after = {}) {
  Cluster cluster(o);
  fault(cluster);
  std::vector<Outcome> outcomes(static_cast<size_t>(cluster.size()));
  const Time start = SteadyClock().now();
  cluster.run([&](Rank r) { outcomes[static_cast<size_t>(r)] = Program(cluster, r, 2).run(); });
  EXPECT_LT(SteadyClock().now() - start, 8 * kSecond);
  if (after) after(cluster);
  return outcomes;
}

void expect_an_end(const std::vector<Outcome>& outcomes, const std::string& what, bool must_fail) {
  bool failed = false;
  bool created = true;
  for (const auto& o : outcomes) {
    EXPECT_TRUE(o.correct) << what << ": wrong values were reported as arrived";
    EXPECT_TRUE(o.stream_ended) << what << ": a stream waits for ever";
    EXPECT_NE(o.status.code(), Code::kTimeout) << what << ": " << o.status.message();
    EXPECT_TRUE(o.status.is_ok() || !o.status.message().empty()) << what;
    failed = failed || !o.status;
    created = created && o.created;
  }
  EXPECT_TRUE(failed || !must_fail) << what << " went unnoticed";
  // Who was not created at all leaves nobody behind.
  for (const auto& o : outcomes)
    EXPECT_TRUE(created || !o.status) << what << ": a rank goes on alone";
}

class FaultsOfCalls : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Launching, FaultsOfCalls, testing::Bool(),
                         [](const auto& info) { return info.param ? "ahead" : "later"; });

TEST_P(FaultsOfCalls, EveryCallOfTheDriverMayFail) {
  ClusterOptions o;
  o.ahead = GetParam();
  std::vector<std::pair<std::string, uint64_t>> calls;
  auto clean = run_with_fault(
      o, [](Cluster&) {},
      [&](Cluster& c) {
        for (const auto& f : c.machine().called()) calls.emplace_back(f, c.machine().calls(f, 0));
      });
  for (const auto& outcome : clean) ASSERT_TRUE(outcome.status.is_ok()) << outcome.status.message();
  // What only ends things, asks, restores the caller's context, or has another way may fail without a word.
  const std::vector<std::string> silent = {"stream_destroy",
                                           "event_destroy",
                                           "mem_free",
                                           "mem_free_host",
                                           "mem_host_register",
                                           "mem_host_unregister",
                                           "mem_host_get_device_pointer",
                                           "ctx_set_current",
                                           "ctx_get_current",
                                           "device_primary_ctx_release",
                                           "stream_synchronize",
                                           "stream_query",
                                           "module_get_function",
                                           "module_unload",
                                           "thread_exchange_stream_capture_mode"};
  for (const auto& [function, times] : calls) {
    if (times == 0 || function == "stream_synchronize") continue;
    std::vector<uint64_t> sites = {1, times / 2 + 1, times * 3 / 4 + 1, times};
    sites.erase(std::unique(sites.begin(), sites.end()), sites.end());
    for (auto nth : sites) {
      if (nth == 0 || nth > times) continue;
      const bool may_pass =
          std::find(silent.begin(), silent.end(), function) != silent.end() || nth > times - 2;
      bool called = false;  // what a join finds on its way is not the same every time
      auto outcomes = run_with_fault(
          o,
          [&, f = function](Cluster& c) {
            c.machine().fail(f, static_cast<int>(nth), kGpuFailed, 0);
          },
          [&, f = function](Cluster& c) { called = c.machine().calls(f, 0) >= nth; });
      expect_an_end(outcomes, fmt::format("{} call {} of {}", function, nth, times),
                    called && !may_pass);
    }
  }
}

TEST_P(FaultsOfCalls, EveryCopyInTheNodeMayFail) {
  ClusterOptions o;
  o.ahead = GetParam();
  o.local_size = 2;
  o.node_gather = "copies";
  for (const auto* function : {"ipc_get_mem_handle", "ipc_open_mem_handle", "memcpy_dtod_async"}) {
    uint64_t times = 0;
    auto clean = run_with_fault(
        o, [](Cluster&) {}, [&](Cluster& c) { times = c.machine().calls(function, 0); });
    for (const auto& outcome : clean)
      ASSERT_TRUE(outcome.status.is_ok()) << outcome.status.message();
    ASSERT_GT(times, 0U) << function;
    for (uint64_t nth = 1; nth <= times; ++nth) {
      auto outcomes = run_with_fault(
          o, [&](Cluster& c) { c.machine().fail(function, static_cast<int>(nth), kGpuFailed, 0); });
      const bool creates = std::string_view(function).starts_with("ipc_");
      expect_an_end(outcomes, fmt::format("{} call {} of {}", function, nth, times),
                    creates || nth + 2 <= times);
    }
  }
}

TEST_P(FaultsOfCalls, EveryCallOfNcclMayFail) {
  ClusterOptions o;
  o.ahead = GetParam();
  o.local_size = 2;
  o.node_gather = "nccl";
  std::vector<std::pair<std::string, uint64_t>> calls;
  run_with_fault(
      o, [](Cluster&) {},
      [&](Cluster& c) {
        for (const auto* f : {"get_unique_id", "comm_init_rank_config", "group_start", "group_end",
                              "reduce_scatter", "all_reduce", "all_gather", "broadcast"})
          calls.emplace_back(f, c.cliques().calls(f));
      });
  for (const auto& [function, times] : calls) {
    ASSERT_GT(times, 0U) << function;
    for (uint64_t nth : {uint64_t{1}, times / 2 + 1, times}) {
      auto outcomes = run_with_fault(
          o, [&, f = function](Cluster& c) { c.cliques().fail(f, static_cast<int>(nth), 1); });
      expect_an_end(outcomes, fmt::format("{} call {} of {}", function, nth, times), true);
    }
  }
}

TEST(Faults, TooLittleMemorySaysHowMuchOfWhat) {
  ClusterOptions o;
  o.machine.memory = 1 << 20;
  Cluster cluster(o);
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_FALSE(made.is_ok());
    EXPECT_EQ(made.status().code(), Code::kResourceExhausted);
    const auto text = made.status().message();
    EXPECT_NE(text.find("4.3 MiB of device memory for encodings"), std::string::npos) << text;
    EXPECT_NE(text.find("take a smaller batch"), std::string::npos) << text;
  });
}

/// What goes wrong on rank 1 is said there and, by its name, on rank 0.
void expect_of_rank_1(Cluster& cluster,
                      const std::function<Status(Path&, Rank, const Tensor&)>& body,
                      const std::string& what) {
  std::barrier all(cluster.size());
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    all.arrive_and_wait();  // whoever is not made yet would hear of the end while it is
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    const Tensor tensor(cluster, r,
                        4096);  // until the operation is over, which a thread may still launch
    auto status = body(**made, r, tensor);
    bool finite = false;
    if (status) status = (*made)->wait_arrival(10, finite);
    const auto text = status.message();
    EXPECT_NE(text.find(what), std::string::npos) << text;
    EXPECT_NE(text.find("take a smaller batch"), std::string::npos) << text;
    EXPECT_EQ(text.find("rank 1") != std::string::npos, r != 1) << text;
    (void)(*made)->destroy();
  });
}

Status reduce_small(Path& path, const Tensor& tensor, device::cuda::WireCodec codec) {
  AllReduce a;
  a.data = tensor.address();
  a.count = 1024;
  a.codec = static_cast<int>(codec);
  a.name = "bucket";
  return path.all_reduce(a).status();
}

TEST(Faults, TooLittleMemoryForResidualsSaysHowMuch) {
  Cluster cluster({.nodes = 2});
  expect_of_rank_1(
      cluster,
      [&](Path& path, Rank r, const Tensor& tensor) {
        PACELINE_RETURN_IF_ERROR(path.reserve(8U << 20, 8U << 20));
        if (r == 1) cluster.machine().fail("mem_alloc", 2, 2, 1);  // the first plane has come
        return reduce_small(path, tensor, device::cuda::WireCodec::kTopK);
      },
      "8.4 MiB of device memory for residuals of error feedback");
}

TEST(Faults, TooLittlePinnedMemorySaysHowMuch) {
  Cluster cluster({.nodes = 2});
  expect_of_rank_1(
      cluster,
      [&](Path& path, Rank r, const Tensor& tensor) {
        if (r == 1) {
          cluster.machine().fail("mem_host_register", 1, 2, 1);
          cluster.machine().fail("mem_host_alloc", 1, 2, 1);
        }
        PACELINE_RETURN_IF_ERROR(path.reserve(64U << 20, 64U << 20));
        return reduce_small(path, tensor, device::cuda::WireCodec::kExact);
      },
      "136.0 MiB of pinned host memory for encodings of one step");
}

TEST(Faults, AGpuThatIsLostWhileNothingIsSubmittedIsNoticed) {
  Cluster cluster({.nodes = 2});
  cluster.run([&](Rank r) {
    auto made = cluster.create(r);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    auto& path = **made;
    if (r == 1) cluster.machine().lose(1, kGpuFailed);
    Status status;
    for (int looks = 0; status && looks < 3000; ++looks) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      bool finite = false;
      status = path.wait_arrival(0, finite);
    }
    EXPECT_NE(status.message().find("the GPU is lost"), std::string::npos) << status.message();
    EXPECT_TRUE(r == 1 || status.message().find("rank 1") != std::string::npos) << status.message();
    (void)path.destroy();
  });
}

TEST(Faults, ItCanBeMadeAgainAfterTheEnd) {
  Cluster cluster({.nodes = 2, .local_size = 2});
  for (int round = 0; round < 2; ++round) {
    cluster.run([&](Rank r) {
      auto o = Program(cluster, r, 2).run();
      EXPECT_TRUE(o.status.is_ok()) << o.status.message();
    });
    for (Rank r = 0; r < cluster.size(); ++r) {
      auto counts = cluster.machine().counts(r);
      EXPECT_EQ(counts.memory, 0U);
      EXPECT_EQ(counts.pinned, 0U);
      EXPECT_EQ(counts.pending_waits, 0U);
    }
  }
  EXPECT_EQ(cluster.cliques().open(), 0);
}

}  // namespace
}  // namespace paceline::gpu
