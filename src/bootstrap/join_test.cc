// join() as production calls it, over real sockets: one thread a rank.
#include "bootstrap/join.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "bootstrap/identity.h"
#include "bootstrap/join_testing.h"

namespace paceline::bootstrap {
namespace {

using namespace bootstrap::testing;

/// Two ranks that were started with sizes of their own, `store` or our own server between them.
std::map<Rank, Outcome> join_with_sizes(const std::array<Rank, 2>& sizes, SharedStore* store,
                                        const Variables& variables) {
  std::map<Rank, Outcome> outcomes;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (Rank rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      for (auto& [r, job] : join_all(
               sizes[static_cast<std::size_t>(rank)], {rank}, store,
               [&](Rank) { return variables; }, 30)) {
        std::lock_guard lock(mutex);
        outcomes.emplace(r, std::move(job));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

uint16_t free_port() {
  int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  ::close(fd);
  return ntohs(address.sin_port);
}

TEST(Join, EveryRankHasTheSameTableAndReachesEveryOther) {
  for (Rank size : {2, 3, 7}) {
    SharedStore store;
    auto jobs = join_all(size, all(size), &store, [](Rank rank) {
      auto variables = loopback(rank);
      variables["PACELINE_NODE_ID"] = rank % 2 == 0 ? "even" : "odd";
      return variables;
    });
    for (auto& [rank, job] : jobs) {
      ASSERT_TRUE(job) << job.status().message();
      auto& topology = (*job)->topology;
      EXPECT_EQ(topology.rank, rank);
      ASSERT_EQ(topology.size(), size);
      EXPECT_EQ(topology.node_count, 2);
      for (Rank r = 0; r < size; ++r) {
        auto& member = topology.members[static_cast<std::size_t>(r)];
        EXPECT_EQ(member.rank, r);
        EXPECT_EQ(member.node, r % 2);
        EXPECT_EQ(member.local_rank, r / 2);
        EXPECT_EQ(member.address,
                  (*jobs.at(0))->topology.members[static_cast<std::size_t>(r)].address);
      }
    }
    exchange(jobs);
    leave(jobs);
  }
}

TEST(Join, RanksOfANodeShareMemoryAndOthersUseTcp) {
  SharedStore store;
  auto jobs = join_all(5, all(5), &store, [](Rank rank) {
    auto variables = loopback(rank);
    variables["PACELINE_NODE_ID"] = rank < 3 ? "a" : "b";
    return variables;
  });
  for (auto& [rank, job] : jobs) {
    ASSERT_TRUE(job) << job.status().message();
    auto text = (*job)->channel->describe();
    EXPECT_NE(text.find("shared memory"), std::string::npos) << text;
    EXPECT_NE(text.find("tcp"), std::string::npos) << text;
    EXPECT_NE((*job)->allocator, nullptr);
  }
  exchange(jobs);
  leave(jobs);
}

TEST(Join, SharedMemoryAloneIsRefusedAcrossNodes) {
  SharedStore store;
  auto jobs = join_all(2, all(2), &store, [](Rank rank) {
    auto variables = loopback(rank);
    variables["PACELINE_WIRE"] = "shm";
    variables["PACELINE_NODE_ID"] = std::to_string(rank);
    return variables;
  });
  for (auto& [rank, job] : jobs) {
    ASSERT_FALSE(job);
    EXPECT_NE(job.status().message().find("PACELINE_WIRE=shm"), std::string::npos)
        << job.status().message();
  }
}

TEST(Join, OverOurOwnServer) {
  auto port = std::to_string(free_port());
  auto jobs = join_all(5, all(5), nullptr, [&](Rank) {
    return Variables{{"PACELINE_RENDEZVOUS", "127.0.0.1:" + port},
                     {"PACELINE_SECRET", "a secret of sixteen +"}};
  });
  for (auto& [rank, job] : jobs) ASSERT_TRUE(job) << rank << ": " << job.status().message();
  exchange(jobs);
  leave(jobs);
}

TEST(Join, OverIpv6) {
  auto port = std::to_string(free_port());
  auto jobs = join_all(3, all(3), nullptr, [&](Rank) {
    return Variables{{"PACELINE_RENDEZVOUS", "[::1]:" + port},
                     {"PACELINE_SECRET", "a secret of sixteen +"}};
  });
  for (auto& [rank, job] : jobs) ASSERT_TRUE(job) << rank << ": " << job.status().message();
  EXPECT_NE((*jobs.at(1))->topology.members[2].address.find("[::1]"), std::string::npos);
  exchange(jobs);
  leave(jobs);
}

TEST(Join, ARankThatNeverComesIsNamedOnAllThatWait) {
  SharedStore store;
  auto jobs = join_all(7, {0, 1, 2, 4, 6}, &store, loopback, 3.0);
  for (auto& [rank, job] : jobs) {
    ASSERT_FALSE(job) << rank;
    EXPECT_EQ(job.status().code(), Code::kTimeout);
    EXPECT_NE(job.status().message().find("ranks 3, 5"), std::string::npos)
        << job.status().message();
  }
}

// Rank 0 hands out the secret that the others wait for first.
TEST(Join, WhoeverIsMissingBesideRank0IsNamed) {
  SharedStore store;
  auto jobs = join_all(5, {1, 3, 4}, &store, loopback, 3.0);
  for (auto& [rank, job] : jobs) {
    ASSERT_FALSE(job) << rank;
    EXPECT_EQ(job.status().code(), Code::kTimeout);
    for (const char* words : {"rank 2 of 5 never came", "Rank 0 has not joined either"})
      EXPECT_NE(job.status().message().find(words), std::string::npos) << job.status().message();
  }
  SharedStore other;
  jobs = join_all(2, {1}, &other, loopback, 0.5);
  EXPECT_NE(jobs.at(1).status().message().find("rank 0 of 2 never came"), std::string::npos)
      << jobs.at(1).status().message();
}

TEST(Join, AStoreThatEndsPointsToWhoServedIt) {
  SharedStore store;
  store.is_gone = true;
  auto jobs = join_all(2, {1}, &store, loopback, 30);
  ASSERT_FALSE(jobs.at(1));
  for (const char* words : {"rank 1 waited for rank 0", "See what it printed"})
    EXPECT_NE(jobs.at(1).status().message().find(words), std::string::npos)
        << jobs.at(1).status().message();
}

TEST(Join, SettingsThatDifferAreNamedOnEveryRank) {
  SharedStore store;
  auto jobs = join_all(
      6, all(6), &store,
      [](Rank rank) {
        auto variables = loopback(rank);
        if (rank == 5) variables["PACELINE_TOPK_RATIO"] = "0.25";
        return variables;
      },
      30);
  for (auto& [rank, job] : jobs) {
    ASSERT_FALSE(job) << rank;
    EXPECT_EQ(job.status().code(), Code::kMismatch) << job.status().message();
    EXPECT_NE(job.status().message().find("topk_ratio is"), std::string::npos)
        << job.status().message();
    EXPECT_NE(job.status().message().find("rank 5"), std::string::npos) << job.status().message();
  }
}

TEST(Join, SizesThatDifferAreNamedOnEveryRank) {
  for (const auto& sizes : {std::array<Rank, 2>{2, 3}, std::array<Rank, 2>{3, 2}}) {
    for (bool own_server : {false, true}) {
      SharedStore store;
      auto variables = loopback(0);
      if (own_server) {
        variables = {{"PACELINE_RENDEZVOUS", "127.0.0.1:" + std::to_string(free_port())},
                     {"PACELINE_SECRET", "a secret of sixteen +"}};
      }
      auto jobs = join_with_sizes(sizes, own_server ? nullptr : &store, variables);
      for (auto& [rank, job] : jobs) {
        ASSERT_FALSE(job) << rank;
        EXPECT_EQ(job.status().code(), Code::kMismatch) << job.status().message();
        const auto host = host_name();
        for (const auto& word :
             {fmt::format("rank 1 (host {}) was started with {}", host, sizes[1]),
              fmt::format("rank 0 (host {}) with {}", host, sizes[0]), std::string("WORLD_SIZE")})
          EXPECT_NE(job.status().message().find(word), std::string::npos) << job.status().message();
      }
    }
  }
}

TEST(Join, AWrongSecretIsRefused) {
  auto port = std::to_string(free_port());
  auto jobs = join_all(
      3, all(3), nullptr,
      [&](Rank rank) {
        return Variables{
            {"PACELINE_RENDEZVOUS", "127.0.0.1:" + port},
            {"PACELINE_SECRET", rank == 2 ? "another secret, as long" : "a secret of sixteen +"}};
      },
      1.5);
  ASSERT_FALSE(jobs.at(2));
  EXPECT_EQ(jobs.at(2).status().code(), Code::kUnauthenticated) << jobs.at(2).status().message();
  ASSERT_FALSE(jobs.at(0));
  EXPECT_NE(jobs.at(0).status().message().find("rank 2"), std::string::npos)
      << jobs.at(0).status().message();
}

TEST(Join, AJobWithoutASecretOnANetworkIsRefused) {
  auto table = settings({{"PACELINE_RENDEZVOUS", "192.0.2.1:7000"}, {"PACELINE_INTERFACE", "lo"}});
  JoinOptions options{.rank = 1, .size = 2, .prefix = "no secret", .settings = &table};
  auto job = join(options);
  ASSERT_FALSE(job);
  EXPECT_EQ(job.status().code(), Code::kInvalidArgument);
  EXPECT_NE(job.status().message().find("PACELINE_SECRET"), std::string::npos);
}

TEST(Join, AHostThatCantBeResolvedIsNamed) {
  auto table = settings({{"PACELINE_RENDEZVOUS", "no-such-host.invalid:7000"}});
  JoinOptions options{.rank = 1, .size = 2, .prefix = "no host", .settings = &table};
  auto job = join(options);
  ASSERT_FALSE(job);
  for (const char* word : {"no-such-host.invalid", "check its name, /etc/hosts and DNS"})
    EXPECT_NE(job.status().message().find(word), std::string::npos) << job.status().message();
}

TEST(Join, AnInterfaceThatIsNotThereIsNamedWithThoseThatAre) {
  auto table =
      settings({{"PACELINE_RENDEZVOUS", "127.0.0.1:7000"}, {"PACELINE_INTERFACE", "nosuch9"}});
  JoinOptions options{.rank = 1, .size = 2, .prefix = "no interface", .settings = &table};
  auto job = join(options);
  ASSERT_FALSE(job);
  EXPECT_NE(job.status().message().find("nosuch9"), std::string::npos) << job.status().message();
  EXPECT_NE(job.status().message().find("lo"), std::string::npos) << job.status().message();
}

TEST(Join, APortThatIsTakenIsNamedWithTheSettingThatChoosesAnother) {
  int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  auto port = std::to_string(ntohs(address.sin_port));
  const std::map<std::string, std::string> places[] = {
      {{"PACELINE_RENDEZVOUS", "127.0.0.1:" + port}}, {{"PACELINE_PORT", port}}};
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);  // NOLINT(concurrency-mt-unsafe): no thread reads it
  for (const auto& place : places) {
    auto table = settings(place);
    JoinOptions options{.rank = 0, .size = 2, .prefix = "taken", .settings = &table};
    auto job = join(options);
    ASSERT_FALSE(job);
    for (const auto& word : {"port " + port, "choose a free one by " + place.begin()->first})
      EXPECT_NE(job.status().message().find(word), std::string::npos) << job.status().message();
  }
  ::unsetenv("MASTER_ADDR");  // NOLINT(concurrency-mt-unsafe): no thread reads it
  ::close(fd);
}

TEST(Join, AnAddressOfAnotherMachineIsNamedWithTheSettingThatGaveIt) {
  const std::map<std::string, std::string> places[] = {{{"PACELINE_RENDEZVOUS", "192.0.2.9:6666"}},
                                                       {{"PACELINE_PORT", "6666"}}};
  ::setenv("MASTER_ADDR", "192.0.2.9", 1);  // NOLINT(concurrency-mt-unsafe): no thread reads it
  for (auto place : places) {
    const std::string setting =
        place.contains("PACELINE_PORT") ? "MASTER_ADDR" : "PACELINE_RENDEZVOUS";
    place.insert({{"PACELINE_INTERFACE", "lo"}, {"PACELINE_SECRET", "a secret of sixteen +"}});
    auto table = settings(place);
    JoinOptions options{.rank = 0, .size = 2, .prefix = "elsewhere", .settings = &table};
    auto job = join(options);
    ASSERT_FALSE(job);
    for (const auto& words : {std::string("can't listen on 192.0.2.9:6666"), host_name(),
                              "give one that it has by " + setting})
      EXPECT_NE(job.status().message().find(words), std::string::npos) << job.status().message();
  }
  ::unsetenv("MASTER_ADDR");  // NOLINT(concurrency-mt-unsafe): no thread reads it
}

TEST(Join, AgainInTheSameProcess) {
  SharedStore store;
  for (int round = 0; round < 3; ++round) {
    auto prefix = "again " + std::to_string(round);
    auto jobs = join_all(3, all(3), &store, loopback, 30, prefix);
    for (auto& [rank, job] : jobs) ASSERT_TRUE(job) << job.status().message();
    exchange(jobs);
    leave(jobs);
  }
}

// Torch's sub-groups have all their ranks in their names, and a serial number at the end.
TEST(Join, LongNamesThatEndDifferentlyAreDifferentJobs) {
  SharedStore store;
  const std::string name(300, 'n');
  auto first = join_all(2, all(2), &store, loopback, 60, name + "/0");
  const auto keys = store.entries.size();
  auto second = join_all(2, all(2), &store, loopback, 60, name + "/1");
  for (Rank r : all(2)) {
    ASSERT_TRUE(first.at(r) && second.at(r));
    EXPECT_NE((*first.at(r))->id, (*second.at(r))->id);
    EXPECT_LE((*first.at(r))->id.size(), 160U);
  }
  EXPECT_EQ(store.entries.size(), 2 * keys) << "they met under the same keys";
  const auto first_starts = std::count_if(store.entries.begin(), store.entries.end(),
                                          [](auto& e) { return e.first.ends_with("start/0"); });
  EXPECT_EQ(first_starts, 2) << "the second was taken for the first, started again";
}

TEST(Join, APatienceWithoutEndIsOne) {
  SharedStore store;
  auto jobs = join_all(2, all(2), &store, [](Rank r) {
    auto variables = loopback(r);
    variables["PACELINE_PEER_TIMEOUT"] = "1e10";
    return variables;
  });
  for (auto& [rank, job] : jobs) EXPECT_TRUE(job) << job.status().message();
}

TEST(Join, AJobOfOneNeedsNobody) {
  auto table = settings({});
  JoinOptions options{.rank = 0, .size = 1, .prefix = "one", .settings = &table};
  auto job = join(options);
  ASSERT_TRUE(job) << job.status().message();
  EXPECT_EQ((*job)->topology.size(), 1);
  EXPECT_EQ((*job)->topology.node_count, 1);
}

}  // namespace
}  // namespace paceline::bootstrap
