// All-reduces by rows: what they add up, how much they send, when they go dense, and what happens when something fails.
#include <atomic>
#include <barrier>
#include <cmath>
#include <random>
#include <set>

#include "gpu/cluster.h"

namespace paceline::gpu {
namespace {

using device::cuda::WireCodec;

enum class Kind { kNone, kOne, kFew, kBorders, kHalf, kAll };

struct Case {
  int nodes, local_size;
  uint64_t rows, row_elements;
  Kind kind = Kind::kFew;
  WireCodec codec = WireCodec::kExact;
  DType dtype = DType::kFloat32;
  bool ahead = false;
  int lanes = 1, queues = 0, wires = default_wires(), delays_us = 0;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const auto& c = info.param;
  static constexpr const char* kKinds[] = {"none", "one", "few", "borders", "half", "all"};
  return fmt::format("{}x{}_{}x{}_{}_{}_{}_{}_{}lanes_{}queues_{}wires{}", c.nodes, c.local_size,
                     c.rows, c.row_elements, kKinds[static_cast<int>(c.kind)], codec_name(c.codec),
                     dtype_name(c.dtype), c.ahead ? "ahead" : "later", c.lanes, c.queues, c.wires,
                     c.delays_us > 0 ? "_delays" : "");
}

/// Which rows of a rank are not zero in a step.
std::set<uint64_t> rows_of(Kind kind, uint64_t rows, Rank rank, int step) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) * 977 + static_cast<uint64_t>(step) * 31 +
                         rows);
  std::set<uint64_t> chosen;
  switch (kind) {
    case Kind::kNone:
      break;
    case Kind::kOne:
      chosen = {random() % rows};
      break;
    case Kind::kFew:
      for (uint64_t i = 0; i < rows / 10 + 1; ++i) chosen.insert(random() % rows);
      break;
    case Kind::kBorders:  // of pieces and shards, and the ends
      for (uint64_t at : {uint64_t{0}, rows / 4, rows / 2, rows / 2 - 1, rows - 1})
        chosen.insert(std::min(at, rows - 1));
      for (uint64_t at = 0; at < rows; at += 61) chosen.insert(at);
      break;
    case Kind::kHalf:
      for (uint64_t i = 0; i < rows; ++i)
        if (random() % 2 == 0) chosen.insert(i);
      break;
    case Kind::kAll:
      for (uint64_t i = 0; i < rows; ++i) chosen.insert(i);
      break;
  }
  return chosen;
}

/// Normal numbers in those rows, zeros of either sign in the others.
std::vector<float> gradient(const Case& c, Rank rank, int step) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) * 7919 + static_cast<uint64_t>(step));
  std::normal_distribution<float> normal;
  std::vector<float> values(c.rows * c.row_elements, 0.0F);
  for (size_t i = 0; i < values.size(); i += 3) values[i] = -0.0F;
  for (const uint64_t row : rows_of(c.kind, c.rows, rank, step))
    for (uint64_t e = 0; e < c.row_elements; ++e) values[row * c.row_elements + e] = normal(random);
  return values;
}

ClusterOptions options_of(const Case& c) {
  ClusterOptions o;
  o.nodes = c.nodes;
  o.local_size = c.local_size;
  o.machine.hardware_queues = c.queues;
  o.machine.delays_us = c.delays_us;
  o.machine.seed = 7;
  o.wires = c.wires;
  if (c.queues == 0) o.ahead = c.ahead;
  return o;
}

/// A rank with its path.
struct Member {
  Cluster& cluster;
  Rank rank;
  Path& path;
  const Case& c;

