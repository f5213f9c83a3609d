// More than 2 GiB over both wires at once, and in memory that ranks of a node share.
#include <string>

#include "capi/large/contents.h"

namespace paceline::capi::large {
namespace {

constexpr int kTwoLevel = 5;

Row<uint8_t> row_of(unsigned seed, int rank) {
  return random_row<uint8_t>(kBytes, seed + static_cast<unsigned>(rank));
}

int two_levels(int rank, FileStore& store, unsigned seed) {
  setenv("PACELINE_NODE_ID", rank < 2 ? "a" : "b", 1);
  auto* comm = create(rank, 4, store, 60);
  MUST(comm != nullptr);
  paceline_identity who{};
  who.struct_size = sizeof who;
  MUST(paceline_comm_identity(comm, &who) == PACELINE_OK && who.node_count == 2);
  const Memory<uint8_t> out(kBytes);
  MUST(out.data() != nullptr);
  const auto mine = row_of(seed, rank);
  auto args = op_args(0, 8, mine.data(), out.data(), kBytes);
  args.algorithm = kTwoLevel;
  MUST(paceline_run(comm, &args, nullptr) == PACELINE_OK);
  const auto sums =
      sum(sum(row_of(seed, 0), row_of(seed, 1)), sum(row_of(seed, 2), row_of(seed, 3)));
  MUST(sums.is_in(out.data(), kBytes));
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

TEST(LargeLayouts, TwoLevelsSumUpMoreThanTwoGiB) {
  PACELINE_NEEDS_GIB(12);
  expect_of_all(4, two_levels);
}

int sum_in_place(paceline_comm* comm, int rank, unsigned seed, uint8_t* data) {
  const auto mine = row_of(seed, rank), other = row_of(seed, 1 - rank);
  std::memcpy(data, mine.data(), kBytes);
  auto args = op_args(0, 8, data, data, kBytes);
  MUST(paceline_run(comm, &args, nullptr) == PACELINE_OK);
  MUST(sum(mine, other).is_in(data, kBytes));
  return 0;
}

/// Memory that is shared from the beginning; and the caller's own, before and after its pages are shared ones.
int shared_pages(int rank, FileStore& store, unsigned seed) {
  auto* comm = create(rank, 2, store, 60);
  MUST(comm != nullptr);
  auto* const shared = static_cast<uint8_t*>(paceline_alloc(comm, kBytes));
  MUST(shared != nullptr);
  MUST(sum_in_place(comm, rank, seed, shared) == 0);
  paceline_free(comm, shared);
  const Memory<uint8_t> own(kBytes);
  MUST(own.data() != nullptr);
  const auto kept = row_of(seed, rank);
  std::memcpy(own.data(), kept.data(), kBytes);
  MUST(paceline_share(comm, own.data(), kBytes) == PACELINE_OK);
  MUST(kept.is_in(own.data(), kBytes));
  MUST(sum_in_place(comm, rank, seed + 2, own.data()) == 0);
  MUST(paceline_unshare(comm, own.data()) == PACELINE_OK);
  MUST(sum(row_of(seed + 2, 0), row_of(seed + 2, 1)).is_in(own.data(), kBytes));
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

TEST(LargeLayouts, MoreThanTwoGiBOfMemoryIsShared) {
  PACELINE_NEEDS_GIB(10);
  expect_of_all(2, shared_pages);
}

}  // namespace
}  // namespace paceline::capi::large
