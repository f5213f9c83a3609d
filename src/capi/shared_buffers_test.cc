// Buffers of paceline_alloc: ranks of a node read and write them in place, and nobody can tell by the results.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "capi/processes.h"

namespace paceline::capi {
namespace {

struct Case {
  int dtype;
  size_t element;
  int op;
  size_t count;
};
constexpr Case kCases[] = {
    {0, 4, 0, 1},       {0, 4, 0, 5000},    {0, 4, 0, 777'777}, {0, 4, 1, 600'001},
    {0, 4, 3, 300'000}, {1, 8, 1, 123'457}, {2, 2, 1, 400'003}, {3, 2, 0, 400'000},
    {6, 4, 0, 250'000}, {8, 1, 3, 900'007}, {0, 4, 4, 65'536},
};

/// Numbers of every sign and size, as the type has them.
std::vector<std::byte> values(const Case& c, int rank, unsigned round) {
  std::mt19937 random(round * 131 + static_cast<unsigned>(rank) * 7 + 1);
  std::normal_distribution<float> normal;
  std::vector<std::byte> out(c.count * c.element);
  for (size_t i = 0; i < c.count; ++i) {
    auto* to = out.data() + i * c.element;
    const float f = normal(random);
    const double d = f;
    uint32_t word = 0;
    std::memcpy(&word, &f, 4);
    switch (c.dtype) {
      case 0:
        std::memcpy(to, &f, 4);
        break;
      case 1:
        std::memcpy(to, &d, 8);
        break;
      case 2:
        word = (random() & 0x83ffU) | 0x3800U;  // ± 0.5 to 1
        std::memcpy(to, &word, 2);
        break;
      case 3:
        word >>= 16;
        std::memcpy(to, &word, 2);
        break;
      default:
        word = random();
        std::memcpy(to, &word, c.element);
    }
  }
  return out;
}

/// Of float32 sums and averages: whether they are what double precision makes of all ranks' numbers.
bool is_right(const Case& c, const std::vector<std::byte>& out, int size, unsigned round) {
  if (c.dtype != 0 || c.op > 1) return true;
  std::vector<double> expected(c.count);
  for (int r = 0; r < size; ++r) {
    const auto theirs = values(c, r, round);
    for (size_t i = 0; i < c.count; ++i) {
      float f = 0;
      std::memcpy(&f, theirs.data() + i * 4, 4);
      expected[i] += c.op == 1 ? static_cast<double>(f) / size : static_cast<double>(f);
    }
  }
  for (size_t i = 0; i < c.count; ++i) {
    float f = 0;
    std::memcpy(&f, out.data() + i * 4, 4);
    if (std::abs(static_cast<double>(f) - expected[i]) > 1e-5) return false;
  }
  return true;
}

int compare(int rank, int size, FileStore& store) {
  auto* comm = create(rank, size, store);
  MUST(comm != nullptr);
  std::mt19937 random(static_cast<unsigned>(rank));  // each rank has its own mixture
  unsigned round = 0;
  for (const Case& c : kCases) {
    for (int mixture = 0; mixture < 4; ++mixture, ++round) {
      const auto input = values(c, rank, round);
      std::vector<std::byte> expected = input;
      auto a = op_args(0, c.dtype, expected.data(), expected.data(), c.count);
      a.reduce_op = c.op;
      a.algorithm = 4;  // direct, also where something shorter would be chosen
      MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
      MUST(is_right(c, expected, size, round));

      const bool in_place = random() % 2 == 0;
      const bool shared_input = mixture == 0 || random() % 2 == 0;
      const bool shared_output = in_place ? shared_input : mixture == 0 || random() % 2 == 0;
      std::vector<std::byte> own_input = input, own_output(input.size());
      auto* in = shared_input ? static_cast<std::byte*>(paceline_alloc(comm, input.size()))
                              : own_input.data();
      MUST(in != nullptr);
      std::memcpy(in, input.data(), input.size());
      auto* out = in_place        ? in
                  : shared_output ? static_cast<std::byte*>(paceline_alloc(comm, input.size()))
                                  : own_output.data();
      MUST(out != nullptr);
      a.input = in;
      a.output = out;
      MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
      MUST(std::memcmp(out, expected.data(), expected.size()) == 0);
      if (!in_place) MUST(std::memcmp(in, input.data(), input.size()) == 0);
      if (shared_input) paceline_free(comm, in);
      if (shared_output && !in_place) paceline_free(comm, out);
    }
  }
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

TEST(SharedBuffers, GiveTheSameBitsAsPrivateOnesInEveryMixture) {
  for (int size : {2, 3, 4}) {
    Processes ranks(size, [&](int rank, FileStore& store) { return compare(rank, size, store); });
    for (int r = 0; r < size; ++r) EXPECT_EQ(ranks.wait(r), 0) << "rank " << r << " of " << size;
  }
}

}  // namespace
}  // namespace paceline::capi