  void put(const Tensor& to, const std::vector<float>& values) const {
    if (c.dtype == DType::kFloat32)
      std::memcpy(to.as<void>(), values.data(), values.size() * sizeof(float));
    else
      cpu::narrow(c.dtype, to.as<void>(), values.data(), 1, values.size());
  }
  std::vector<float> get(const Tensor& from) const {
    std::vector<float> values(c.rows * c.row_elements);
    if (c.dtype == DType::kFloat32)
      std::memcpy(values.data(), from.as<void>(), values.size() * sizeof(float));
    else
      cpu::widen(c.dtype, values.data(), from.as<void>(), 1, values.size());
    return values;
  }
  Result<uint64_t> submit(const Tensor& tensor, bool by_rows) const {
    AllReduce a;
    a.data = tensor.address();
    a.count = c.rows * c.row_elements;
    a.dtype = c.dtype;
    a.average = true;
    a.codec = static_cast<int>(c.codec);
    a.row_elements = by_rows ? c.row_elements : 0;
    a.name = by_rows ? "rows" : "dense";
    return path.all_reduce(a);
  }
  /// Joined before or after it has come: the way in is put on the streams ahead, or with the lengths known.
  Status finish(uint64_t id, bool& finite) const {
    bool before = true;
    if (id / 2 % 2 == 0) PACELINE_RETURN_IF_ERROR(path.wait_arrival(30, before));
    PACELINE_RETURN_IF_ERROR(path.join(id, nullptr));
    PACELINE_RETURN_IF_ERROR(path.wait_arrival(30, finite));
    finite = finite && before;
    return cluster.machine().api().stream_synchronize(nullptr) == 0
               ? Status::ok()
               : Status(Code::kUnavailable, "the stream has failed");
  }
};

class Rows : public testing::TestWithParam<Case> {};

TEST_P(Rows, AddUpAsTheDensePlanDoesOnAllRanks) {
  const Case c = GetParam();
  constexpr int kSteps = 3;
  Cluster cluster(options_of(c));
  const uint64_t count = c.rows * c.row_elements;
  const auto size = static_cast<size_t>(cluster.size());
  std::vector<std::vector<std::vector<float>>> sums(size);  // [ranks][steps]
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.lanes = c.lanes, .piece_bytes = 16 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    const Member m{cluster, r, **made, c};
    ASSERT_TRUE(m.path.reserve(2 * count * 4, count * 4).is_ok());
    const Tensor rows(cluster, r, count * 4), dense(cluster, r, count * 4);
    for (int step = 0; step < kSteps; ++step) {
      m.put(rows, gradient(c, r, step));
      m.put(dense, gradient(c, r, step));
      ASSERT_TRUE(m.submit(rows, true).is_ok());
      auto id = m.submit(dense, false);
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      bool finite = false;
      auto status = m.finish(*id, finite);
      ASSERT_TRUE(status.is_ok()) << status.message();
      EXPECT_TRUE(finite);
      const auto got = m.get(rows), want = m.get(dense);
      for (uint64_t i = 0; i < count; ++i) {
        // Two hops round a sum once more.
        const bool same = c.nodes == 2 || c.codec == WireCodec::kExact;
        const double step_of = c.codec == WireCodec::kBf16 ? 0.02 : 2e-3;
        if (same && c.dtype == DType::kFloat32)
          ASSERT_EQ(got[i], want[i]) << "element " << i << " of step " << step;
        else
          ASSERT_NEAR(got[i], want[i], step_of * std::max(1.0F, std::abs(want[i]))) << i;
      }
      sums[static_cast<size_t>(r)].push_back(got);
    }
    const auto s = m.path.statistics();
    EXPECT_LE(s.rows_sent, s.rows_bound);
    EXPECT_TRUE(m.path.destroy().is_ok());
  });
  for (size_t r = 0; r < size; ++r) {
    ASSERT_EQ(sums[r].size(), size_t{kSteps});
    for (int step = 0; step < kSteps; ++step)
      EXPECT_EQ(0, std::memcmp(sums[r][step].data(), sums[0][step].data(), count * sizeof(float)))
          << "rank " << r << ", step " << step;
  }
  // Against float64.
  const double bound = c.codec == WireCodec::kBf16 || c.dtype == DType::kBFloat16  ? 0.03
                       : c.codec == WireCodec::kFp16 || c.dtype == DType::kFloat16 ? 4e-3
                                                                                   : 1e-5;
  std::vector<double> want(count);
  for (Rank r = 0; r < cluster.size(); ++r) {
    const auto mine = gradient(c, r, 0);
    for (uint64_t i = 0; i < count; ++i) want[i] += mine[i] / static_cast<double>(size);
  }
  for (uint64_t i = 0; i < count; ++i) ASSERT_NEAR(sums[0][0][i], want[i], bound) << i;
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Rows,
    testing::Values(Case{2, 1, 1000, 64}, Case{2, 1, 1000, 64, Kind::kNone},
                    Case{2, 1, 1000, 64, Kind::kOne}, Case{2, 1, 999, 64, Kind::kBorders},
                    Case{2, 1, 1000, 64, Kind::kAll}, Case{2, 2, 1001, 33},
                    Case{2, 2, 1001, 7, Kind::kBorders}, Case{2, 2, 501, 64, Kind::kHalf},
                    Case{2, 2, 3, 64, Kind::kAll}, Case{2, 2, 1, 5, Kind::kOne},
                    Case{3, 1, 1000, 48}, Case{3, 1, 1000, 48, Kind::kHalf},
                    Case{3, 2, 501, 40, Kind::kBorders}, Case{3, 2, 700, 1, Kind::kFew},
                    Case{2, 3, 301, 20, Kind::kAll}),
    name_of);
