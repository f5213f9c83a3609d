// The other collectives, for random groups, sizes, types and operations.
#include <gtest/gtest.h>

#include "plan/plan_cases.h"

namespace paceline::plan {
namespace {

using testing::Case;
using testing::describe;
using testing::Dice;
using testing::Memory;
using testing::near;
using testing::random_request;
using testing::reduce_in_order;
using testing::run;

template <class Check>
void property(Collective collective, std::initializer_list<Algorithm> algorithms, uint64_t seeds,
              Check check) {
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    Dice dice(seed * 31 + static_cast<uint64_t>(collective));
    PlanRequest q = random_request(dice);
    q.collective = collective;
    q.algorithm = dice.one_of(algorithms);
    auto n = static_cast<uint64_t>(q.shape.size);
    bool often_empty = dice.coin();
    for (uint64_t r = 0; r < n; ++r)
      q.counts.push_back(often_empty && dice.coin() ? 0 : dice.below(300));
    if (collective == Collective::kAllToAll) {
      for (uint64_t i = 0; i < n * n; ++i)
        q.send_counts.push_back(dice.below(often_empty ? 3 : 100));
      q.in_place = false;
    }
    if (collective == Collective::kGather || collective == Collective::kScatter) q.in_place = false;
    SCOPED_TRACE(describe(q, seed));
    Case c = run(q, seed);
    if (!::testing::Test::HasFailure()) check(c);
    if (::testing::Test::HasFailure()) return;
  }
}

std::vector<std::byte> block(const std::vector<std::byte>& bytes,
                             const std::vector<uint64_t>& counts, std::size_t r,
                             std::size_t element) {
  uint64_t before = 0;
  for (std::size_t k = 0; k < r; ++k) before += counts[k];
  auto from = bytes.begin() + static_cast<std::ptrdiff_t>(before * element);
  return {from, from + static_cast<std::ptrdiff_t>(counts[r] * element)};
}

std::vector<std::byte> joined(const std::vector<std::vector<std::byte>>& parts) {
  std::vector<std::byte> out;
  for (const auto& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

TEST(Broadcast, EveryRankHasTheRootsBuffer) {
  property(Collective::kBroadcast, {Algorithm::kRing, Algorithm::kTree, Algorithm::kAuto}, 100,
           [](const Case& c) {
             for (const Memory& m : c.after)
               ASSERT_EQ(m.output, c.inputs[static_cast<std::size_t>(c.request.root)]);
           });
}

TEST(AllGather, BlocksInRankOrder) {
  property(Collective::kAllGather,
           {Algorithm::kRing, Algorithm::kDirect, Algorithm::kTwoLevel, Algorithm::kAuto}, 150,
           [](const Case& c) {
             for (const Memory& m : c.after) ASSERT_EQ(m.output, joined(c.inputs));
           });
}

void expect_reduce_scattered(const Case& c) {
  const PlanRequest& q = c.request;
  std::size_t size = dtype_size(q.dtype);
  uint64_t at = 0;
  for (std::size_t r = 0; r < c.after.size(); ++r) {
    for (uint64_t i = 0; i < q.counts[r]; ++i) {
      std::vector<const std::byte*> elements;
      for (const auto& input : c.inputs) elements.push_back(input.data() + (at + i) * size);
      uint64_t place = q.in_place ? at + i : i;
      ASSERT_TRUE(near(q, c.after[r].output.data() + place * size, reduce_in_order(q, elements)))
          << "rank " << r;
    }
    at += q.counts[r];
  }
}

TEST(ReduceScatter, EachRankHasItsBlockOfTheReduction) {
  property(Collective::kReduceScatter,
           {Algorithm::kRing, Algorithm::kDirect, Algorithm::kTwoLevel, Algorithm::kAuto}, 150,
           expect_reduce_scattered);
}

TEST(ReduceScatter, WithCodec) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Dice dice(seed);
    PlanRequest q = random_request(dice);
    q.collective = Collective::kReduceScatter;
    q.algorithm = dice.one_of({Algorithm::kDirect, Algorithm::kTwoLevel, Algorithm::kAuto});
    q.dtype = DType::kFloat32;
    q.codec.codec = dice.one_of({Codec::kFp16, Codec::kBf16});
    if (q.op == ReduceOp::kProduct) q.op = ReduceOp::kMax;
    for (Rank r = 0; r < q.shape.size; ++r) q.counts.push_back(dice.below(200));
    SCOPED_TRACE(describe(q, seed));
    expect_reduce_scattered(run(q, seed));
    if (HasFailure()) return;
  }
}

TEST(AllToAll, Transposes) {
  property(Collective::kAllToAll, {Algorithm::kDirect, Algorithm::kAuto}, 80, [](const Case& c) {
    const PlanRequest& q = c.request;
    auto n = static_cast<std::size_t>(q.shape.size);
    for (std::size_t r = 0; r < n; ++r) {
      std::vector<std::vector<std::byte>> parts;
      PlanRequest mine = q;  // the form with this rank's counts alone gives the same plan
      mine.send_counts.clear();
      for (std::size_t s = 0; s < n; ++s) {
        auto begin = q.send_counts.begin() + static_cast<std::ptrdiff_t>(s * n);
        std::vector<uint64_t> row(begin, begin + static_cast<std::ptrdiff_t>(n));
        parts.push_back(block(c.inputs[s], row, r, dtype_size(q.dtype)));
        mine.send_counts.push_back(q.send_counts[r * n + s]);
        mine.receive_counts.push_back(row[r]);
      }
      ASSERT_EQ(c.after[r].output, joined(parts));
      auto plan = build(mine, static_cast<Rank>(r));
      ASSERT_TRUE(plan) << plan.status().to_string();
      ASSERT_EQ(plan->steps, c.plans[r].steps);
    }
  });
}

TEST(Reduce, RootHasTheReduction) {
  property(Collective::kReduce, {Algorithm::kRing, Algorithm::kTree, Algorithm::kAuto}, 100,
           [](const Case& c) {
             const PlanRequest& q = c.request;
             std::size_t size = dtype_size(q.dtype);
             const Memory& root = c.after[static_cast<std::size_t>(q.root)];
             for (uint64_t i = 0; i < q.count; ++i) {
               std::vector<const std::byte*> elements;
               for (const auto& input : c.inputs) elements.push_back(input.data() + i * size);
               ASSERT_TRUE(near(q, root.output.data() + i * size, reduce_in_order(q, elements)));
             }
           });
}

TEST(Gather, RootHasAllBlocks) {
  property(Collective::kGather, {Algorithm::kDirect, Algorithm::kAuto}, 50, [](const Case& c) {
    ASSERT_EQ(c.after[static_cast<std::size_t>(c.request.root)].output, joined(c.inputs));
  });
}

TEST(Scatter, EachRankHasItsBlock) {
  property(Collective::kScatter, {Algorithm::kDirect, Algorithm::kAuto}, 50, [](const Case& c) {
    const auto& source = c.inputs[static_cast<std::size_t>(c.request.root)];
    for (std::size_t r = 0; r < c.after.size(); ++r) {
      ASSERT_EQ(c.after[r].output, block(source, c.request.counts, r, dtype_size(c.request.dtype)));
    }
  });
}

// Nobody can end before everybody has begun: each rank's last steps depend, over messages, on every
// rank's first.
TEST(Barrier, NobodyLeavesBeforeAllHaveCome) {
  for (Rank n = 1; n <= 17; ++n) {
    PlanRequest q;
    q.collective = Collective::kBarrier;
    q.shape.size = n;
    q.shape.node_of.assign(static_cast<std::size_t>(n), 0);
    Case c = run(q, static_cast<uint64_t>(n));
    ASSERT_FALSE(HasFailure());
    auto ranks = static_cast<std::size_t>(n);
    // heard[r][s]: whom rank r has heard of once its step s has ended.
    std::vector<std::vector<std::vector<bool>>> heard(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      heard[r].assign(c.plans[r].steps.size(), std::vector<bool>(ranks));
      for (auto& h : heard[r]) h[r] = true;
    }
    for (int sweep = 0; sweep < 8; ++sweep) {
      for (std::size_t r = 0; r < ranks; ++r) {
        const auto& steps = c.plans[r].steps;
        for (std::size_t i = 0; i < steps.size(); ++i) {
          auto merge = [&](const std::vector<bool>& other) {
            for (std::size_t k = 0; k < ranks; ++k) {
              if (other[k]) heard[r][i][k] = true;
            }
          };
          for (uint32_t d : steps[i].after) merge(heard[r][d]);
          if (steps[i].kind != StepKind::kReceive) continue;
          auto from = static_cast<std::size_t>(steps[i].peer);
          const auto& theirs = c.plans[from].steps;
          for (std::size_t k = 0; k < theirs.size(); ++k) {
            bool match = theirs[k].kind == StepKind::kSend &&
                         theirs[k].peer == static_cast<Rank>(r) && theirs[k].slot == steps[i].slot;
            if (match) merge(heard[from][k]);
          }
        }
      }
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      std::vector<bool> all(ranks);
      all[r] = true;
      for (const auto& h : heard[r]) {
        for (std::size_t k = 0; k < ranks; ++k) all[k] = all[k] || h[k];
      }
      ASSERT_EQ(std::count(all.begin(), all.end(), true), n) << "rank " << r << " of " << n;
    }
  }
}

}  // namespace
}  // namespace paceline::plan
