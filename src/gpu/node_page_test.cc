// The page by which the ranks of a node see how far the others are: the page itself, and meetings by it.
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <functional>
#include <random>

#include "gpu/cluster.h"
#include "gpu/node_page.h"

namespace paceline::gpu {
namespace {

using For = NodePage::For;

/// What it returns in another process.
int in_a_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST(NodePage, TellsAnotherProcessHowFarAllAre) {
  auto made = NodePage::make(3);
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  EXPECT_EQ(made->through(For::kInPlace), 0U);
  made->put(0, For::kInPlace, 7);
  made->put(2, For::kInPlace, 9);
  EXPECT_EQ(made->through(For::kInPlace), 0U);
  const auto ticket = made->ticket();
  ASSERT_EQ(ticket.size(), NodePage::kTicketBytes);
  EXPECT_EQ(in_a_child([&] {
              auto opened = NodePage::open(ticket, 3);
              if (!opened || opened->through(For::kInPlace) != 0) return 1;
              opened->put(1, For::kInPlace, 8);
              return opened->through(For::kInPlace) == 7 ? 0 : 2;
            }),
            0);
  EXPECT_EQ(made->through(For::kInPlace), 7U);
  made->put(0, For::kInPlace, 1000000000000);
  EXPECT_EQ(made->through(For::kInPlace), 8U);
}

TEST(NodePage, TellsAnotherProcessWhatWaits) {
  auto made = NodePage::make(2);
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  for (int wire = 0; wire < kMostWires; ++wire) EXPECT_FALSE(made->waiting(1, wire)) << wire;
  made->put_waiting(0, kMostWires - 1, 77);
  EXPECT_EQ(in_a_child([&, ticket = made->ticket()] {
              auto opened = NodePage::open(ticket, 2);
              if (!opened || opened->waiting(0, kMostWires - 1) != 77U) return 1;
              opened->put_waiting(1, 0, 0);
              opened->put_waiting(1, 1, 1000000000000);
              return 0;
            }),
            0);
  EXPECT_EQ(made->waiting(1, 0), 0U);
  EXPECT_EQ(made->waiting(1, 1), 1000000000000U);
  EXPECT_EQ(made->waiting(0, kMostWires - 1), 77U);
  EXPECT_FALSE(made->waiting(0, 0));
  EXPECT_EQ(made->through(For::kInPlace), 0U) << "its words are others";
}

TEST(NodePage, HasRoomForManyRanks) {
  constexpr int kRanks = 200;
  auto made = NodePage::make(kRanks);
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  auto opened = NodePage::open(made->ticket(), kRanks);
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_EQ(made->through(For::kInPlace), 0U) << r;
    (r % 2 == 0 ? made : opened)->put(r, For::kInPlace, static_cast<uint64_t>(r) + 1);
  }
  EXPECT_EQ(opened->through(For::kInPlace), 1U);
}

TEST(NodePage, WhatIsNoPageOfThisNodeIsRefused) {
  auto made = NodePage::make(2);
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  const auto ticket = made->ticket();
  auto wrong = ticket;
  wrong.back() = static_cast<char>(wrong.back() ^ 1);  // what another container's process has there
  for (const auto& bad : {wrong, std::string(NodePage::kTicketBytes, '\0'), ticket.substr(1),
                          std::string(NodePage::kTicketBytes, '\x7f')}) {
    auto opened = NodePage::open(bad, 2);
    EXPECT_EQ(opened.status().code(), Code::kUnavailable);
    EXPECT_NE(opened.status().message().find("the node's page"), std::string::npos)
        << opened.status().message();
  }
  made->settled();
  EXPECT_NE(in_a_child([&] { return NodePage::open(ticket, 2).is_ok() ? 0 : 1; }), 0);
}

constexpr uint64_t kCount = 4096;

/// An all-reduce of ones that the default stream waits for.
Result<uint64_t> reduce(Path& path, const Tensor& tensor) {
  std::fill_n(tensor.as<float>(), kCount, 1.0F);
  AllReduce a;
  a.data = tensor.address();
  a.count = kCount;
  PACELINE_ASSIGN(const auto id, path.all_reduce(a));
  PACELINE_RETURN_IF_ERROR(path.join(id, nullptr));
  return id;
}

bool is_through(Cluster& cluster, std::chrono::milliseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (cluster.machine().api().stream_query(nullptr) != 0) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// What the ranks of a node tell each other over the wire stays under way. Rank 3 has no page, so its node meets over the wire;
// where gradients are given, too, it could send nothing to the other node, so there all have one.
TEST(NodePage, ANodeThatHasItMeetsWithoutTheWire) {
  for (const auto& way : {std::pair{false, false}, {true, false}, {false, true}}) {
    const bool ahead = way.first, gives = way.second;
    ClusterOptions o;
    o.local_size = 2;
    o.wires = 1;
    o.node_gather = "copies";
    Cluster cluster(o);
    std::barrier all(cluster.size());
    cluster.run([&](Rank r) {
      PathOptions options{.ahead = ahead, .node_page = r != 3 || gives};
      options.node_reduce = gives ? "copies" : "nccl";
      auto made = cluster.create(r, options);
      ASSERT_TRUE(made.is_ok()) << made.status().message();
      auto& path = **made;
      Tensor tensor(cluster, r, kCount * sizeof(float));
      ASSERT_TRUE(reduce(path, tensor).is_ok());
      bool finite = false;
      ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
      EXPECT_TRUE(is_through(cluster, std::chrono::seconds(10)));
      EXPECT_EQ(tensor.as<float>()[kCount - 1], 4.0F);
      for (bool held : {true, false}) {
        all.arrive_and_wait();
        if (r % 2 == 0) cluster.network().hold_between(r, r + 1, held);
        all.arrive_and_wait();
        if (held) {
          ASSERT_TRUE(reduce(path, tensor).is_ok());
        }
        const bool waits = held && r >= 2 && !gives;
        EXPECT_EQ(is_through(cluster, std::chrono::milliseconds(waits ? 100 : 10000)), !waits) << r;
      }
      EXPECT_EQ(tensor.as<float>()[0], 4.0F);
      EXPECT_EQ(tensor.as<float>()[kCount - 1], 4.0F);
      ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
      EXPECT_TRUE(path.destroy().is_ok());
    });
  }
}

// Steps run into each other, and ranks come at their own time.
TEST(NodePage, ManyOperationsAtATime) {
  for (bool page : {true, false}) {
    ClusterOptions o;
    o.local_size = 3;
    o.machine.delays_us = 200;
    Cluster cluster(o);
    cluster.run([&](Rank r) {
      auto made = cluster.create(r, {.node_page = page});
      ASSERT_TRUE(made.is_ok()) << made.status().message();
      auto& path = **made;
      std::vector<std::unique_ptr<Tensor>> tensors;
      std::mt19937 random(static_cast<unsigned>(r));
      for (int i = 0; i < 40; ++i) {
        tensors.push_back(std::make_unique<Tensor>(cluster, r, kCount * sizeof(float)));
        ASSERT_TRUE(reduce(path, *tensors.back()).is_ok());
        if (random() % 4 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
      }
      bool finite = false;
      ASSERT_TRUE(path.wait_arrival(0, finite).is_ok());
      ASSERT_TRUE(is_through(cluster, std::chrono::seconds(10)));
      for (const auto& t : tensors) EXPECT_EQ(t->as<float>()[kCount / 2], 6.0F);
      EXPECT_TRUE(path.destroy().is_ok());
    });
  }
}

}  // namespace
}  // namespace paceline::gpu