INSTANTIATE_TEST_SUITE_P(
    Codecs, Rows,
    testing::Values(Case{2, 1, 1000, 64, Kind::kFew, WireCodec::kFp16},
                    Case{2, 2, 501, 33, Kind::kHalf, WireCodec::kBf16},
                    Case{3, 1, 600, 64, Kind::kFew, WireCodec::kFp16},
                    Case{2, 1, 1000, 64, Kind::kFew, WireCodec::kExact, DType::kFloat16},
                    Case{2, 2, 501, 36, Kind::kFew, WireCodec::kFp16, DType::kBFloat16},
                    Case{2, 1, 501, 36, Kind::kBorders, WireCodec::kExact, DType::kBFloat16}),
    name_of);
INSTANTIATE_TEST_SUITE_P(
    Ways, Rows,
    testing::Values(
        Case{2, 1, 1000, 64, Kind::kFew, WireCodec::kExact, DType::kFloat32, true},
        Case{2, 2, 1000, 64, Kind::kHalf, WireCodec::kFp16, DType::kFloat32, true, 4},
        Case{3, 2, 501, 64, Kind::kFew, WireCodec::kExact, DType::kFloat32, true},
        Case{2, 2, 1000, 64, Kind::kBorders, WireCodec::kExact, DType::kFloat32, true, 1, 1},
        Case{2, 1, 1000, 64, Kind::kFew, WireCodec::kExact, DType::kFloat32, false, 4, 0, 3},
        Case{3, 1, 1000, 64, Kind::kHalf, WireCodec::kExact, DType::kFloat32, false, 4, 0, 2, 300}),
    name_of);

/// Runs `body` on every rank with a path of small pieces.
void on_all(const Case& c, const std::function<void(const Member&, const Tensor&)>& body) {
  Cluster cluster(options_of(c));
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 16 * 1024});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    const uint64_t bytes = c.rows * c.row_elements * 4;
    ASSERT_TRUE((*made)->reserve(bytes, bytes).is_ok());
    const Tensor tensor(cluster, r, bytes);
    body({cluster, r, **made, c}, tensor);
    auto end = (*made)->destroy();
    (void)end;  // after a fault it fails
  });
}

