#include "gpu/path_plan.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <utility>

namespace paceline::gpu {
namespace {

using device::cuda::WireCodec;

PathRequest request(int nodes, int local_size, int node, int local_rank, uint64_t count,
                    WireCodec codec = WireCodec::kFp16) {
  PathRequest q;
  q.shape = {nodes, local_size, node, local_rank};
  q.count = count;
  q.format.codec = codec;
  return q;
}

TEST(PathPlan, TwoNodesExchangeInOneHop) {
  auto plan = build_path(request(2, 2, 1, 0, 10'000'001));
  ASSERT_TRUE(plan.is_ok());
  EXPECT_EQ(plan->hops, 1);
  EXPECT_EQ(plan->shard, 5'000'000U);
  EXPECT_EQ(plan->tail, (Span{10'000'000, 1}));
  EXPECT_EQ(plan->own, (Span{0, 5'000'000}));
  ASSERT_EQ(plan->pieces.size(), 3U);
  EXPECT_EQ(plan->pieces[0].span, (Span{0, 2 << 20}));
  EXPECT_EQ(plan->wire_bytes, 10'000'000U);
  EXPECT_EQ(plan->node_bytes, 20'000'016U);  // the tail's rank rounds to 16 bytes
  EXPECT_EQ(plan->summary(),
            "2 nodes × 2: NCCL in the node, fp16 in one hop between nodes, 3 pieces over 1 lane; "
            "20.00 MB out of each node");
}

TEST(PathPlan, TheTailIsTheLastRanks) {
  auto plan = build_path(request(2, 4, 0, 3, 1003));
  ASSERT_TRUE(plan.is_ok());
  EXPECT_EQ(plan->shard, 248U);
  EXPECT_EQ(plan->own, (Span{744, 259}));
  EXPECT_EQ(plan->tail, (Span{992, 11}));
}

TEST(PathPlan, ThreeNodesExchangeDenseCodecsInTwoHops) {
  const uint64_t count = 30'000'000;
  auto dense = build_path(request(3, 1, 0, 0, count));
  auto top_k = build_path(request(3, 1, 0, 0, count, WireCodec::kTopK));
  auto small = build_path(request(3, 1, 0, 0, 1000));
  ASSERT_TRUE(dense.is_ok() && top_k.is_ok() && small.is_ok());
  EXPECT_EQ(dense->hops, 2);
  EXPECT_EQ(top_k->hops, 1);
  EXPECT_EQ(small->hops, 1);
  // 2 (n - 1) / n of the encoded buffer, but for rounding to parts.
  EXPECT_NEAR(static_cast<double>(dense->wire_bytes), 2 * count * 4.0 / 3,
              2 * count * 4.0 / 3 / 500);
  EXPECT_GT(dense->seconds(25e9), static_cast<double>(dense->wire_bytes) * 8 / 25e9);
}

TEST(PathPlan, RefusalsSayWhy) {
  EXPECT_EQ(build_path(request(1, 4, 0, 0, 8)).status().code(), Code::kUnsupported);
  EXPECT_NE(build_path(request(1, 4, 0, 0, 8)).status().message().find("NCCL alone"),
            std::string::npos);
  auto q = request(2, 1, 0, 0, 8);
  q.format.dtype = DType::kInt32;
  EXPECT_NE(build_path(q).status().message().find("int32"), std::string::npos);
  q = request(2, 1, 0, 0, 8);
  q.lanes = 0;
  EXPECT_EQ(build_path(q).status().code(), Code::kInvalidArgument);
}

// Slots are sized by this; see Path::make_slots().
TEST(PathPlan, PiecesAreAlikeInWhatTheySend) {
  std::mt19937_64 random(4);
  auto q = request(2, 2, 0, 0, 1);
  for (int round = 0; round < 300; ++round) {
    q.format.codec = static_cast<WireCodec>(random() % 5);
    q.format.dtype = std::array{DType::kFloat32, DType::kFloat16, DType::kBFloat16}[random() % 3];
    q.format.ratio = std::pow(10, -6 + 5.7 * static_cast<double>(random() % 1000) / 999);
    q.format.fp16_values = random() % 2 == 0;
    q.piece_bytes = 4096ULL << (random() % 14);
    const uint64_t elements = piece_elements(q);
    const uint64_t bytes = device::cuda::encoded_bytes(q.format, elements);
    ASSERT_LE(bytes,
              std::max(q.piece_bytes, kPieceGranule * sizeof(float)) * 17 / 16 + 2 * kPieceGranule)
        << q.format.ratio;
    ASSERT_LE(elements * dtype_size(q.format.dtype),
              std::max(kMostGradient * static_cast<double>(q.piece_bytes),
                       static_cast<double>(kPieceGranule * sizeof(float))));
    ASSERT_LE(device::cuda::state_bytes(q.format, elements), most_selection_bytes(q));
    if (q.piece_bytes >= 1U << 20 && q.format.codec != WireCodec::kTopK) {
      ASSERT_GE(bytes, q.piece_bytes * 15 / 16);
    }
  }
}

TEST(PathPlan, APromptOperationIsCutShort) {
  constexpr uint64_t kMiB = 1U << 20;
  const auto pieces = [](uint64_t bytes, WireCodec codec, int local_size = 1) {
    auto q = request(2, local_size, 0, 0, bytes / sizeof(float));
    q.piece_bytes = 4 * kMiB;
    q.format.codec = codec;
    const auto as_ever = build_path(q)->pieces.size();
    q.piece_bytes = prompt_piece_bytes(q);
    return std::pair{as_ever, build_path(q)->pieces.size()};
  };
  using Cut = std::pair<size_t, size_t>;
  EXPECT_EQ(pieces(kMiB, WireCodec::kExact), Cut(1, 1));
  EXPECT_EQ(pieces(4 * kMiB, WireCodec::kExact), Cut(1, 4));
  EXPECT_EQ(pieces(16 * kMiB, WireCodec::kExact), Cut(4, 8));
  EXPECT_EQ(pieces(64 * kMiB, WireCodec::kExact), Cut(16, 16));
  EXPECT_EQ(pieces(16 * kMiB, WireCodec::kExact, 2), Cut(2, 8));
  EXPECT_EQ(pieces(16 * kMiB, WireCodec::kFp16), Cut(2, 8));
  // What has residuals is cut as ever: which entries top-k takes depends on it.
  for (const auto codec : {WireCodec::kTopK, WireCodec::kInt8}) {
    const auto [as_ever, prompt] = pieces(64 * kMiB, codec);
    EXPECT_EQ(as_ever, prompt);
  }
}

/// What must hold for every request, tried on random ones.
TEST(PathPlan, EveryElementHasOneOwnerAndAllRanksAgree) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 300; ++round) {
    const int nodes = 2 + static_cast<int>(random() % 4);
    const int local = 1 + static_cast<int>(random() % 4);
    const uint64_t count = random() % (1ULL << (random() % 24));
    auto q = request(nodes, local, 0, 0, count, static_cast<WireCodec>(random() % 5));
    q.format.dtype = std::array{DType::kFloat32, DType::kFloat16, DType::kBFloat16}[random() % 3];
    q.piece_bytes = 4096ULL << (random() % 8);
    q.lanes = 1 + static_cast<int>(random() % 4);
    uint64_t covered = 0;
    uint64_t node_bytes = 0;
    std::vector<uint64_t> per_node;
    for (int r = 0; r < local; ++r) {
      q.shape.local_rank = r;
      PathPlan first;
      for (int n = 0; n < nodes; ++n) {
        q.shape.node = n;
        auto plan = build_path(q);
        ASSERT_TRUE(plan.is_ok());
        if (n == 0) {
          first = *plan;
          ASSERT_EQ(plan->own.first, covered);
          covered += plan->own.elements;
          node_bytes += plan->wire_bytes;
        }
        // The ranks that exchange cut alike.
        ASSERT_EQ(plan->pieces.size(), first.pieces.size());
        ASSERT_EQ(plan->hops, first.hops);
        ASSERT_EQ(plan->host_bytes, first.host_bytes);
        uint64_t at = plan->own.first;
        for (size_t i = 0; i < plan->pieces.size(); ++i) {
          const auto& p = plan->pieces[i];
          ASSERT_EQ(p.span, first.pieces[i].span);
          ASSERT_EQ(p.lane, first.pieces[i].lane);
          ASSERT_EQ(p.span.first, at);
          at += p.span.elements;
          ASSERT_EQ((p.span.first * dtype_size(q.format.dtype)) % 16, 0U);
          uint64_t part_at = p.span.first;
          for (int k = 0; k < nodes && plan->hops == 2; ++k) {
            const Span part = plan->part(p, k);
            ASSERT_EQ(part.first, part_at);
            part_at += part.elements;
            ASSERT_LE(plan->part_bytes(p, k), p.slot_bytes);
          }
          if (plan->hops == 2) {
            ASSERT_EQ(part_at, p.span.first + p.span.elements);
            ASSERT_LE(p.back_offset + static_cast<uint64_t>(nodes) * p.slot_bytes,
                      plan->host_bytes);
          }
          ASSERT_LE(p.in_offset + static_cast<uint64_t>(nodes) * p.slot_bytes, plan->host_bytes);
        }
        ASSERT_EQ(at, plan->own.first + plan->own.elements);
        if (n == 0 && r == 0) per_node.push_back(plan->node_bytes);
      }
    }
    ASSERT_EQ(covered, count);
    // What a plan says of its node is what its ranks send.
    ASSERT_EQ(per_node[0], node_bytes);
  }
}

