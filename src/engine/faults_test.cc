// What happens when ranks disagree, die, stop, or never come: every rank ends with a sentence that
// names who.
#include <gtest/gtest.h>

#include "engine/engine_test_util.h"

namespace paceline::engine {
namespace {

using plan::Collective;

Operation all_reduce(std::vector<float>& data, const std::string& name,
                     const std::string& shape = "") {
  Operation o;
  o.count = data.size();
  o.input = o.output = data.data();
  o.name = name;
  o.shape = shape;
  return o;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Faults, ShapesThatDifferAreToldOnEveryRankWithBothShapes) {
  Cluster cluster(4);
  std::vector<float> a(64 * 128);
  std::vector<float> b(64 * 127);
  std::vector<OpId> ids;
  for (Rank r = 0; r < 4; ++r)
    ids.push_back(*cluster[r].submit(r == 2 ? all_reduce(b, "layer1.weight", "[64, 127]")
                                            : all_reduce(a, "layer1.weight", "[64, 128]"),
                                     0));
  ASSERT_TRUE(cluster.drive([&] {
    for (Rank r = 0; r < 4; ++r) {
      if (cluster[r].outcome(ids[static_cast<std::size_t>(r)]) == nullptr) return false;
    }
    return true;
  }));
  EXPECT_LT(cluster.now, 5 * kSecond);
  for (Rank r = 0; r < 4; ++r) {
    auto status = cluster[r].outcome(ids[static_cast<std::size_t>(r)])->status;
    EXPECT_EQ(status.code(), Code::kMismatch);
    EXPECT_TRUE(contains(status.message(), "all-reduce 'layer1.weight': rank "))
        << status.message();
    EXPECT_TRUE(contains(status.message(), "float32 [64, 128]")) << status.message();
    EXPECT_TRUE(contains(status.message(), "rank 2 (host host-c) has float32 [64, 127]"))
        << status.message();
  }
}

TEST(Faults, AMessageShorterThanThePlanSaysIsRefused) {
  std::mt19937_64 random(3);
  for (const auto codec : {plan::Codec::kNone, plan::Codec::kFp16}) {
    Cluster cluster(2);
    std::vector<std::vector<float>> data(2, random_values<float>(random, 5000));
    std::vector<OpId> ids;
    cluster.network().cut_next(4);
    for (auto& mine : data) {
      auto o = all_reduce(mine, "layer1.weight");
      o.codec.codec = codec;
      o.algorithm = plan::Algorithm::kDirect;
      ids.push_back(*cluster[static_cast<Rank>(ids.size())].submit(o, 0));
    }
    ASSERT_TRUE(cluster.drive([&] {
      return cluster[0].outcome(ids[0]) != nullptr && cluster[1].outcome(ids[1]) != nullptr;
    }));
    EXPECT_EQ(cluster[0].outcome(ids[0])->status.code(), Code::kMismatch);
    EXPECT_EQ(cluster[1].outcome(ids[1])->status.code(), Code::kMismatch);
  }
}

TEST(Faults, TypesThatDiffer) {
  Cluster cluster(2);
  std::vector<float> a(100);
  std::vector<int32_t> b(100);
  auto first = *cluster[0].submit(all_reduce(a, "bias", "[100]"), 0);
  Operation o = all_reduce(a, "bias", "[100]");
  o.dtype = DType::kInt32;
  o.input = o.output = b.data();
  auto second = *cluster[1].submit(o, 0);
  ASSERT_TRUE(
      cluster.drive([&] { return cluster[0].outcome(first) && cluster[1].outcome(second); }));
  EXPECT_EQ(cluster[0].outcome(first)->status.message(),
            "all-reduce 'bias': rank 0 (host host-a) has float32 [100], rank 1 (host host-b) has "
            "int32 [100]");
  EXPECT_EQ(cluster[0].outcome(first)->status.message(),
            cluster[1].outcome(second)->status.message());
  EXPECT_FALSE(cluster[0].submit(all_reduce(a, "bias"), 0)) << "the engine has ended";
}

TEST(Faults, DifferentSizesThatNeverMeetOnTheWireEndWithinSeconds) {
  // 3 floats go by a latency-bound plan, a million by a bandwidth-bound one.
  Cluster cluster(8);
  std::vector<float> small(3);
  std::vector<float> big(1 << 20);
  std::vector<OpId> ids;
  for (Rank r = 0; r < 8; ++r)
    ids.push_back(*cluster[r].submit(all_reduce(r == 5 ? small : big, "x"), 0));
  ASSERT_TRUE(cluster.drive([&] {
    for (Rank r = 0; r < 8; ++r) {
      if (cluster[r].outcome(ids[static_cast<std::size_t>(r)]) == nullptr) return false;
    }
    return true;
  }));
  EXPECT_LT(cluster.now, 10 * kSecond);
  for (Rank r = 0; r < 8; ++r)
    EXPECT_EQ(cluster[r].outcome(ids[static_cast<std::size_t>(r)])->status.code(), Code::kMismatch);
}

TEST(Faults, AnOperationTooManyOnOneRankIsAMismatchOfNames) {
  Cluster cluster(3);
  std::vector<float> data(10);
  std::vector<float> more(20);
  (void)cluster[1].submit(all_reduce(more, "extra"), 0);
  std::vector<OpId> ids;
  for (Rank r = 0; r < 3; ++r) ids.push_back(*cluster[r].submit(all_reduce(data, "grad"), 0));
  ASSERT_TRUE(cluster.drive([&] {
    for (Rank r = 0; r < 3; ++r) {
      if (cluster[r].outcome(ids[static_cast<std::size_t>(r)]) == nullptr) return false;
    }
    return true;
  }));
  auto text = cluster[0].outcome(ids[0])->status.message();
  EXPECT_TRUE(contains(text, "'extra'")) << text;
  EXPECT_TRUE(contains(text, "'grad'")) << text;
  EXPECT_TRUE(contains(text, "rank 1 (host host-b)")) << text;
}

TEST(Faults, ARankThatNeverComesIsNamedAfterTheTimeout) {
  for (auto algorithm : {plan::Algorithm::kRing, plan::Algorithm::kTree}) {
    Cluster cluster(5);
    std::vector<float> data(5000);
    std::vector<OpId> ids;
    for (Rank r = 0; r < 5; ++r) {
      if (r == 3) continue;
      auto o = all_reduce(data, "bucket 7");
      o.timeout = 7 * kSecond;
      o.algorithm = algorithm;
      ids.push_back(*cluster[r].submit(o, r * 10 * kMillisecond));
    }
    ASSERT_TRUE(
        cluster.drive([&] { return cluster[0].outcome(ids[0]) && cluster[4].outcome(ids[3]); }));
    EXPECT_GE(cluster.now, 7 * kSecond);
    EXPECT_LT(cluster.now, 10 * kSecond);
    for (Rank r : {0, 1, 2, 4}) {
      auto status = cluster[r].health();
      EXPECT_EQ(status.code(), Code::kTimeout) << status.to_string();
      EXPECT_TRUE(contains(status.message(),
                           "all-reduce 'bucket 7' timed out after 7 s: rank 3 (host host-d) has "
                           "not submitted it"))
          << status.message();
    }
  }
}

TEST(Faults, AStoppedRankIsNamed) {
  Cluster cluster(4);
  std::vector<float> data(5000);
  cluster.freeze(2);
  std::vector<OpId> ids;
  for (Rank r : {0, 1, 3}) {
    auto o = all_reduce(data, "w");
    o.timeout = 3 * kSecond;
    ids.push_back(*cluster[r].submit(o, 0));
  }
  ASSERT_TRUE(cluster.drive([&] {
    return cluster[0].outcome(ids[0]) && cluster[1].outcome(ids[1]) && cluster[3].outcome(ids[2]);
  }));
  EXPECT_LT(cluster.now, 6 * kSecond);
  for (Rank r : {0, 1, 3})
    EXPECT_TRUE(contains(cluster[r].health().message(), "rank 2 (host host-c) does not answer"))
        << cluster[r].health().message();
}

// Rank 3 has not sent what rank 1 waits for because it waits for rank 2, on something else than this network.
TEST(Faults, WhoIsHeldUpIsNotBlamed) {
  for (const bool found : {true, false}) {
    Cluster cluster(4);
    std::vector<float> data(8);
    if (found) cluster.freeze(2);
    cluster[3].hold("waits for its GPU");
    std::vector<OpId> ids;
    for (Rank r : {0, 1}) {
      Transfer t;
      t.peer = r + 2;
      t.data = data.data();
      t.bytes = 16;
      t.name = "piece";
      t.timeout = (r == 0 && !found ? 30 : 3) * kSecond;
      ids.push_back(*cluster[r].receive(t, 0));
    }
    ASSERT_TRUE(cluster.drive([&] { return !cluster[0].health() && !cluster[3].health(); }));
    EXPECT_GE(cluster.now, 3 * kSecond);
    EXPECT_LT(cluster.now, 5 * kSecond);
    for (Rank r : {0, 1, 3}) {
      EXPECT_EQ(cluster[r].health().code(), Code::kTimeout);
      EXPECT_TRUE(contains(cluster[r].health().message(),
                           found ? "rank 2 (host host-c) does not answer"
                                 : "on rank 1 (host host-b), waiting for rank 3 (host host-d), "
                                   "which waits for its GPU"))
          << cluster[r].health().message();
    }
  }
  // Nothing holds it up any more: it is late by itself.
  Cluster cluster(2);
  std::vector<float> data(8);
  cluster[1].hold("waits for its GPU");
  Transfer t;
  t.peer = 1;
  t.data = data.data();
  t.bytes = 16;
  t.timeout = 3 * kSecond;
  ASSERT_TRUE(cluster[0].receive(t, 0));
  cluster[1].hold(nullptr);
  ASSERT_TRUE(cluster.drive([&] { return !cluster[0].health(); }));
  EXPECT_TRUE(contains(cluster[0].health().message(), "rank 1 (host host-b) has not submitted it"))
      << cluster[0].health().message();
}

// Rank 1 has not come to what rank 0 waits for because rank 2 holds it up in what came before.
TEST(Faults, WhoIsHeldUpInAnEarlierOperationIsNotBlamed) {
  Cluster cluster(3);
  cluster.freeze(2);
  std::vector<std::vector<float>> early(2, std::vector<float>(100)), late = early;
  for (Rank r : {0, 1}) {
    auto o = all_reduce(early[static_cast<std::size_t>(r)], "early");
    o.collective = plan::Collective::kReduce;
    o.root = 1;
    o.timeout = 100 * kSecond;
    ASSERT_TRUE(cluster[r].submit(o, 0));
  }
  auto o = all_reduce(late[0], "late");
  o.timeout = 3 * kSecond;
  ASSERT_TRUE(cluster[0].submit(o, 0));
  ASSERT_TRUE(cluster.drive([&] { return !cluster[0].health(); }));
  EXPECT_LT(cluster.now, 6 * kSecond);
  EXPECT_TRUE(contains(cluster[0].health().message(), "rank 2 (host host-c) does not answer"))
      << cluster[0].health().message();
}

TEST(Faults, DeathOfOneEndsAllEvenIdleOnesNamingRankAndHost) {
  for (Rank size : {2, 7, 40}) {
    Cluster cluster(size);
    Rank victim = size / 2;
    std::vector<std::vector<float>> data(static_cast<std::size_t>(size),
                                         std::vector<float>(100000, 1));
    std::vector<OpId> ids;
    for (Rank r = 0; r < size; ++r) {
      auto id = cluster[r].submit(all_reduce(data[static_cast<std::size_t>(r)], "g"), 0);
      ids.push_back(*id);
    }
    std::vector<OpId> ended;
    for (Rank r = 0; r < size; ++r) cluster[r].progress(0, ended);
    cluster.kill(victim);
    ASSERT_TRUE(cluster.drive([&] {
      for (Rank r = 0; r < size; ++r) {
        if (r == victim) continue;
        if (cluster[r].outcome(ids[static_cast<std::size_t>(r)]) == nullptr) return false;
        if (cluster[r].health().is_ok()) return false;  // its own part may have ended well before
      }
      return true;
    }));
    EXPECT_LT(cluster.now, 2 * kSecond);
    for (Rank r = 0; r < size; ++r) {
      if (r == victim) continue;
      EXPECT_EQ(cluster[r].health().code(), Code::kPeerLost);
      auto name = test_topology(0, size, 1).name(victim);
      EXPECT_TRUE(contains(cluster[r].health().message(), name)) << cluster[r].health().message();
    }
  }
}

// What a rank said before it left counts, not that it left: the others must not blame the messenger.
TEST(Faults, ARankThatLeavesWithAFailureIsNotBlamedForIt) {
  Cluster cluster(4);
  std::vector<std::vector<float>> data(4, std::vector<float>(100000, 1));
  std::vector<OpId> ids;
  std::vector<OpId> ended;
  for (Rank r = 0; r < 4; ++r)
    ids.push_back(*cluster[r].submit(all_reduce(data[static_cast<std::size_t>(r)], "g"), 0));
  for (Rank r = 0; r < 4; ++r) cluster[r].progress(0, ended);
  cluster[1].abort({Code::kMismatch, "the shapes differ"});
  ASSERT_TRUE(cluster.drive([&] { return cluster[1].outcome(ids[1]) != nullptr; }));
  cluster.kill(1);
  ASSERT_TRUE(cluster.drive([&] {
    return cluster[0].outcome(ids[0]) && cluster[2].outcome(ids[2]) && cluster[3].outcome(ids[3]);
  }));
  for (Rank r : {0, 2, 3}) {
    EXPECT_EQ(cluster[r].health().code(), Code::kMismatch) << cluster[r].health().to_string();
    EXPECT_TRUE(contains(cluster[r].health().message(), "the shapes differ"));
  }
}

TEST(Faults, AbortReachesEverybodyAndLeavesBuffersAlone) {
  Cluster cluster(40);
  std::vector<float> data(1000);
  std::vector<OpId> ids;
  for (Rank r = 1; r < 40; ++r) ids.push_back(*cluster[r].submit(all_reduce(data, "g"), 0));
  cluster[17].abort({Code::kAborted, "the user pressed a key"});
  ASSERT_TRUE(cluster.drive([&] {
    for (Rank r = 1; r < 40; ++r) {
      if (cluster[r].outcome(ids[static_cast<std::size_t>(r - 1)]) == nullptr) return false;
    }
    return !cluster[0].health().is_ok();
  }));
  for (Rank r = 0; r < 40; ++r) {
    EXPECT_EQ(cluster[r].health().message(),
              "rank 17 (host host-r) ended the job: the user pressed a key");
    EXPECT_EQ(cluster[r].health().code(), Code::kAborted);
  }
}

TEST(Faults, AnOrderlyEndIsNoFailure) {
  for (Rank size : {1, 2, 9}) {
    Cluster cluster(size);
    std::vector<uint8_t> out(static_cast<std::size_t>(size));
    ASSERT_TRUE(cluster.drive([&] {
      bool all = true;
      for (Rank r = 0; r < size; ++r) {
        if (out[static_cast<std::size_t>(r)]) continue;
        if (cluster[r].finish(cluster.now, 60 * kSecond)) {
          out[static_cast<std::size_t>(r)] = 1;
          cluster.kill(r);
        } else {
          all = false;
        }
      }
      return all;
    }));
    EXPECT_LT(cluster.now, kSecond);
    for (Rank r = 0; r < size; ++r)
      EXPECT_TRUE(cluster[r].health()) << cluster[r].health().to_string();
  }
}

// What is under way at the deadline of the end is aborted, on all ranks, before the end is said: after it the buffers
// belong to the caller again. Operations whose own deadline is the same say by themselves who did not come.
TEST(Faults, AnEndThatOperationsOutlastAbortsThem) {
  for (const Time own : {60 * kSecond, 2 * kSecond}) {
    Cluster cluster(2);
    std::vector<float> data(10);
    auto o = all_reduce(data, "grad");
    o.timeout = own;
    auto a = *cluster[0].submit(o, 0);
    bool ended = false;
    ASSERT_TRUE(cluster.drive([&] {
      if (!ended) ended = cluster[0].finish(cluster.now, 2 * kSecond);
      return ended && !cluster[1].health().is_ok();
    }));
    EXPECT_LT(cluster.now, 6 * kSecond);
    ASSERT_NE(cluster[0].outcome(a), nullptr) << "it runs on after the end";
    const char* words = own == 2 * kSecond
                            ? "all-reduce 'grad' timed out after 2 s"
                            : "rank 0 (host host-a) has ended its communicator before "
                              "all-reduce 'grad' had";
    for (Rank r = 0; r < 2; ++r) {
      EXPECT_TRUE(contains(cluster[r].health().message(), words)) << cluster[r].health().message();
    }
  }
}

TEST(Faults, LeavingWhileOthersStillWorkIsNamedSoon) {
  Cluster cluster(3);
  std::vector<float> data(10);
  auto a = *cluster[0].submit(all_reduce(data, "late"), 0);
  auto b = *cluster[1].submit(all_reduce(data, "late"), 0);
  ASSERT_TRUE(cluster.drive([&] {
    cluster[2].finish(cluster.now, 60 * kSecond);
    return cluster[0].outcome(a) && cluster[1].outcome(b);
  }));
  EXPECT_LT(cluster.now, 3 * kSecond);
  EXPECT_TRUE(
      contains(cluster[0].health().message(), "rank 2 (host host-c) has ended its communicator"))
      << cluster[0].health().message();
}

TEST(Faults, AllToAllWhoseCountsDoNotFitNamesThePair) {
  for (uint64_t expected : {6, 0}) {
    Cluster cluster(3);
    std::vector<float> in(15);
    std::vector<float> out(30);
    std::vector<OpId> ids;
    for (Rank r = 0; r < 3; ++r) {
      Operation o;
      o.collective = Collective::kAllToAll;
      o.name = "tokens";
      o.send_counts = {5, 5, 5};
      o.receive_counts = {5, 5, 5};
      if (r == 1) o.receive_counts[2] = expected;
      o.input = in.data();
      o.output = out.data();
      ids.push_back(*cluster[r].submit(o, 0));
    }
    ASSERT_TRUE(cluster.drive(
        [&] { return !cluster[0].health().is_ok() && !cluster[1].health().is_ok(); }));
    EXPECT_LT(cluster.now, 8 * kSecond);
    EXPECT_TRUE(contains(cluster[1].health().message(),
                         "all-to-all 'tokens': rank 2 (host host-c) sends 5 elements "
                         "to rank 1 (host host-b), which expects " +
                             std::to_string(expected)))
        << cluster[1].health().message();
  }
}

TEST(Validation, BadArgumentsAreNamed) {
  Cluster cluster(2);
  std::vector<float> data(10);
  auto refused = [&](auto change, Code code, const std::string& part) {
    auto o = all_reduce(data, "x");
    change(o);
    auto id = cluster[0].submit(o, 0);
    ASSERT_FALSE(id.is_ok()) << part;
    EXPECT_EQ(id.status().code(), code) << id.status().to_string();
    EXPECT_TRUE(contains(id.status().message(), part)) << id.status().message();
  };
  refused([](Operation& o) { o.input = nullptr; }, Code::kInvalidArgument, "input buffer is null");
  refused([](Operation& o) { o.dtype = static_cast<DType>(77); }, Code::kInvalidArgument,
          "no dtype 77");
  refused([&](Operation& o) { o.output = data.data() + 1; }, Code::kInvalidArgument,
          "overlap in part");
  refused(
      [&](Operation& o) {
        o.dtype = DType::kInt32;
        o.op = ReduceOp::kAverage;
      },
      Code::kUnsupported, "average of int32");
  refused(
      [&](Operation& o) {
        o.dtype = DType::kFloat64;
        o.count = 5;
        o.codec.codec = plan::Codec::kFp16;
      },
      Code::kUnsupported, "float64");
  refused(
      [](Operation& o) {
        o.collective = Collective::kBroadcast;
        o.root = 2;
      },
      Code::kInvalidArgument, "root 2");
  refused([](Operation& o) { o.group = 9; }, Code::kInvalidArgument, "no group 9");
  refused(
      [](Operation& o) {
        o.collective = Collective::kAllGather;
        o.counts = {1, 2, 3};
      },
      Code::kInvalidArgument, "counts has 3 entries");
  refused([](Operation& o) { o.counts = {1, 1}; }, Code::kInvalidArgument, "no use for counts");
  refused(
      [](Operation& o) {
        o.send_counts = {1, 1};
      },
      Code::kInvalidArgument, "no use for counts");
  refused([](Operation& o) { o.count = 1ULL << 62; }, Code::kInvalidArgument,
          "more than memory can hold");
  // Before a plan is made for it.
  refused([](Operation& o) { o.count = 1ULL << 52; }, Code::kInvalidArgument,
          "more than memory can hold");
  refused(
      [](Operation& o) {
        o.collective = Collective::kAllToAll;
        o.send_counts = {3, 1};
        o.receive_counts = {2, 1};
      },
      Code::kInvalidArgument, "sends itself 3 elements and expects 2");
  for (const auto codec : {plan::Codec::kNone, plan::Codec::kFp16, plan::Codec::kTopK}) {
    const auto with = [&](std::vector<Segment> segments) {
      return [codec, segments](Operation& o) {
        o.codec.codec = codec;
        o.segments = segments;
      };
    };
    refused(with({{1, 0, 6}, {2, 0, 5}}), Code::kInvalidArgument,
            "segments hold 11 elements, the buffer 10");
    // Sums and ends that wrap.
    refused(with({{1, 0, 1ULL << 63}, {2, 0, 1ULL << 63}, {3, 0, 10}}), Code::kInvalidArgument,
            "of parameter 1: more than memory can hold");
    refused(with({{7, UINT64_MAX - 4, 10}}), Code::kInvalidArgument,
            "of parameter 7: more than memory can hold");
  }
  EXPECT_TRUE(cluster[0].health()) << "a refused operation ends nothing";
}

TEST(Groups, OperationsOfOverlappingGroupsDoNotMeet) {
  Cluster cluster(4);
  std::vector<std::vector<float>> a(4, std::vector<float>(50));
  std::vector<std::vector<float>> b(4, std::vector<float>(50));
  std::vector<GroupId> low(4);
  std::vector<GroupId> odd(4);
  std::vector<Rank> low_ranks{2, 0, 1};
  std::vector<Rank> odd_ranks{1, 3};
  for (Rank r : low_ranks) low[static_cast<std::size_t>(r)] = *cluster[r].create_group(low_ranks);
  for (Rank r : odd_ranks) odd[static_cast<std::size_t>(r)] = *cluster[r].create_group(odd_ranks);
  EXPECT_FALSE(cluster[3].create_group(low_ranks)) << "not a member";
  std::vector<std::pair<Rank, OpId>> ids;
  for (Rank r = 0; r < 4; ++r) {
    auto i = static_cast<std::size_t>(r);
    std::fill(a[i].begin(), a[i].end(), static_cast<float>(1 << r));
    std::fill(b[i].begin(), b[i].end(), static_cast<float>(100 << r));
    auto submit = [&](GroupId g, std::vector<float>& data) {
      auto o = all_reduce(data, "t");
      o.group = g;
      ids.emplace_back(r, *cluster[r].submit(o, 0));
    };
    bool in_odd = r % 2 == 1;
    if (in_odd && r == 1) submit(odd[i], b[i]);  // rank 1 takes the groups in the other order
    if (r < 3) submit(low[i], a[i]);
    if (in_odd && r == 3) submit(odd[i], b[i]);
  }
  ASSERT_TRUE(cluster.drive([&] {
    for (auto [r, id] : ids) {
      if (cluster[r].outcome(id) == nullptr) return false;
    }
    return true;
  }));
  for (Rank r : low_ranks) EXPECT_EQ(a[static_cast<std::size_t>(r)], std::vector<float>(50, 7));
  for (Rank r : odd_ranks) EXPECT_EQ(b[static_cast<std::size_t>(r)], std::vector<float>(50, 1000));
  EXPECT_TRUE(cluster[0].destroy_group(low[0]));
  EXPECT_FALSE(cluster[0].destroy_group(low[0]));
  EXPECT_FALSE(cluster[0].destroy_group(kWorld));
}

}  // namespace
}  // namespace paceline::engine