TEST(RowsSent, AreThoseThatAreNotZero) {
  constexpr int kSteps = 4;
  for (const int local_size : {1, 2}) {
    const Case c{3, local_size, 2000, 64};
    const std::vector<uint64_t> border = {0, local_size == 1 ? c.rows : c.rows / 2, c.rows};
    on_all(c, [&](const Member& m, const Tensor& tensor) {
      const auto before = m.path.statistics();
      uint64_t rows = 0;
      for (int step = 0; step < kSteps; ++step) {
        m.put(tensor, gradient(c, m.rank, step));
        auto id = m.submit(tensor, true);
        ASSERT_TRUE(id.is_ok());
        bool finite = false;
        ASSERT_TRUE(m.finish(*id, finite).is_ok());
        // The node's, in this rank's shard.
        std::set<uint64_t> node;
        const Rank first = m.rank / local_size * local_size;
        for (Rank r = first; r < first + local_size; ++r)
          node.merge(rows_of(c.kind, c.rows, r, step));
        const auto local = static_cast<size_t>(m.rank % local_size);
        for (const auto row : node) rows += row >= border[local] && row < border[local + 1] ? 1 : 0;
      }
      const auto s = m.path.statistics();
      EXPECT_EQ(s.rows_sent, rows);
      EXPECT_EQ(s.rows_bound, kSteps * (border[1] - border[0]));
      const double payload = static_cast<double>(s.wire_bytes - before.wire_bytes);
      EXPECT_NEAR(payload, static_cast<double>(2 * rows * (64 * 4 + 4)), payload / 50);
      EXPECT_LT(payload, kSteps * 2000.0 / local_size * 64 * 4 * 4 / 3 / 2);  // half of dense
    });
  }
}

TEST(RowsSent, WhereTheyCostMoreTheNextOnesGoDenseAndAreTriedAgain) {
  constexpr int kSteps = 66;
  const Case c{4, 1, 300, 16, Kind::kAll};
  const auto dense = [&] {
    PathRequest q;
    q.shape = {4, 1, 0, 0};
    q.count = c.rows * c.row_elements;
    q.piece_bytes = 16 * 1024;
    return build_path(q)->wire_bytes;
  }();
  on_all(c, [&](const Member& m, const Tensor& tensor) {
    uint64_t went = 0, was = 0;
    for (int step = 0; step < kSteps; ++step) {
      // Rank 2 alone has many.
      const Case few{4, 1, 300, 16, Kind::kOne};
      const auto given = gradient(m.rank == 2 ? c : few, m.rank, step);
      m.put(tensor, given);
      auto id = m.submit(tensor, true);
      ASSERT_TRUE(id.is_ok());
      bool finite = false;
      ASSERT_TRUE(m.finish(*id, finite).is_ok());
      const auto s = m.path.statistics();
      const bool by_rows = s.rows_bound > was;
      was = s.rows_bound;
      went += by_rows ? 1 : 0;
      EXPECT_EQ(by_rows, step == 0 || step == 65) << step;
    }
    EXPECT_EQ(went, 2U);
    EXPECT_GT(dense, 0U);
  });
}

TEST(RowsSent, MoreThanThePinnedMemoryHoldsAreCutAtRows) {
  const Case c{2, 2, 3001, 33};
  Cluster cluster(options_of(c));
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 4096, .least_host_bytes = 64 << 10});
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    const Member m{cluster, r, **made, c};
    const uint64_t bytes = c.rows * c.row_elements * 4;
    const Tensor rows(cluster, r, bytes), dense(cluster, r, bytes);
    for (int step = 0; step < 2; ++step) {
      m.put(rows, gradient(c, r, step));
      m.put(dense, gradient(c, r, step));
      ASSERT_TRUE(m.submit(rows, true).is_ok());
      auto id = m.submit(dense, false);
      ASSERT_TRUE(id.is_ok());
      bool finite = false;
      ASSERT_TRUE(m.finish(*id, finite).is_ok());
      EXPECT_GT(m.path.statistics().operations, 2U);
      EXPECT_EQ(m.get(rows), m.get(dense));
    }
    EXPECT_GT(m.path.statistics().rows_sent, 0U);
    EXPECT_TRUE(m.path.destroy().is_ok());
  });
}

