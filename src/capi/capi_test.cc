// The C ABI as a framework uses it: real processes, real wires.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "capi/processes.h"

namespace paceline::capi {
namespace {

std::vector<float> values(int rank, size_t n, unsigned seed) {
  std::mt19937 random(seed * 1000 + static_cast<unsigned>(rank));
  std::vector<float> out(n);
  for (auto& v : out) v = static_cast<float>(static_cast<int>(random() % 2001) - 1000);
  return out;
}

// Threads that keep every core busy, for as long as this lives.
class BusyCores {
 public:
  BusyCores() {
    for (int i = 0; i < machine_cores(); ++i)
      threads_.emplace_back([this] {
        while (!stop_.load(std::memory_order_relaxed)) {
        }
      });
  }
  ~BusyCores() {
    stop_ = true;
    for (auto& t : threads_) t.join();
  }
  BusyCores(const BusyCores&) = delete;
  BusyCores& operator=(const BusyCores&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

int gives_way(int rank, int size, FileStore& store) {
  auto* comm = create(rank, size, store);
  MUST(comm != nullptr);
  std::vector<float> data(300000, 1.0F);
  auto a = op_args(0, 0, data.data(), data.data(), data.size());
  paceline_op op = 0;
  if (rank == 0) {
    const BusyCores busy;
    MUST(paceline_submit(comm, &a, &op) == PACELINE_OK);
    MUST(paceline_give_way(comm, op, 0.001) == 0);  // the other waits for the file
    std::ofstream(store.directory() + "/go") << "1";
    MUST(paceline_give_way(comm, op, 60) == 1);
  } else {
    while (!std::ifstream(store.directory() + "/go"))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    MUST(paceline_submit(comm, &a, &op) == PACELINE_OK);
  }
  MUST(paceline_wait(comm, op, -1, nullptr) == PACELINE_OK);
  MUST(data == std::vector<float>(data.size(), static_cast<float>(size)));
  MUST(paceline_give_way(comm, op, 60) == 1);  // it was released
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

int collectives(int rank, int size, FileStore& store) {
  auto* comm = create(rank, size, store);
  MUST(comm != nullptr);
  paceline_identity id{};
  id.struct_size = sizeof id;
  MUST(paceline_comm_identity(comm, &id) == PACELINE_OK);
  MUST(id.rank == rank && id.size == size && id.local_size == size && id.node_count == 1);
  MUST(std::strstr(paceline_comm_describe(comm), "ranks on 1 node") != nullptr);
  for (size_t n : {1UL, 1000UL, 300000UL}) {
    // Summed up by run, awaited by wait, and by wait_any.
    std::vector<float> expected(n);
    for (int r = 0; r < size; ++r) {
      auto v = values(r, n, 1);
      for (size_t i = 0; i < n; ++i) expected[i] += v[i];
    }
    for (int way = 0; way < 3; ++way) {
      auto data = values(rank, n, 1);
      auto a = op_args(0, 0, data.data(), data.data(), n);
      paceline_result result{};
      result.struct_size = sizeof result;
      paceline_op op = 0;
      if (way == 0) {
        MUST(paceline_run(comm, &a, &result) == PACELINE_OK);
      } else {
        MUST(paceline_submit(comm, &a, &op) == PACELINE_OK && op != 0);
        if (way == 1) {
          MUST(paceline_wait(comm, op, -1, &result) == PACELINE_OK);
          MUST(paceline_wait(comm, op, -1, &result) == PACELINE_INVALID_ARGUMENT);
        } else {
          MUST(paceline_watch(comm, op) == PACELINE_OK);
          MUST(paceline_wait_any(comm, 30, &result, 1) == 1);
        }
        MUST(result.op == op);
      }
      MUST(result.code == PACELINE_OK && result.finite == 1);
      MUST(data == expected);
    }
    std::vector<float> all(n * static_cast<size_t>(size));
    auto mine = values(rank, n, 2);
    auto a = op_args(2, 0, mine.data(), all.data(), n);
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
    for (int r = 0; r < size; ++r) {
      auto v = values(r, n, 2);
      MUST(std::memcmp(v.data(), all.data() + n * static_cast<size_t>(r), n * sizeof(float)) == 0);
    }
    a = op_args(1, 0, mine.data(), mine.data(), n);
    a.root = size - 1;
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
    MUST(mine == values(size - 1, n, 2));
  }
  auto barrier = op_args(5, 0, nullptr, nullptr, 0);
  MUST(paceline_run(comm, &barrier, nullptr) == PACELINE_OK);
  // A group of the even ranks, and messages round the ring.
  std::vector<int32_t> even;
  for (int r = 0; r < size; r += 2) even.push_back(r);
  if (rank % 2 == 0) {
    uint32_t group = 0;
    MUST(paceline_group_create(comm, even.data(), even.size(), &group) == PACELINE_OK);
    int64_t one = 1;
    auto a = op_args(0, 7, &one, &one, 1);
    a.group = group;
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
    MUST(one == static_cast<int64_t>(even.size()));
    MUST(paceline_group_destroy(comm, group) == PACELINE_OK);
  }
  std::vector<char> out(70000, static_cast<char>('a' + rank));
  std::vector<char> in(70000);
  paceline_transfer_args t{};
  t.struct_size = sizeof t;
  t.bytes = out.size();
  paceline_op ops[2];
  t.peer = (rank + 1) % size;
  t.data = out.data();
  MUST(paceline_send(comm, &t, &ops[0]) == PACELINE_OK);
  t.peer = (rank + size - 1) % size;
  t.data = in.data();
  MUST(paceline_receive(comm, &t, &ops[1]) == PACELINE_OK);
  for (auto op : ops) MUST(paceline_wait(comm, op, -1, nullptr) == PACELINE_OK);
  MUST(in == std::vector<char>(70000, static_cast<char>('a' + (rank + size - 1) % size)));
  // Messages whose length the sender says: none, short, long.
  for (const size_t bytes : {size_t{0}, size_t{17}, size_t{69999}, size_t{70000}}) {
    std::fill(in.begin(), in.end(), '-');
    t.any_length = 1;
    t.data = in.data();
    t.bytes = in.size();
    MUST(paceline_receive(comm, &t, &ops[1]) == PACELINE_OK);
    t.peer = (rank + 1) % size;
    t.data = out.data();
    t.bytes = bytes;
    MUST(paceline_send(comm, &t, &ops[0]) == PACELINE_OK);
    t.peer = (rank + size - 1) % size;
    for (auto op : ops) MUST(paceline_wait(comm, op, -1, nullptr) == PACELINE_OK);
    const std::string want = std::string(bytes, static_cast<char>('a' + (rank + size - 1) % size)) +
                             std::string(in.size() - bytes, '-');
    MUST(std::string(in.begin(), in.end()) == want);
  }
  paceline_stats stats{};
  stats.struct_size = sizeof stats;
  MUST(paceline_comm_stats(comm, &stats) == PACELINE_OK);
  MUST(stats.operations > 10 && stats.plans_reused > 0 && stats.payload_sent > 0);
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

TEST(Capi, CollectivesAmongProcesses) {
  for (const char* wire : {"tcp", "auto"}) {
    setenv("PACELINE_WIRE", wire, 1);
    for (int size : {2, 4}) {
      Processes ranks(size,
                      [&](int rank, FileStore& store) { return collectives(rank, size, store); });
      for (int r = 0; r < size; ++r)
        EXPECT_EQ(ranks.wait(r), 0) << "rank " << r << " of " << size << ", " << wire;
    }
    unsetenv("PACELINE_WIRE");
  }
}

TEST(Capi, ARankThatIsAheadGivesItsCoreAwayUntilItsNeighbourIsThere) {
  Processes ranks(2, [](int rank, FileStore& store) { return gives_way(rank, 2, store); });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0) << "rank " << r;
}

TEST(Capi, ThreadsSubmitAndWaitAtOnceOnGroupsOfTheirOwn) {
  constexpr int kThreads = 4;
  Processes ranks(2, [&](int rank, FileStore& store) {
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    const int32_t both[] = {0, 1};
    uint32_t groups[kThreads];
    for (auto& g : groups) MUST(paceline_group_create(comm, both, 2, &g) == PACELINE_OK);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int k = 0; k < 60; ++k) {
          std::vector<int32_t> data(static_cast<size_t>(1 + k * k * 10), t + k);
          auto a = op_args(0, 6, data.data(), data.data(), data.size());
          a.group = groups[t];
          paceline_op op = 0;
          paceline_code code;
          if ((k + t) % 2 == 0) {
            code = paceline_run(comm, &a, nullptr);
          } else {
            code = paceline_submit(comm, &a, &op);
            if (code == PACELINE_OK) code = paceline_wait(comm, op, -1, nullptr);
          }
          if (code != PACELINE_OK || data != std::vector<int32_t>(data.size(), 2 * (t + k)))
            ++wrong;
        }
      });
    }
    for (auto& t : threads) t.join();
    MUST(wrong == 0);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

// It turns off what works without being called: who makes a communicator wants one.
TEST(Capi, ACommunicatorIsMadeWhereThePythonPackageIsOff) {
  setenv("PACELINE_DISABLE", "1", 1);
  Processes ranks(2, [](int rank, FileStore& store) {
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    int32_t x = 1 + rank;
    auto a = op_args(0, 6, &x, &x, 1);
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
    MUST(x == 3);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  unsetenv("PACELINE_DISABLE");
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

TEST(Capi, MadeAgainInOneProcess) {
  Processes ranks(2, [](int rank, FileStore& store) {
    for (int round = 0; round < 3; ++round) {
      auto* comm = create(rank, 2, store);
      MUST(comm != nullptr);
      int32_t x = rank + round;
      auto a = op_args(0, 6, &x, &x, 1);
      MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
      MUST(x == 1 + 2 * round);
      MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    }
    return 0;
  });
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

TEST(Capi, AHandleOfTheParentIsRefusedAfterFork) {
  Processes ranks(2, [](int rank, FileStore& store) {
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    pid_t child = fork();
    if (child == 0) {
      int32_t x = 1;
      auto a = op_args(0, 6, &x, &x, 1);
      bool refused = paceline_run(comm, &a, nullptr) == PACELINE_UNSUPPORTED &&
                     std::strstr(paceline_error(comm), "fork") != nullptr &&
                     paceline_comm_destroy(comm) == PACELINE_UNSUPPORTED;
      _exit(refused ? 0 : 1);
    }
    int status = 1;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    int32_t x = 1;
    auto a = op_args(0, 6, &x, &x, 1);
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK && x == 2);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

// What is left in sockets at the end comes to a channel whose engine and runner are gone.
TEST(Capi, AnEndAmidLongMessages) {
  setenv("PACELINE_WIRE", "tcp", 1);
  Processes ranks(2, [](int rank, FileStore& store) {
    for (int round = 0; round < 4; ++round) {
      auto* comm = create(rank, 2, store);
      MUST(comm != nullptr);
      std::vector<float> data(4U << 20, 1.0F);
      std::vector<paceline_op> ops(3);
      for (auto& op : ops) {
        auto a = op_args(0, 0, data.data(), data.data(), data.size());
        if (paceline_submit(comm, &a, &op) != PACELINE_OK) break;  // the other's abort was faster
      }
      if (rank == round % 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2 + 2 * round));
        MUST(paceline_comm_abort(comm, "a test") == PACELINE_OK);
      }
      for (const auto op : ops) paceline_wait(comm, op, -1, nullptr);
      paceline_comm_destroy(comm);  // with that failure, or just ended
    }
    return 0;
  });
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
  unsetenv("PACELINE_WIRE");
}

// A struct that was used for another collective before, say.
TEST(Capi, CountsThatACollectiveDoesNotTakeAreNotLookedAt) {
  Processes ranks(2, [](int rank, FileStore& store) {
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    const auto* nowhere = reinterpret_cast<const uint64_t*>(uintptr_t{8});
    const uint64_t stale[] = {7, static_cast<uint64_t>(rank)};
    for (const int collective : {0, 1, 5, 6}) {
      for (const auto* counts : {nowhere, stale}) {
        int32_t x = 1;
        auto a = op_args(collective, 6, &x, &x, 1);
        a.send_counts = counts;
        MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
        a.receive_counts = counts;
        a.counts = counts;
        MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
      }
    }
    int32_t all[2] = {};
    int32_t mine = 10 + rank;
    auto a = op_args(2, 6, &mine, all, 1);
    a.send_counts = a.receive_counts = nowhere;
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
    MUST(all[0] == 10 && all[1] == 11);
    // What all ranks must have alike is still compared.
    std::vector<int32_t> data(20);
    a = op_args(0, 6, data.data(), data.data(), 10 + static_cast<uint64_t>(rank));
    a.counts = stale;
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_MISMATCH);
    MUST(std::strstr(paceline_error(comm), "int32 [11]") != nullptr);
    paceline_comm_destroy(comm);
    return 0;
  });
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

TEST(Capi, BadArgumentsAreNamed) {
  paceline_comm* comm = nullptr;
  EXPECT_EQ(paceline_comm_create(nullptr, &comm), PACELINE_INVALID_ARGUMENT);
  paceline_comm_options o{};
  o.struct_size = sizeof o;
  o.rank = 3;
  o.size = 2;
  EXPECT_EQ(paceline_comm_create(&o, &comm), PACELINE_INVALID_ARGUMENT);
  EXPECT_STREQ(paceline_error(nullptr), "rank 3 is outside of a job of 2 (0 to 1)");
  o.rank = 0;
  o.size = 1;
  const int32_t nobody = -7;
  o.job_rank = &nobody;
  EXPECT_EQ(paceline_comm_create(&o, &comm), PACELINE_INVALID_ARGUMENT);
  EXPECT_STREQ(paceline_error(nullptr), "job_rank points to -7; it must be 0 or more, or NULL");
  o.job_rank = nullptr;
  for (double* seconds : {&o.timeout_s, &o.operation_timeout_s}) {
    *seconds = -2;
    EXPECT_EQ(paceline_comm_create(&o, &comm), PACELINE_INVALID_ARGUMENT);
    EXPECT_STREQ(paceline_error(nullptr),
                 seconds == &o.timeout_s ? "timeout_s is -2; it must be positive, or 0"
                                         : "operation_timeout_s is -2; it must be positive, or 0");
    *seconds = 0;
  }
  o.face = "horse";
  EXPECT_EQ(paceline_comm_create(&o, &comm), PACELINE_INVALID_ARGUMENT);
  EXPECT_EQ(paceline_run(nullptr, nullptr, nullptr), PACELINE_INVALID_ARGUMENT);
  char text[64];
  EXPECT_GT(paceline_setting("", "topk_ratio", text, sizeof text), 0U);
  EXPECT_STREQ(text, "0.01");
  EXPECT_EQ(paceline_setting("", "no_such", text, sizeof text), 0U);
}

TEST(Capi, AHandleKeepsItsSentenceWhateverAThreadDoesWithOthers) {
  Processes alone(1, [](int rank, FileStore& store) {
    auto* one = create(rank, 1, store);
    auto* other = create(rank, 1, store);
    MUST(one != nullptr && other != nullptr);
    float x = 1;
    auto wrong = op_args(0, 0, &x, &x, 1);
    wrong.codec = 17;
    MUST(paceline_run(one, &wrong, nullptr) == PACELINE_INVALID_ARGUMENT);
    MUST(paceline_trim(other) == PACELINE_OK);
    MUST(std::strstr(paceline_error(one), "codec 17") != nullptr);
    MUST(std::string(paceline_error(other)).empty() &&
         std::string(paceline_error(nullptr)).empty());
    MUST(paceline_group_create(other, nullptr, 1, nullptr) == PACELINE_INVALID_ARGUMENT);
    MUST(std::strstr(paceline_error(one), "codec 17") != nullptr);
    for (auto* asked : {other, static_cast<paceline_comm*>(nullptr)})
      MUST(std::strstr(paceline_error(asked), "ranks or group is null") != nullptr);
    bool heard = true;
    std::thread([&] { heard = *paceline_error(one) != '\0'; }).join();
    MUST(!heard);
    MUST(paceline_trim(one) == PACELINE_OK);
    MUST(std::string(paceline_error(one)).empty() && !std::string(paceline_error(other)).empty());
    const auto* gone = other;
    MUST(paceline_comm_destroy(other) == PACELINE_OK && paceline_comm_destroy(one) == PACELINE_OK);
    MUST(std::string(paceline_error(gone)).empty());
    return 0;
  });
  EXPECT_EQ(alone.wait(0), 0);
}

TEST(Capi, ACodecThatDoesNotExistIsCalledByItsNumber) {
  Processes alone(1, [](int rank, FileStore& store) {
    auto* comm = create(rank, 1, store);
    MUST(comm != nullptr);
    float x = 1;
    auto a = op_args(0, 0, &x, &x, 1);
    for (const int32_t codec : {-2, 4, 256, INT32_MAX, INT32_MIN}) {
      a.codec = codec;
      MUST(paceline_run(comm, &a, nullptr) == PACELINE_INVALID_ARGUMENT);
      MUST(std::string(paceline_error(comm)).find("codec " + std::to_string(codec)) !=
           std::string::npos);
    }
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  EXPECT_EQ(alone.wait(0), 0);
}

TEST(Capi, ATimeoutThatIsNoneIsRefused) {
  Processes ranks(2, [](int rank, FileStore& store) {
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    float x = 1;
    paceline_transfer_args t{};
    t.struct_size = sizeof t;
    t.peer = 1 - rank;
    t.data = &x;
    t.bytes = sizeof x;
    auto a = op_args(0, 0, &x, &x, 1);
    for (const double wrong : {-1.0, std::nan("")}) {
      t.timeout_s = a.timeout_s = wrong;
      paceline_op op = 7;
      MUST(paceline_submit(comm, &a, &op) == PACELINE_INVALID_ARGUMENT && op == 0);
      for (auto* transfer : {paceline_send, paceline_receive}) {
        op = 7;
        MUST(transfer(comm, &t, &op) == PACELINE_INVALID_ARGUMENT && op == 0);
        MUST(std::strstr(paceline_error(comm), "timeout_s is") != nullptr);
      }
    }
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

// A rank that works until its job ends, and leaves the sentence and the moment in a file.
int work_until_the_end(int rank, int size, FileStore& store, const std::string& directory,
                       size_t elements, double timeout_s, bool forks = false) {
  auto* comm = create(rank, size, store, timeout_s);
  MUST(comm != nullptr);
  std::vector<float> data(elements, 1);
  for (int k = 0;; ++k) {
    auto a = op_args(0, 0, data.data(), data.data(), data.size());
    a.reduce_op = 1;
    a.name = "gradient";
    auto code = paceline_run(comm, &a, nullptr);
    if (code != PACELINE_OK) {
      std::string sentence = paceline_error(comm);
      auto part = directory + "/part-" + std::to_string(rank);
      std::ofstream(part) << code << " " << sentence;
      std::filesystem::rename(part, directory + "/end-" + std::to_string(rank));
      return 0;
    }
    if (k == 10 && forks && fork() == 0) {
      ::usleep(4'000'000);
      _exit(0);
    }
    if (k == 20) std::ofstream(directory + "/busy-" + std::to_string(rank)) << "yes";
  }
}

class Faults : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("PACELINE_WIRE", GetParam(), 1); }
  void TearDown() override { unsetenv("PACELINE_WIRE"); }
};

TEST_P(Faults, KillMinusNineIsNamedOnAllOthersWithinTwoSeconds) {
  constexpr int kSize = 4;
  for (int victim : {0, 3}) {
    Processes ranks(kSize, [&](int rank, FileStore& store) {
      return work_until_the_end(rank, kSize, store, store.directory(), 50000, 60);
    });
    for (int r = 0; r < kSize; ++r) ASSERT_TRUE(ranks.appears("busy-" + std::to_string(r)));
    auto start = std::chrono::steady_clock::now();
    ranks.signal(victim, SIGKILL);
    for (int r = 0; r < kSize; ++r) {
      if (r == victim) continue;
      ASSERT_TRUE(ranks.appears("end-" + std::to_string(r), 10)) << "rank " << r << " hangs";
      auto text = ranks.heard("end-" + std::to_string(r));
      EXPECT_NE(text.find("rank " + std::to_string(victim) + " (host "), std::string::npos) << text;
      EXPECT_EQ(text.substr(0, 2), "4 ") << text;
    }
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    EXPECT_LT(took.count(), 2.0);
  }
}

// A data loader's worker, say: it holds what it had at the fork, until it ends.
TEST_P(Faults, AKilledRankIsNamedWhileAChildOfItsLives) {
  Processes ranks(2, [&](int rank, FileStore& store) {
    return work_until_the_end(rank, 2, store, store.directory(), 50000, 60, true);
  });
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(ranks.appears("busy-" + std::to_string(r)));
  auto start = std::chrono::steady_clock::now();
  ranks.signal(1, SIGKILL);
  ASSERT_TRUE(ranks.appears("end-0", 10)) << "rank 0 hangs";
  auto text = ranks.heard("end-0");
  EXPECT_NE(text.find("rank 1 (host "), std::string::npos) << text;
  EXPECT_EQ(text.substr(0, 2), "4 ") << text;
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 2.0);
}

TEST_P(Faults, AStoppedProcessIsNamedAfterTheTimeout) {
  constexpr int kSize = 3;
  Processes ranks(kSize, [&](int rank, FileStore& store) {
    return work_until_the_end(rank, kSize, store, store.directory(), 50000, 2);
  });
  for (int r = 0; r < kSize; ++r) ASSERT_TRUE(ranks.appears("busy-" + std::to_string(r)));
  ranks.signal(1, SIGSTOP);
  for (int r : {0, 2}) {
    ASSERT_TRUE(ranks.appears("end-" + std::to_string(r), 15)) << "rank " << r << " hangs";
    auto text = ranks.heard("end-" + std::to_string(r));
    EXPECT_NE(text.find("rank 1 (host "), std::string::npos) << text;
    EXPECT_EQ(text.substr(0, 2), "3 ") << text;
  }
}

TEST_P(Faults, ShapesThatDifferAreNamedOnEveryRank) {
  constexpr int kSize = 3;
  // Each process ends at once after the error, in any order: nobody may blame one that has left for it.
  for (int round = 0; round < 5; ++round) {
    Processes ranks(kSize, [&](int rank, FileStore& store) {
      auto* comm = create(rank, kSize, store);
      MUST(comm != nullptr);
      std::vector<float> data(8192, 1);
      auto a = op_args(0, 0, data.data(), data.data(), rank == 1 ? 8128 : 8192);
      a.name = "layer1.weight";
      a.shape = rank == 1 ? "[64, 127]" : "[64, 128]";
      MUST(paceline_run(comm, &a, nullptr) == PACELINE_MISMATCH);
      std::string text = paceline_error(comm);
      MUST(text.find("all-reduce 'layer1.weight'") != std::string::npos);
      MUST(text.find("float32 [64, 127]") != std::string::npos);
      MUST(text.find("float32 [64, 128]") != std::string::npos);
      return 0;
    });
    for (int r = 0; r < kSize; ++r) EXPECT_EQ(ranks.wait(r, 20), 0);
  }
}

TEST_P(Faults, ARankThatNeverSubmitsIsNamed) {
  constexpr int kSize = 3;
  Processes ranks(kSize, [&](int rank, FileStore& store) {
    auto* comm = create(rank, kSize, store, 2);
    MUST(comm != nullptr);
    int32_t x = 1;
    auto a = op_args(0, 6, &x, &x, 1);
    a.name = "late";
    if (rank == 2) {
      while (paceline_comm_health(comm) == PACELINE_OK) usleep(1000);
      return 0;
    }
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_TIMEOUT);
    MUST(std::strstr(paceline_error(comm), "rank 2 (host ") != nullptr);
    MUST(std::strstr(paceline_error(comm), "has not submitted it") != nullptr);
    return 0;
  });
  for (int r = 0; r < kSize; ++r) EXPECT_EQ(ranks.wait(r, 20), 0);
}

INSTANTIATE_TEST_SUITE_P(Wires, Faults, testing::Values("tcp", "auto"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace paceline::capi
