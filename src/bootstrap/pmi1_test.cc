// PMI-1 against a process manager played by the test, over a real socket pair: good, wrong, truncated and silent.
#include "bootstrap/pmi1.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include "bootstrap/kv_mpi.h"
#include "drivers/pmix/mock/mock_pmix.h"

namespace paceline::bootstrap {
namespace {

/// Answers each line by `answer` until the client hangs up.
class Manager {
 public:
  explicit Manager(std::function<std::string(const std::string&)> answer) {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    client_ = ends[0];
    thread_ = std::thread([fd = ends[1], answer = std::move(answer)] {
      std::string buffer;
      char bytes[512];
      for (ssize_t n = 0; (n = ::read(fd, bytes, sizeof(bytes))) > 0;) {
        buffer.append(bytes, static_cast<std::size_t>(n));
        for (auto end = buffer.find('\n'); end != std::string::npos; end = buffer.find('\n')) {
          auto reply = answer(buffer.substr(0, end));
          buffer.erase(0, end + 1);
          if (reply == "hang up") {
            ::close(fd);
            return;
          }
          if (::write(fd, reply.data(), reply.size()) < 0) break;
        }
      }
      ::close(fd);
    });
  }
  ~Manager() {
    ::shutdown(client_, SHUT_RDWR);
    thread_.join();
    ::close(client_);
  }
  [[nodiscard]] int fd() const { return client_; }