PathRequest by_rows(int nodes, int local_size, int local_rank, uint64_t rows, uint64_t row_elements,
                    WireCodec codec = WireCodec::kExact) {
  auto q = request(nodes, local_size, 0, local_rank, rows * row_elements, codec);
  q.row_elements = row_elements;
  return q;
}

TEST(PathPlanByRows, StatesItsBound) {
  auto plan = build_path(by_rows(2, 2, 1, 50257, 1024));
  ASSERT_TRUE(plan.is_ok());
  EXPECT_EQ(plan->hops, 1);
  EXPECT_EQ(plan->own_rows, 25129U);
  EXPECT_EQ(plan->dense_bytes, 50257U * 4096);
  // A row takes 4 bytes more than in the dense plan.
  EXPECT_NEAR(static_cast<double>(plan->paying_rows), 25128.5 * 4096 / 4100, 2);
  EXPECT_NEAR(static_cast<double>(plan->node_bytes), 50257 * 4100.0, 50257 * 4100.0 / 1000);
  EXPECT_NE(plan->summary().find("206.05 MB out of each node at most, for rows of 1024 that are "
                                 "not zero: at most 25129 of 50257 a rank; up to 25103 take less "
                                 "than the 205.85 MB of all"),
            std::string::npos)
      << plan->summary();
}

