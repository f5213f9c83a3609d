// More than 2 GiB at once, in every collective: what a count or an offset of 31 bits would lose.
#include <string>
#include <vector>

#include "capi/large/contents.h"

namespace paceline::capi::large {
namespace {

using Bytes = Row<uint8_t>;

/// What is left for the other rank where one's block has more than 2^31 elements.
constexpr uint64_t kRest = 1031;
/// Blocks by rank: the first is long, the second lies far behind the buffer's beginning.
constexpr uint64_t kUneven[] = {kBytes - kRest, kRest};

/// One of two ranks. What its parts leave in `out` is not what the next one's rows hold.
struct Rank {
  int rank;
  paceline_comm* comm;
  unsigned seed;
  Memory<uint8_t> out{kBytes + 2 * kRest};

  /// What rank r hands in.
  [[nodiscard]] Bytes row(unsigned part, int r) const {
    return random_row<uint8_t>(kBytes, seed + 2 * part + static_cast<unsigned>(r));
  }
  [[nodiscard]] bool run(int collective, const uint8_t* input, uint8_t* output, int root = 0,
                         const uint64_t* counts = nullptr) const {
    auto a = op_args(collective, 8, input, output, counts != nullptr ? counts[rank] : kBytes);
    a.root = root;
    a.counts = counts;
    return paceline_run(comm, &a, nullptr) == PACELINE_OK;
  }
};

/// The sums travel in halves, what is sent is one message.
int sum_and_send(const Rank& me) {
  const Bytes mine = me.row(0, me.rank), other = me.row(0, 1 - me.rank);
  auto* const data = me.out.data();
  std::memcpy(data, mine.data(), kBytes);
  MUST(me.run(0, data, data));
  MUST(sum(mine, other).is_in(data, kBytes));
  if (me.rank == 0) std::memcpy(data, mine.data(), kBytes);
  paceline_transfer_args t{};
  t.struct_size = sizeof t;
  t.peer = 1 - me.rank;
  t.data = data;
  t.bytes = kBytes;
  paceline_op op = 0;
  MUST((me.rank == 0 ? paceline_send : paceline_receive)(me.comm, &t, &op) == PACELINE_OK);
  MUST(paceline_wait(me.comm, op, -1, nullptr) == PACELINE_OK);
  MUST((me.rank == 0 ? mine : other).is_in(data, kBytes));
  return 0;
}

int exchange_blocks(const Rank& me) {
  // [from][to]: rank 0's second block begins near the beginning of what goes out, rank 1's beyond 2^31; in what comes in
  // it is the other way round. Rank 0 receives more than it sends.
  constexpr uint64_t kBlocks[2][2] = {{3 * kRest, kBytes - 3 * kRest}, {kBytes - kRest, kRest}};
  const uint64_t received[] = {kBlocks[0][me.rank], kBlocks[1][me.rank]};
  const Bytes rows[] = {me.row(1, 0), me.row(1, 1)};
  auto a = op_args(4, 8, rows[me.rank].data(), me.out.data(), 0);
  a.send_counts = kBlocks[me.rank];
  a.receive_counts = received;
  MUST(paceline_run(me.comm, &a, nullptr) == PACELINE_OK);
  MUST(rows[0].is_in(me.out.data(), received[0], me.rank == 0 ? 0 : kBlocks[0][0]));
  MUST(rows[1].is_in(me.out.data() + received[0], received[1], me.rank == 0 ? 0 : kBlocks[1][0]));
  return 0;
}

int broadcast_and_reduce(const Rank& me) {
  const Bytes mine = me.row(2, me.rank), other = me.row(2, 1 - me.rank);
  MUST(me.run(1, mine.data(), me.out.data(), 1));
  MUST((me.rank == 1 ? mine : other).is_in(me.out.data(), kBytes));
  MUST(me.run(6, mine.data(), me.out.data()));
  if (me.rank == 0) MUST(sum(mine, other).is_in(me.out.data(), kBytes));
  return 0;
}

/// Both together are an all-reduce: the sums are left where all-gather wants them.
int reduce_scatter_and_all_gather(const Rank& me) {
  const Bytes mine = me.row(3, me.rank), other = me.row(3, 1 - me.rank);
  const Bytes sums = sum(mine, other);
  const uint64_t begin = me.rank == 0 ? 0 : kUneven[0];
  auto* const block = me.out.data() + begin;
  MUST(me.run(3, mine.data(), block, 0, kUneven));
  MUST(sums.is_in(block, kUneven[me.rank], begin));
  MUST(me.run(2, block, me.out.data(), 0, kUneven));
  MUST(sums.is_in(me.out.data(), kBytes));
  return 0;
}

/// Each rank's block is more than 1 GiB, both are more than 2.
int all_gather_even_blocks(const Rank& me) {
  const Bytes rows[] = {me.row(4, 0), me.row(4, 1)};
  constexpr uint64_t kHalf = kBytes / 2;
  auto a = op_args(2, 8, rows[me.rank].data(), me.out.data(), kHalf);
  MUST(paceline_run(me.comm, &a, nullptr) == PACELINE_OK);
  MUST(rows[0].is_in(me.out.data(), kHalf));
  MUST(rows[1].is_in(me.out.data() + kHalf, kHalf));
  return 0;
}

int gather_and_scatter(const Rank& me) {
  const Bytes rows[] = {me.row(5, 0), me.row(5, 1)};
  MUST(me.run(7, rows[me.rank].data(), me.out.data(), 1, kUneven));
  if (me.rank == 1) {
    MUST(rows[0].is_in(me.out.data(), kUneven[0]));
    MUST(rows[1].is_in(me.out.data() + kUneven[0], kUneven[1]));
  }
  MUST(me.run(8, rows[me.rank].data(), me.out.data(), 1, kUneven));
  MUST(rows[1].is_in(me.out.data(), kUneven[me.rank], me.rank == 0 ? 0 : kUneven[0]));
  return 0;
}

int in_turn(int rank, FileStore& store, unsigned seed,
            const std::vector<int (*)(const Rank&)>& parts) {
  auto* comm = create(rank, 2, store, 60);
  MUST(comm != nullptr);
  const Rank me{rank, comm, seed};
  MUST(me.out.data() != nullptr);
  for (auto* part : parts)
    if (part(me) != 0) return 1;
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

class Large : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("PACELINE_WIRE", GetParam(), 1); }
  void TearDown() override { unsetenv("PACELINE_WIRE"); }
};

TEST_P(Large, MoreThanTwoGiBTravelByteForByteInEveryCollective) {
  PACELINE_NEEDS_GIB(6);
  expect_of_all(2, [](int rank, FileStore& store, unsigned seed) {
    return in_turn(rank, store, seed,
                   {sum_and_send, exchange_blocks, broadcast_and_reduce,
                    reduce_scatter_and_all_gather, all_gather_even_blocks, gather_and_scatter});
  });
}

INSTANTIATE_TEST_SUITE_P(Wires, Large, testing::Values("tcp", "auto"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace paceline::capi::large