 private:
  int client_ = -1;
  std::thread thread_;
};

/// As Hydra answers; `entries` is the job's space.
std::string hydra(std::map<std::string, std::string>& entries, const std::string& line) {
  auto words = parse_pmi_line(line);
  auto& w = *words;
  if (w["cmd"] == "init") return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n";
  if (w["cmd"] == "get_maxes") return "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024\n";
  if (w["cmd"] == "get_my_kvsname") return "cmd=my_kvsname kvsname=kvs_17_0\n";
  if (w["cmd"] == "put") {
    entries[w["key"]] = w["value"];
    return "cmd=put_result rc=0 msg=success\n";
  }
  if (w["cmd"] == "get") {
    if (!entries.contains(w["key"]))
      return "cmd=get_result rc=-1 msg=key " + w["key"] + " not found value=unknown\n";
    return "cmd=get_result rc=0 msg=success value=" + entries[w["key"]] + "\n";
  }
  if (w["cmd"] == "publish_name") {
    entries["service " + w["service"]] = w["port"];
    return "cmd=publish_result info=ok rc=0 msg=success\n";
  }
  if (w["cmd"] == "lookup_name") {
    if (!entries.contains("service " + w["service"]))
      return "cmd=lookup_result rc=1 msg=service_not_found\n";
    return "cmd=lookup_result port=here info=ok rc=0 msg=success\n";
  }
  if (w["cmd"] == "barrier_in") return "cmd=barrier_out\n";
  return "cmd=finalize_ack\n";
}

TEST(Pmi1, RandomValuesOfEveryLengthComeBack) {
  std::map<std::string, std::string> entries;
  Manager manager([&](const std::string& line) { return hydra(entries, line); });
  auto space = pmi1_space(manager.fd());
  ASSERT_TRUE(space) << space.status().message();
  std::mt19937_64 random(3);
  for (std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{507}, std::size_t{508},
                             std::size_t{1500}, kValueLimit}) {
    std::string value(length, '\0');
    for (auto& c : value) c = static_cast<char>(random());
    auto key = "paceline/job with spaces=" + std::to_string(length);
    ASSERT_TRUE((*space)->put(key, value).is_ok());
    ASSERT_TRUE((*space)->fence().is_ok());
    Result<std::optional<std::string>> got = std::optional<std::string>();
    for (int i = 0; i < 2000 && got && !*got; ++i) {
      ASSERT_TRUE((*space)->poll(0).is_ok());
      got = (*space)->get(key);
      ::usleep(100);
    }
    ASSERT_TRUE(got && *got) << length;
    EXPECT_EQ(**got, value);
  }
  auto missing = (*space)->get("nobody put this");
  ASSERT_TRUE(missing);
  EXPECT_FALSE(*missing);
}

// Whoever has announced itself is seen by all that wait in the barrier, and what ends it may come before the answer.
TEST(Pmi1, WhoIsHereIsToldWhileTheBarrierLasts) {
  std::map<std::string, std::string> entries;
  bool late = false;  // the barrier's end
  Manager manager([&](const std::string& line) {
    if (line == "cmd=barrier_in") return std::string();
    return (late ? "cmd=barrier_out\n" : "") + hydra(entries, line);
  });
  auto space = pmi1_space(manager.fd());
  ASSERT_TRUE(space) << space.status().message();
  EXPECT_EQ((*space)->announced("here1"), std::nullopt) << "who has not announced itself can't ask";
  (*space)->announce("here1");
  ASSERT_TRUE((*space)->put("r1", "record").is_ok());
  ASSERT_TRUE((*space)->fence().is_ok());
  EXPECT_EQ((*space)->announced("here1"), true);
  EXPECT_EQ((*space)->announced("here2"), false);
  auto got = (*space)->get("r1");
  ASSERT_TRUE(got);
  EXPECT_FALSE(*got) << "the fence is not over";
  late = true;
  EXPECT_EQ((*space)->announced("here2"), false);
  late = false;
  ASSERT_TRUE((*space)->poll(0).is_ok());
  got = (*space)->get("r1");
  ASSERT_TRUE(got && *got) << "the barrier's end was lost";
}

TEST(Pmi1, AManagerWithoutNamesCantTellWhoIsHere) {
  std::map<std::string, std::string> entries;
  Manager manager([&](const std::string& line) {
    if (line.starts_with("cmd=publish_name"))
      return std::string("cmd=publish_result rc=1 msg=no\n");
    return hydra(entries, line);
  });
  auto space = pmi1_space(manager.fd());
  ASSERT_TRUE(space) << space.status().message();
  (*space)->announce("here1");
  EXPECT_EQ((*space)->announced("here1"), std::nullopt);
}

// Slurm's says no rc, others end a line twice.
TEST(Pmi1, OtherManagersWays) {
  std::map<std::string, std::string> entries;
  bool is_there = true;
  Manager manager([&](const std::string& line) {
    if (line.starts_with("cmd=publish_name")) return std::string("cmd=publish_result info=ok\n\n");
    if (line.starts_with("cmd=lookup_name"))
      return std::string(is_there ? "cmd=lookup_result info=ok port=here\n"
                                  : "cmd=lookup_result info=fail\n\n");
    return hydra(entries, line);
  });
  auto client = Pmi1Client::open(manager.fd(), kSecond);
  ASSERT_TRUE(client) << client.status().message();
  EXPECT_TRUE(client->publish("here1").is_ok());
  EXPECT_TRUE(*client->is_published("here1"));
  is_there = false;
  EXPECT_FALSE(*client->is_published("here1"));
  EXPECT_TRUE(client->put("key", "value").is_ok());
  EXPECT_EQ(*client->get("key"), "value");
}

// An answer that comes late must not be taken for that to the next question.
TEST(Pmi1, WhoWasSilentIsAskedNoMore) {
  std::map<std::string, std::string> entries;
  std::string owed;
  Manager manager([&](const std::string& line) {
    if (line == "cmd=barrier_in") return std::string();
    if (line.starts_with("cmd=lookup_name service=silent")) {
      owed = "cmd=lookup_result rc=1 msg=service_not_found\n";
      return std::string();
    }
    return std::exchange(owed, "") + hydra(entries, line);
  });
  auto client = Pmi1Client::open(manager.fd(), 2 * kSecond);
  ASSERT_TRUE(client) << client.status().message();
  ASSERT_TRUE(client->publish("here1").is_ok());
  EXPECT_TRUE(*client->is_published("here1"));
  EXPECT_FALSE(client->is_published("silent").is_ok());
  const auto after = client->is_published("here1");
  ASSERT_FALSE(after.is_ok()) << "an answer to another question";
  EXPECT_NE(after.status().message().find("does not answer"), std::string::npos);
}

TEST(Pmi1, WhereNamesAreNotAnsweredNobodyCanSayWhoIsHere) {
  std::map<std::string, std::string> entries;
  Manager manager([&](const std::string& line) {
    if (line.starts_with("cmd=lookup_name") || line == "cmd=barrier_in") return std::string();
    return hydra(entries, line);
  });
  auto space = pmi1_space(manager.fd());
  ASSERT_TRUE(space) << space.status().message();
  (*space)->announce("here1");
  ASSERT_TRUE((*space)->fence().is_ok());
  EXPECT_TRUE((*space)->trouble().is_ok());
  EXPECT_EQ((*space)->announced("here1"), std::nullopt);
  EXPECT_EQ(
      (*space)->trouble().message(),
      "MPICH's PMI-1 shows nothing until all have come, and its name service does not answer");
}

TEST(Pmi1, AManagerThatSpeaksNonsenseIsAnError) {
  for (const char* reply :
       {"cmd=surprise\n", "nonsense\n", "hang up", "rc=0\n", "cmd=response_to_init rc=-1\n"}) {
    Manager manager([&](const std::string&) { return reply; });
    auto client = Pmi1Client::open(manager.fd(), kSecond);
    EXPECT_FALSE(client) << reply;
  }
}

TEST(Pmi1, AManagerThatIsSilentIsAnErrorInTime) {
  Manager manager([](const std::string&) { return ""; });
  SteadyClock clock;
  auto begin = clock.now();
  EXPECT_FALSE(Pmi1Client::open(manager.fd(), 100 * kMillisecond));
  EXPECT_LT(clock.now() - begin, 10 * kSecond);
}

TEST(Pmi1, AnEndlessLineIsAnError) {
  Manager manager([](const std::string&) { return std::string(3 * kPmiLineLimit, 'x'); });
  EXPECT_FALSE(Pmi1Client::open(manager.fd(), kSecond));
}

TEST(Hex, ThereAndBackAndNothingElse) {
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  auto back = from_hex(to_hex(all));
  ASSERT_TRUE(back);
  EXPECT_EQ(*back, all);
  for (const char* bad : {"a", "0g", "AB", " 0"}) EXPECT_FALSE(from_hex(bad)) << bad;
}

TEST(Pmix, WhoIsHereIsToldBeforeTheFence) {
  auto world = std::make_shared<drivers::MockPmix>(2);
  auto mine = pmix_space(drivers::MockPmix::client(world, 0));
  auto other = pmix_space(drivers::MockPmix::client(world, 1));
  EXPECT_EQ(mine->announced("here1"), std::nullopt) << "who has not announced itself can't ask";
  mine->announce("here0");
  EXPECT_EQ(mine->announced("here1"), false);
  other->announce("here1");
  EXPECT_EQ(mine->announced("here1"), true);
}

TEST(Pmix, WhatOneRankPutsAllSeeAfterTheFence) {
  auto world = std::make_shared<drivers::MockPmix>(3);
  std::vector<std::thread> ranks;
  std::atomic<int> right{0};
  for (uint32_t r = 0; r < 3; ++r) {
    ranks.emplace_back([&, r] {
      auto space = pmix_space(drivers::MockPmix::client(world, r));
      auto value = "value of " + std::to_string(r) + std::string(1, '\0');
      if (!space->put("job/r" + std::to_string(r), value).is_ok() || !space->fence().is_ok())
        return;
      auto key = "job/r" + std::to_string((r + 1) % 3);
      for (int i = 0; i < 5000; ++i) {
        auto got = space->get(key);
        if (got && *got) {
          if (**got == "value of " + std::to_string((r + 1) % 3) + std::string(1, '\0')) ++right;
          return;
        }
        ::usleep(200);
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(right.load(), 3);
}

}  // namespace
}  // namespace paceline::bootstrap
