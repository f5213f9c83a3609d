// Communicators beside another one: made, used, counted, ended in order; and what becomes of them when something fails.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <vector>

#include "capi/processes.h"

namespace paceline::capi {
namespace {

int sum_up(paceline_comm* comm, int rank, int size, size_t n) {
  std::vector<int32_t> data(n, rank);
  auto a = op_args(0, 6, data.data(), data.data(), n);
  MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
  MUST(data == std::vector<int32_t>(n, size * (size - 1) / 2));
  return 0;
}

uint64_t sent(paceline_comm* comm) {
  paceline_stats s{};
  s.struct_size = sizeof s;
  return paceline_comm_stats(comm, &s) == PACELINE_OK ? s.payload_sent : 0;
}

int beside_each_other(int rank, int size, FileStore& store) {
  for (int round = 0; round < 2; ++round) {
    auto* comm = create(rank, size, store, 20);
    MUST(comm != nullptr);
    paceline_comm* more[2] = {};
    for (auto& c : more) MUST(paceline_comm_companion(comm, &c) == PACELINE_OK && c != nullptr);
    paceline_comm* third = nullptr;
    MUST(paceline_comm_companion(more[0], &third) == PACELINE_INVALID_ARGUMENT);
    for (auto* c : more) {
      paceline_identity id{};
      id.struct_size = sizeof id;
      MUST(paceline_comm_identity(c, &id) == PACELINE_OK);
      MUST(id.rank == rank && id.size == size && id.job_local_size >= id.local_size);
    }
    constexpr size_t kElements = 100000;
    MUST(sum_up(comm, rank, size, kElements) == 0);
    const auto before = sent(comm);
    for (auto* c : more) MUST(sum_up(c, rank, size, kElements) == 0);
    MUST(sent(more[0]) >= kElements && sent(more[1]) >= kElements);
    const auto after = sent(comm);
    MUST(after >= before + 2 * kElements);
    for (auto* c : {more[1], more[0]}) MUST(paceline_comm_destroy(c) == PACELINE_OK);
    MUST(sent(comm) >= after);  // what they sent stays counted
    MUST(sum_up(comm, rank, size, 10) == 0);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  }
  return 0;
}

/// Sends and receives so many bytes; seconds, or a negative number.
double exchange(paceline_comm* comm, int peer, size_t bytes) {
  std::vector<std::byte> out(bytes, std::byte{7}), in(bytes);
  paceline_transfer_args a{};
  a.struct_size = sizeof a;
  a.peer = peer;
  a.tag = 1;
  a.bytes = bytes;
  paceline_op ops[2] = {};
  const auto start = std::chrono::steady_clock::now();
  a.data = in.data();
  if (paceline_receive(comm, &a, &ops[0]) != PACELINE_OK) return -1;
  a.data = out.data();
  if (paceline_send(comm, &a, &ops[1]) != PACELINE_OK) return -1;
  for (auto op : ops)
    if (paceline_wait(comm, op, -1, nullptr) != PACELINE_OK) return -1;
  if (in != out) return -1;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Two ranks a node, two communicators each: a quarter of the link for one. A slower machine only takes longer.
TEST(LinkRate, IsDealtToRanksAndTheirCommunicators) {
  Processes ranks(4, [](int rank, FileStore& store) {
    setenv("PACELINE_LINK_RATE", "0.64", 1);
    setenv("PACELINE_NODE_ID", rank < 2 ? "a" : "b", 1);
    setenv("PACELINE_WIRE", "tcp", 1);
    constexpr double kShare = 0.64e9 / 8 / 4;
    constexpr size_t kBytes = 24U << 20;
    auto* comm = create(rank, 4, store, 20);
    MUST(comm != nullptr);
    paceline_comm* more = nullptr;
    MUST(paceline_comm_companion(comm, &more) == PACELINE_OK);
    for (auto* c : {comm, more})
      MUST(exchange(c, (rank + 2) % 4, kBytes) > 0.75 * static_cast<double>(kBytes) / kShare);
    MUST(paceline_comm_destroy(more) == PACELINE_OK);
    MUST(exchange(comm, (rank + 2) % 4, kBytes) > 0);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  for (int r = 0; r < 4; ++r) EXPECT_EQ(ranks.wait(r, 60), 0) << "rank " << r;
}

// A rank that has more to send than its neighbours is given more of the link, and the neighbours less.
TEST(LinkRate, PartsOfItCanBeDealt) {
  Processes ranks(2, [](int rank, FileStore& store) {
    setenv("PACELINE_LINK_RATE", "0.64", 1);
    setenv("PACELINE_NODE_ID", rank < 1 ? "a" : "b", 1);
    setenv("PACELINE_WIRE", "tcp", 1);
    constexpr double kLink = 0.64e9 / 8;
    constexpr size_t kBytes = 24U << 20;
    auto* comm = create(rank, 2, store, 20);
    MUST(comm != nullptr);
    for (const double wrong : {0.0, -1.0, std::nan(""), HUGE_VAL})
      MUST(paceline_comm_weigh(comm, wrong) == PACELINE_INVALID_ARGUMENT);
    MUST(std::string_view(paceline_error(nullptr)).find("give more than 0") != std::string::npos);
    MUST(paceline_comm_weigh(nullptr, 1) == PACELINE_INVALID_ARGUMENT);
    MUST(paceline_comm_weigh(comm, 0.25) == PACELINE_OK);
    MUST(exchange(comm, 1 - rank, kBytes) > 0.75 * static_cast<double>(kBytes) / (0.25 * kLink));
    MUST(paceline_comm_weigh(comm, 16) == PACELINE_OK);
    MUST(exchange(comm, 1 - rank, kBytes) > 0);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r, 60), 0) << "rank " << r;
}

class Companions : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("PACELINE_WIRE", GetParam(), 1); }
  void TearDown() override { unsetenv("PACELINE_WIRE"); }
};

TEST_P(Companions, WorkBesideEachOther) {
  for (int size : {2, 6}) {
    Processes ranks(
        size, [size](int rank, FileStore& store) { return beside_each_other(rank, size, store); });
    for (int r = 0; r < size; ++r) EXPECT_EQ(ranks.wait(r, 60), 0) << "rank " << r;
  }
}

// A failure that was met on one communicator ends another one word for word, on all ranks.
TEST_P(Companions, AFailurePassesFromOneToAnother) {
  const std::string sentence = "rank 7 (host elsewhere) is lost: as the test says";
  Processes ranks(3, [&](int rank, FileStore& store) {
    auto* comm = create(rank, 3, store, 20);
    MUST(comm != nullptr);
    paceline_comm* more = nullptr;
    MUST(paceline_comm_companion(comm, &more) == PACELINE_OK);
    MUST(paceline_comm_fail(comm, PACELINE_OK, "") == PACELINE_INVALID_ARGUMENT);
    MUST(paceline_comm_abort_as(comm, PACELINE_OK, "") == PACELINE_INVALID_ARGUMENT);
    // Nobody is within an operation of the second when it ends.
    for (auto* c : {more, comm}) MUST(sum_up(c, rank, 3, 10) == 0);
    if (rank == 1)
      MUST(paceline_comm_fail(more, PACELINE_PEER_LOST, sentence.c_str()) == PACELINE_OK);
    while (paceline_comm_health(more) == PACELINE_OK) usleep(1000);
    MUST(paceline_comm_health(more) == PACELINE_PEER_LOST);
    MUST(sentence == paceline_error(nullptr));
    MUST(paceline_comm_health(comm) == PACELINE_OK);
    MUST(paceline_comm_destroy(more) == PACELINE_PEER_LOST);
    MUST(sum_up(comm, rank, 3, 10) == 0);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.wait(r, 30), 0) << "rank " << r;
}

TEST_P(Companions, ARankThatCanNotMakeOneIsNamedOnAll) {
  Processes ranks(3, [](int rank, FileStore& store) {
    auto* comm = create(rank, 3, store, 20);
    MUST(comm != nullptr);
    paceline_comm* last = nullptr;  // now the first one has all connections that it needs
    MUST(paceline_comm_companion(comm, &last) == PACELINE_OK);
    if (rank == 1) {
      rlimit none{};
      MUST(getrlimit(RLIMIT_NOFILE, &none) == 0);
      none.rlim_cur = 3;
      MUST(setrlimit(RLIMIT_NOFILE, &none) == 0);
    }
    paceline_comm* more = nullptr;
    MUST(paceline_comm_companion(comm, &more) != PACELINE_OK);
    MUST(more == nullptr);
    if (rank != 1) MUST(std::strstr(paceline_error(nullptr), "rank 1 (host") != nullptr);
    MUST(paceline_comm_fail(last, PACELINE_ABORTED, "over") == PACELINE_OK);
    MUST(paceline_comm_destroy(last) != PACELINE_OK);
    MUST(paceline_comm_destroy(comm) != PACELINE_OK);
    return 0;
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.wait(r, 30), 0) << "rank " << r;
}

TEST_P(Companions, ARankThatDiesInsteadIsNamedOnAll) {
  Processes ranks(3, [](int rank, FileStore& store) {
    auto* comm = create(rank, 3, store, 20);
    MUST(comm != nullptr);
    if (rank == 2) {
      store.handle().put(&store, "gone", "x", 1);
      kill(getpid(), SIGKILL);
    }
    paceline_comm* more = nullptr;
    MUST(paceline_comm_companion(comm, &more) == PACELINE_PEER_LOST);
    MUST(std::strstr(paceline_error(nullptr), "rank 2 (host") != nullptr);
    std::ofstream(store.directory() + "/end-" + std::to_string(rank)) << "x";
    return 0;
  });
  ASSERT_TRUE(ranks.appears("gone"));
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(ranks.appears("end-" + std::to_string(r), 2)) << "rank " << r << " hangs";
    EXPECT_EQ(ranks.wait(r, 20), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Wires, Companions, testing::Values("tcp", "auto"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace paceline::capi
