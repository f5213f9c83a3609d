// Buffers of paceline_alloc and paceline_share: ranks of a node read and write them in place, and nobody can tell by the results.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
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

/// A buffer of one kind or another.
class Place {
 public:
  enum Kind : unsigned { kPrivate, kAllocated, kExchanged };
  Place(paceline_comm* comm, Kind kind, const std::vector<std::byte>& values)
      : comm_(comm), kind_(kind), own_(values) {
    data_ = own_.data();
    if (kind == kAllocated) data_ = static_cast<std::byte*>(paceline_alloc(comm, values.size()));
    if (data_ != nullptr && !values.empty()) std::memcpy(data_, values.data(), values.size());
    if (kind != kExchanged) return;
    shared_ = paceline_share(comm, data_, own_.size()) == PACELINE_OK;
    if (!shared_ && own_.size() < 8192) kind_ = kPrivate;  // it may hold no whole page
  }
  ~Place() {
    if (kind_ == kAllocated) paceline_free(comm_, data_);
    if (kind_ == kExchanged && shared_) paceline_unshare(comm_, data_);
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  [[nodiscard]] bool is_right() const {
    return data_ != nullptr && (kind_ != kExchanged || shared_);
  }
  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  paceline_comm* comm_;
  Kind kind_;
  bool shared_ = false;
  std::vector<std::byte> own_;
  std::byte* data_ = nullptr;
};

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
      const auto kind = [&] {
        return static_cast<Place::Kind>(mixture < 2 ? mixture + 1 : random() % 3);
      };
      const Place in(comm, kind(), input);
      const Place out(comm, in_place ? Place::kPrivate : kind(),
                      std::vector<std::byte>(input.size()));
      MUST(in.is_right() && out.is_right());
      a.input = in.data();
      a.output = in_place ? in.data() : out.data();
      MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
      MUST(std::memcmp(a.output, expected.data(), expected.size()) == 0);
      if (!in_place) MUST(std::memcmp(in.data(), input.data(), input.size()) == 0);
    }
  }
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

/// Whether the system lists `at` among private pages ("rw-p").
bool is_private(const void* at) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    char mode[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, mode) != 3) continue;
    const auto address = reinterpret_cast<unsigned long>(at);
    if (address >= begin && address < end) return mode[3] == 'p';
  }
  return false;
}

// Who ends a communicator has private memory again.
TEST(SharedBuffers, EndWithTheCommunicator) {
  Processes ranks(2, [](int rank, FileStore& store) {
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    std::vector<float> data(500'000, static_cast<float>(rank + 1));
    MUST(paceline_share(comm, nullptr, 4096) == PACELINE_INVALID_ARGUMENT);
    MUST(paceline_unshare(comm, data.data()) == PACELINE_INVALID_ARGUMENT);
    MUST(paceline_share(comm, data.data(), 100) == PACELINE_INVALID_ARGUMENT);
    MUST(paceline_share(comm, data.data(), data.size() * 4) == PACELINE_OK);
    MUST(paceline_share(comm, data.data(), data.size() * 4) == PACELINE_INVALID_ARGUMENT);
    MUST(std::string(paceline_error(comm)).find("shared already") != std::string::npos);
    auto a = op_args(0, 0, data.data(), data.data(), data.size());
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
    MUST(!is_private(&data[5000]));
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    MUST(is_private(&data[5000]));
    for (const float f : data) MUST(f == 3);
    const pid_t child = fork();
    if (child == 0) {
      std::fill(data.begin(), data.end(), 0.0F);
      _exit(0);
    }
    int how = 0;
    MUST(waitpid(child, &how, 0) == child);
    for (const float f : data) MUST(f == 3);
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0) << "rank " << r;
}

// A data loader, say, or a process that evaluates.
TEST(SharedBuffers, AreAChildsOwnWhereItWrites) {
  Processes ranks(2, [](int rank, FileStore& store) {
    auto* comm = create(rank, 2, store);
    MUST(comm != nullptr);
    std::vector<float> data(500'000, static_cast<float>(rank + 1));
    MUST(paceline_share(comm, data.data(), data.size() * 4) == PACELINE_OK);
    const auto child_writes = [&](float before) {
      const pid_t child = fork();
      if (child == 0) {
        for (const float f : data) {
          if (f != before) _exit(1);
        }
        std::fill(data.begin(), data.end(), -7.0F);
        _exit(paceline_unshare(comm, data.data()) == PACELINE_UNSUPPORTED ? 0 : 2);
      }
      int how = -1;
      return waitpid(child, &how, 0) == child && how == 0;
    };
    MUST(child_writes(static_cast<float>(rank + 1)));
    auto a = op_args(0, 0, data.data(), data.data(), data.size());
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
    for (const float f : data) MUST(f == 3);
    MUST(child_writes(3));
    MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
    for (const float f : data) MUST(f == 6);
    MUST(paceline_unshare(comm, data.data()) == PACELINE_OK);
    MUST(paceline_comm_destroy(comm) == PACELINE_OK);
    return 0;
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r), 0) << "rank " << r;
}

TEST(SharedBuffers, GiveTheSameBitsAsPrivateOnesInEveryMixture) {
  for (int size : {2, 3, 4}) {
    Processes ranks(size, [&](int rank, FileStore& store) { return compare(rank, size, store); });
    for (int r = 0; r < size; ++r) EXPECT_EQ(ranks.wait(r), 0) << "rank " << r << " of " << size;
  }
}

}  // namespace
}  // namespace paceline::capi