TEST(PathPlanByRows, OfManyNodesFewRowsPay) {
  auto two = build_path(by_rows(2, 1, 0, 30000, 512, WireCodec::kFp16));
  auto eight = build_path(by_rows(8, 1, 0, 30000, 512, WireCodec::kFp16));
  ASSERT_TRUE(two.is_ok() && eight.is_ok());
  // Dense goes in two hops there: 2 (n - 1) / n of it, against n - 1 times the rows.
  EXPECT_NEAR(static_cast<double>(eight->paying_rows),
              static_cast<double>(two->paying_rows) * 2 / 8, 100);
}

TEST(PathPlanByRows, WhatDoesNotTravelSo) {
  for (const auto codec : {WireCodec::kTopK, WireCodec::kInt8})
    EXPECT_EQ(build_path(by_rows(2, 1, 0, 100, 64, codec)).status().code(), Code::kInvalidArgument);
  auto q = by_rows(2, 1, 0, 100, 64);
  q.count -= 1;
  EXPECT_NE(build_path(q).status().message().find("6399 elements of float32"), std::string::npos);
  EXPECT_FALSE(takes_rows(by_rows(2, 1, 0, 4, 2 << 20)));  // longer than a piece
  EXPECT_FALSE(takes_rows(by_rows(2, 1, 0, 1, UINT64_MAX / 2)));
}

