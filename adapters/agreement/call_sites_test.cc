// Names of call sites: equal on ranks whose executors run things in other orders, apart where operations are, and a
// refusal where neither is certain.
#include "call_sites.h"

#include <gtest/gtest.h>

#include <thread>

namespace paceline::agreement {
namespace {

constexpr uint64_t kRoot = 0;

TEST(CallPath, IsWhatInliningPutBeforeTheTracedName) {
  EXPECT_EQ(call_path("Op", "Op"), "");
  EXPECT_EQ(call_path("layer/Op_3", "layer/Op_3"), "");
  EXPECT_EQ(call_path("PartitionedCall_1/layer/Op", "layer/Op"), "PartitionedCall_1");
  EXPECT_EQ(call_path("while/body/_1/while/Op", "while/Op"), "while/body");
  EXPECT_EQ(call_path("a/while/body/_7/Call/cond/then/_12/Op", "Op"),
            "a/while/body/Call/cond/then");
  EXPECT_EQ(call_path("renamed", "Op"), "renamed");
}

TEST(CallSites, OneCallHasTheNameAloneWhateverItsPath) {
  for (const char* path : {"", "PartitionedCall", "PartitionedCall_3"}) {
    CallSites sites;
    CallSite site{"w", "trace", path};
    sites.add(site);
    const auto run = sites.begin(site, 7, kRoot, 0);
    EXPECT_EQ(run.refusal, "");
    EXPECT_EQ(run.name, "w");
    EXPECT_EQ(run.note, "");
    EXPECT_TRUE(run.is_one);
  }
}

TEST(CallSites, CallsOfOneFunctionAreToldApartAndAllPathsAreCompared) {
  const auto run_both = [](const char* one, const char* other) {
    CallSites sites;
    CallSite a{"w", "trace", one};
    CallSite b{"w", "trace", other};
    sites.add(a);
    sites.add(b);
    return std::pair{sites.begin(a, 7, kRoot, 0), sites.begin(b, 7, kRoot, 0)};
  };
  const auto [a, b] = run_both("Call", "Call_1");
  EXPECT_EQ(a.refusal + b.refusal, "");
  EXPECT_EQ(a.name, "w@Call");
  EXPECT_EQ(b.name, "w@Call_1");
  EXPECT_FALSE(a.is_one);
  EXPECT_EQ(a.note, b.note);
  // A rank whose graph has a call more before these two: its Call_1 is the others' Call.
  const auto [shifted, last] = run_both("Call_1", "Call_2");
  EXPECT_EQ(shifted.name, b.name);
  EXPECT_NE(shifted.note, b.note);
}

TEST(CallSites, TwoFunctionsOfOneNameInOneStepAreRefusedEvenOneAfterTheOther) {
  CallSites sites;
  CallSite f{"lambda.0", "f", "Call"};
  CallSite h{"lambda.0", "h", "Call_1"};
  sites.add(f);
  sites.add(h);
  const auto first = sites.begin(f, 7, kRoot, 0);
  EXPECT_EQ(first.refusal, "");
  sites.end(first.name);
  const auto second = sites.begin(h, 7, kRoot, 0);
  EXPECT_NE(second.refusal.find("'lambda.0'"), std::string::npos);
  EXPECT_NE(second.refusal.find("name="), std::string::npos);
  // In steps of their own they come one after the other on all ranks.
  const auto next = sites.begin(h, 8, kRoot, 0);
  EXPECT_EQ(next.refusal, "");
  EXPECT_EQ(next.name, "lambda.0");
}

TEST(CallSites, IterationsAreToldApart) {
  CallSites sites;
  CallSite site{"m", "body", "while/body"};
  sites.add(site);
  for (int64_t i : {2, 0, 1}) {
    const auto run = sites.begin(site, 7, 1234, i);
    EXPECT_EQ(run.refusal, "");
    EXPECT_EQ(run.name, "m#" + std::to_string(i));
    EXPECT_EQ(run.note, "");
    EXPECT_FALSE(run.is_one);
  }
}

TEST(CallSites, OfNestedLoopsTheOuterIterationIsCompared) {
  const auto run_loops = [](uint64_t first, uint64_t second) {
    CallSites sites;
    CallSite site{"m", "body", "while/body"};
    sites.add(site);
    std::string notes;
    for (uint64_t frame : {first, second}) {
      const auto run = sites.begin(site, 7, frame, 0);
      EXPECT_EQ(run.refusal, "");
      notes += run.note;
      sites.end(run.name);
    }
    return notes;
  };
  EXPECT_EQ(run_loops(11, 12), run_loops(11, 12));
  EXPECT_NE(run_loops(11, 12),
            run_loops(12, 11));  // this rank's outer iterations overtook each other
}

TEST(CallSites, WhatIsUnderWayIsRefusedFromGraphsAndOtherThreads) {
  CallSites sites;
  CallSite node{"w", "trace", ""};
  CallSite same{"w", "trace",
                ""};  // the same function once more, not inlined: a step and a node of its own
  CallSite eager{"w", "", ""};
  const auto first = sites.begin(node, 7, kRoot, 0);
  EXPECT_EQ(first.refusal, "");
  EXPECT_NE(sites.begin(same, 8, kRoot, 0).refusal, "");
  EXPECT_NE(sites.begin(eager, 9, kRoot, 0).refusal, "");
  sites.end(first.name);
  // A thread's own calls keep their order.
  EXPECT_EQ(sites.begin(eager, 9, kRoot, 0).refusal, "");
  EXPECT_EQ(sites.begin(eager, 9, kRoot, 0).refusal, "");
  std::thread([&] { EXPECT_NE(sites.begin(eager, 9, kRoot, 0).refusal, ""); }).join();
  EXPECT_NE(sites.begin(node, 10, kRoot, 0).refusal, "");
  sites.end("w");
  sites.end("w");
  EXPECT_EQ(sites.begin(node, 11, kRoot, 0).refusal, "");
}

}  // namespace
}  // namespace paceline::agreement