TEST(RowsRefused, BadArgumentsAreNamed) {
  const Case c{2, 1, 100, 64};
  on_all(c, [&](const Member& m, const Tensor& tensor) {
    AllReduce a;
    a.data = tensor.address();
    a.count = 6400;
    a.row_elements = 63;
    a.name = "embedding";
    auto status = m.path.all_reduce(a).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("'embedding': 6400 elements are not whole rows of 63"),
              std::string::npos)
        << status.message();
    a.row_elements = 64;
    for (const int codec : {3, 4}) {
      a.codec = codec;
      status = m.path.all_reduce(a).status();
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_NE(status.message().find("keeps residuals"), std::string::npos) << status.message();
    }
    // Nothing is broken by it; rows too long for a piece go dense.
    a.codec = 0;
    a.row_elements = 6400;
    std::fill_n(tensor.as<float>(), 6400, 1.0F + static_cast<float>(m.rank));
    auto id = m.path.all_reduce(a);
    ASSERT_TRUE(id.is_ok()) << id.status().message();
    bool finite = false;
    ASSERT_TRUE(m.finish(*id, finite).is_ok());
    EXPECT_EQ(tensor.as<float>()[77], 3.0F);
    EXPECT_EQ(m.path.statistics().rows_bound, 0U);
  });
}

TEST(RowsFaults, InfAndNanTravelAndAreReportedOnAllRanks) {
  const Case c{2, 2, 500, 64};
  on_all(c, [&](const Member& m, const Tensor& tensor) {
    for (int step = 0; step < 3; ++step) {
      auto values = gradient(c, m.rank, step);
      if (m.rank == 3 && step == 1) values[77] = INFINITY;
      m.put(tensor, values);
      auto id = m.submit(tensor, true);
      ASSERT_TRUE(id.is_ok());
      bool finite = false;
      ASSERT_TRUE(m.finish(*id, finite).is_ok());
      EXPECT_EQ(finite, step != 1);
      EXPECT_EQ(std::isfinite(tensor.as<float>()[77]), step != 1);
      EXPECT_TRUE(std::isfinite(tensor.as<float>()[78]));
    }
    EXPECT_GT(m.path.statistics().rows_sent, 0U);
  });
}

TEST(RowsFaults, RanksThatDisagreeAreTold) {
  const Case c{2, 1, 500, 64};
  on_all(c, [&](const Member& m, const Tensor& tensor) {
    m.put(tensor, gradient(c, m.rank, 0));
    Status status;
    auto id = m.submit(tensor, m.rank == 0);
    bool finite = false;
    status = id ? m.finish(*id, finite) : id.status();
    EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
  });
}

TEST(RowsFaults, AnImpossibleCountIsNamed) {
  for (const bool ahead : {false, true}) {
    Case c{2, 1, 500, 64};
    c.ahead = ahead;
    Cluster cluster(options_of(c));
    cluster.machine().add_kernel(
        "paceline_rows_list", {{sizeof(device::cuda::RowsEncode)}, [](const auto&, void* const* a) {
                                 device::cuda::RowsEncode rows;
                                 std::memcpy(&rows, a[0], sizeof rows);
                                 void* encoded = nullptr;
                                 std::memcpy(&encoded, &rows.encoded, sizeof encoded);
                                 std::memset(encoded, 0xFF, 16);
                               }});
    cluster.machine().add_kernel(
        "paceline_rows_encode_f32_f32",
        {{sizeof(device::cuda::RowsEncode)}, [](const auto&, void* const*) {}});
    std::barrier created(cluster.size());
    cluster.run([&](Rank r) {
      auto made = cluster.create(r, {.piece_bytes = 16 * 1024});
      created.arrive_and_wait();
      ASSERT_TRUE(made.is_ok()) << made.status().message();
      const Member m{cluster, r, **made, c};
      const Tensor tensor(cluster, r, c.rows * c.row_elements * 4);
      m.put(tensor, gradient(c, r, 0));
      auto id = m.submit(tensor, true);
      bool finite = false;
      auto status = id ? m.finish(*id, finite) : id.status();
      EXPECT_FALSE(status.is_ok());
      EXPECT_NE(status.message().find("4294967295 of"), std::string::npos) << status.message();
      EXPECT_FALSE((*made)->destroy().is_ok());
    });
  }
}

