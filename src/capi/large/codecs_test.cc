// Codecs on more than 2 GiB of float32, between two nodes. Every value and sum is one that the codec keeps exactly.
#include <array>
#include <cmath>
#include <string>

#include "capi/large/contents.h"

namespace paceline::capi::large {
namespace {

using Floats = Row<float>;

constexpr int kFp16 = 1, kBf16 = 2, kTopK = 3;

/// Of so many elements top-k keeps one.
constexpr uint64_t kGroup = 1024;
constexpr uint64_t kCount = (uint64_t{1} << 29) + (4 << 20) + 5 * kGroup;
constexpr uint64_t kGroups = Floats::kPeriod / kGroup;

paceline_comm* create_alone_on_its_node(int rank, FileStore& store) {
  setenv("PACELINE_NODE_ID", rank == 0 ? "a" : "b", 1);
  return create(rank, 2, store, 60);
}

int dense(int rank, FileStore& store, unsigned seed) {
  auto* comm = create_alone_on_its_node(rank, store);
  MUST(comm != nullptr);
  const Memory<float> out(kCount);
  MUST(out.data() != nullptr);
  for (const int codec : {kFp16, kBf16}) {
    const unsigned first = seed + 2 * static_cast<unsigned>(codec);
    const auto a = random_row<float>(kCount, first), b = random_row<float>(kCount, first + 1);
    auto args = op_args(0, 0, (rank == 0 ? a : b).data(), out.data(), kCount);
    args.codec = codec;
    MUST(paceline_run(comm, &args, nullptr) == PACELINE_OK);
    MUST(sum(a, b).is_in(out.data(), kCount));
  }
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

/// A rank's gradient: in every group one element that is larger than all others anywhere.
struct Gradient {
  std::array<uint64_t, kGroups> at;  ///< where, within its group
  std::array<float, kGroups> largest;
  unsigned seed;

  explicit Gradient(unsigned seed_of_the_rest) : seed(seed_of_the_rest) {
    std::mt19937 random(seed);
    for (auto& where : at) where = random() % kGroup;
    for (auto& value : largest)
      value = static_cast<float>(64 + random() % 400) * (random() % 2 ? 1 : -1);
  }
  [[nodiscard]] bool is_largest(uint64_t i) const { return at[i / kGroup] == i % kGroup; }
  [[nodiscard]] float kept(uint64_t i) const { return is_largest(i) ? largest[i / kGroup] : 0.0F; }
  [[nodiscard]] Floats row() const {
    const auto small = random_row<float>(Floats::kPeriod, seed);
    return Floats(kCount, [&](uint64_t i) { return is_largest(i) ? kept(i) : small.data()[i]; });
  }
  [[nodiscard]] Floats residual() const {
    const auto small = random_row<float>(Floats::kPeriod, seed);
    return Floats(kCount, [&](uint64_t i) { return is_largest(i) ? 0.0F : small.data()[i]; });
  }
};

int top_k(int rank, FileStore& store, unsigned seed) {
  auto* comm = create_alone_on_its_node(rank, store);
  MUST(comm != nullptr);
  const Memory<float> out(kCount);
  MUST(out.data() != nullptr);
  const Gradient a(seed), b(seed + 1);
  const Gradient& mine = rank == 0 ? a : b;
  const auto row = mine.row();
  auto args = op_args(0, 0, row.data(), out.data(), kCount);
  const paceline_segment whole{7, 0, kCount};
  args.segments = &whole;
  args.segment_count = 1;
  args.codec = kTopK;
  args.ratio = 1.0 / kGroup;
  args.fp16_values = static_cast<int>(seed % 2);
  MUST(paceline_run(comm, &args, nullptr) == PACELINE_OK);
  MUST(Floats(kCount, [&](uint64_t i) { return a.kept(i) + b.kept(i); }).is_in(out.data(), kCount));
  MUST(paceline_residual_commit(comm, nullptr, 0) == PACELINE_OK);
  MUST(paceline_residual_read(comm, whole.key, out.data(), kCount) == PACELINE_OK);
  MUST(mine.residual().is_in(out.data(), kCount));
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

TEST(LargeCodecs, DenseOnesSumUpMoreThanTwoGiB) {
  PACELINE_NEEDS_GIB(7);
  expect_of_all(2, dense);
}

TEST(LargeCodecs, TopKKeepsTheLargestOfMoreThanTwoGiBAndOwesTheRest) {
  PACELINE_NEEDS_GIB(11);
  expect_of_all(2, top_k);
}

}  // namespace
}  // namespace paceline::capi::large