/// What must hold for every request by rows, tried on random ones.
TEST(PathPlanByRows, NoPieceCutsARowOrHasTooLittleRoom) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 400; ++round) {
    const int nodes = 2 + static_cast<int>(random() % 4);
    const int local = 1 + static_cast<int>(random() % 4);
    const uint64_t rows = 1 + random() % (1ULL << (random() % 16));
    const uint64_t row_elements = 1 + random() % (1ULL << (random() % 10));
    auto q = by_rows(nodes, local, 0, rows, row_elements, static_cast<WireCodec>(random() % 3));
    q.format.dtype = std::array{DType::kFloat32, DType::kFloat16, DType::kBFloat16}[random() % 3];
    if (dtype_size(q.format.dtype) == 2) q.format.codec = WireCodec::kExact;
    q.piece_bytes = 16384ULL << (random() % 8);
    q.lanes = 1 + static_cast<int>(random() % 4);
    ASSERT_TRUE(takes_rows(q));
    const uint64_t item = dtype_size(q.format.dtype);
    uint64_t covered = 0, node_bytes = 0;
    for (int r = 0; r < local; ++r) {
      q.shape.local_rank = r;
      auto plan = build_path(q);
      ASSERT_TRUE(plan.is_ok()) << plan.status().message();
      ASSERT_EQ(plan->hops, 1);
      ASSERT_EQ(plan->own.first, covered);
      ASSERT_EQ(plan->own_rows * row_elements, plan->own.elements);
      covered += plan->own.elements;
      node_bytes += plan->wire_bytes;
      uint64_t at = plan->own.first;
      for (const auto& p : plan->pieces) {
        ASSERT_EQ(p.span.first, at);
        ASSERT_EQ(at % row_elements, 0U);
        ASSERT_EQ(at * item % 16, 0U);
        ASSERT_EQ(p.span.elements % row_elements, 0U);
        at += p.span.elements;
        const auto format = plan->row_format(p);
        ASSERT_EQ(format.capacity, format.rows);
        ASSERT_EQ(format.rows * row_elements, p.span.elements);
        ASSERT_LE(device::cuda::encoded_row_bytes(format), p.slot_bytes);
        // What Path::make_slots() has room for.
        ASSERT_LE(p.slot_bytes, q.piece_bytes * 17 / 16 + 2 * kPieceGranule);
        ASSERT_LE(device::cuda::row_state_bytes(format), q.piece_bytes / 16);
        ASSERT_LE(p.in_offset + static_cast<uint64_t>(nodes) * p.slot_bytes, plan->host_bytes);
      }
      ASSERT_EQ(at, plan->own.first + plan->own.elements);
      // Where they are said to pay they do: as many on every rank take less than the dense plan.
      if (r + 1 == local && plan->paying_rows > 0) {
        auto dense = q;
        dense.row_elements = 0;
        const auto other = build_path(dense);
        ASSERT_TRUE(other.is_ok());
        const auto format = plan->row_format(plan->pieces.empty() ? PathPiece{} : plan->pieces[0]);
        const uint64_t most = device::cuda::used_row_bytes(format, plan->paying_rows) +
                              (plan->pieces.size() - 1) * 28;
        ASSERT_LT(most * static_cast<uint64_t>(local * (nodes - 1)), other->node_bytes);
      }
    }
    ASSERT_EQ(covered, q.count);
    ASSERT_EQ(node_bytes, build_path(q)->node_bytes);
  }
}

}  // namespace
}  // namespace paceline::gpu