/// Steps until something fails; false where a stream or a value went wrong.
Status train(const Member& m, const Tensor& tensor, int steps, bool& right) {
  for (int step = 0; step < steps; ++step) {
    m.put(tensor, gradient(m.c, m.rank, step));
    PACELINE_ASSIGN(auto id, m.submit(tensor, true));
    bool finite = false;
    PACELINE_RETURN_IF_ERROR(m.finish(id, finite));
    bool again = false;
    PACELINE_RETURN_IF_ERROR(m.path.wait_arrival(30, again));
    double want = 0;
    const uint64_t at = 5 * m.c.row_elements + 3;
    for (Rank r = 0; r < m.cluster.size(); ++r) want += gradient(m.c, r, step)[at];
    right = right && std::abs(tensor.as<float>()[at] - want / m.cluster.size()) < 1e-5;
  }
  return Status::ok();
}

TEST(RowsFaults, EveryCallOfTheDriverMayFail) {
  constexpr int kGpuFailed = 719;
  for (const bool ahead : {false, true}) {
    Case c{2, 1, 400, 64, Kind::kHalf};
    c.ahead = ahead;
    const std::vector<std::string> functions = {"memcpy_dtoh_async", "memcpy_htod_async",
                                                "stream_wait_event", "stream_write_value32",
                                                "event_record",      "launch_kernel"};
    const auto run = [&](int steps, const std::function<void(Cluster&)>& before) {
      Cluster cluster(options_of(c));
      before(cluster);
      std::vector<uint64_t> calls;
      calls.reserve(functions.size());
      std::atomic<bool> failed = false;
      cluster.run([&](Rank r) {
        auto made = cluster.create(r, {.piece_bytes = 16 * 1024});
        if (!made) {
          failed = true;
          return;
        }
        bool right = true;
        {
          const Tensor tensor(cluster, r, c.rows * c.row_elements * 4);
          auto status = train({cluster, r, **made, c}, tensor, steps, right);
          if (!status) failed = true;
          EXPECT_NE(status.code(), Code::kTimeout) << status.message();
        }
        EXPECT_TRUE(right);
        auto end = (*made)->destroy();
        if (!end) failed = true;
      });
      for (const auto& f : functions) calls.push_back(cluster.machine().calls(f, 0));
      return std::pair{calls, failed.load()};
    };
    const auto created = run(0, [](Cluster&) {}).first;
    const auto all = run(2, [](Cluster&) {}).first;
    for (size_t i = 0; i < functions.size(); ++i) {
      ASSERT_GT(all[i], created[i] + 2) << functions[i];
      const uint64_t own = all[i] - created[i];
      for (const uint64_t nth : {uint64_t{1}, own / 3 + 1, own * 2 / 3}) {
        const auto start = SteadyClock().now();
        const auto [calls, failed] = run(2, [&](Cluster& cluster) {
          cluster.machine().fail(functions[i], static_cast<int>(created[i] + nth), kGpuFailed, 0);
        });
        // What a join finds on its way is not the same every time: a run may have fewer calls.
        EXPECT_TRUE(failed || calls[i] < created[i] + nth)
            << functions[i] << " call " << nth << " of " << own;
        EXPECT_LT(SteadyClock().now() - start, 8 * kSecond);
      }
    }
  }
}

TEST(RowsFaults, ALostRankEndsTheOthers) {
  const Case c{3, 1, 400, 64};
  Cluster cluster(options_of(c));
  cluster.run([&](Rank r) {
    auto made = cluster.create(r, {.piece_bytes = 16 * 1024});
    ASSERT_TRUE(made.is_ok());
    const Tensor tensor(cluster, r, c.rows * c.row_elements * 4);
    bool right = true;
    const Member m{cluster, r, **made, c};
    auto status = train(m, tensor, r == 1 ? 2 : 1000, right);
    if (r == 1) cluster.kill(1);
    EXPECT_TRUE(right);
    EXPECT_EQ(status.is_ok(), r == 1) << status.message();
    auto end = (*made)->destroy();
    (void)end;
  });
}

}  // namespace
}  // namespace paceline::gpu
