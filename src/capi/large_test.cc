// More than 2 GiB at once: what a count or an offset of 31 bits would lose.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "capi/processes.h"

namespace paceline::capi {
namespace {

constexpr size_t kCount = (size_t{1} << 31) + 4099;
// Of no length that divides a power of two: a byte that comes 2 or 4 GiB from its place is wrong.
constexpr size_t kBlock = (1U << 20) - 3;
constexpr size_t kHugePage = 2U << 20;
constexpr size_t kTail = 4099;
constexpr size_t kNeededKiB = size_t{10} << 20;

/// ThreadSanitizer keeps account of each byte in several others.
bool is_thread_sanitized() {
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
  return true;
#endif
#endif
  return false;
}

size_t available_kib() {
  std::ifstream in("/proc/meminfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("MemAvailable:")) return std::stoull(line.substr(line.find(':') + 1));
  return 0;
}

struct Content {
  std::vector<uint8_t> block, tail;

  explicit Content(unsigned seed) : block(kBlock), tail(kTail) {
    std::mt19937 random(seed);
    for (auto* part : {&block, &tail})
      for (auto& byte : *part) byte = static_cast<uint8_t>(random() % 128);  // two of them fit
  }
  void add(const Content& other) {
    for (size_t i = 0; i < kBlock; ++i) block[i] = static_cast<uint8_t>(block[i] + other.block[i]);
    for (size_t i = 0; i < kTail; ++i) tail[i] = static_cast<uint8_t>(tail[i] + other.tail[i]);
  }
  /// Hands each part of the whole to `use(at, content, bytes)`.
  template <class Use>
  void walk(const Use& use) const {
    const size_t end = kCount - kTail;
    for (size_t at = 0; at < end; at += kBlock) use(at, block.data(), std::min(kBlock, end - at));
    use(end, tail.data(), kTail);
  }
};

using Memory = std::unique_ptr<uint8_t[], void (*)(void*)>;

/// Huge pages, where the system gives them: a million small ones cost more time than the sums.
Memory allocate() {
  auto* data =
      static_cast<uint8_t*>(std::aligned_alloc(kHugePage, (kCount / kHugePage + 1) * kHugePage));
  if (data != nullptr) (void)::madvise(data, kCount, MADV_HUGEPAGE);
  return {data, std::free};
}

/// Where `data` first differs; kCount: nowhere.
size_t first_wrong(const uint8_t* data, const Content& expected) {
  size_t wrong = kCount;
  expected.walk([&](size_t at, const uint8_t* content, size_t bytes) {
    if (wrong != kCount || std::memcmp(data + at, content, bytes) == 0) return;
    wrong = at +
            static_cast<size_t>(std::mismatch(content, content + bytes, data + at).first - content);
  });
  if (wrong != kCount) std::fprintf(stderr, "the first wrong byte is at %zu\n", wrong);
  return wrong;
}

int sum_and_send(int rank, FileStore& store, unsigned seed) {
  auto* comm = create(rank, 2, store, 60);
  MUST(comm != nullptr);
  Content sum(seed + static_cast<unsigned>(rank));
  const auto memory = allocate();
  auto* const data = memory.get();
  MUST(data != nullptr);
  sum.walk([&](size_t at, const uint8_t* content, size_t bytes) {
    std::memcpy(data + at, content, bytes);
  });
  auto a = op_args(0, 8, data, data, kCount);
  MUST(paceline_run(comm, &a, nullptr) == PACELINE_OK);
  sum.add(Content(seed + static_cast<unsigned>(1 - rank)));
  MUST(first_wrong(data, sum) == kCount);

  // The sums travelled in halves; this is one message.
  paceline_transfer_args t{};
  t.struct_size = sizeof t;
  t.peer = 1 - rank;
  t.data = data;
  t.bytes = kCount;
  if (rank == 1) std::memset(data, 0xFF, kCount);
  paceline_op op = 0;
  MUST((rank == 0 ? paceline_send : paceline_receive)(comm, &t, &op) == PACELINE_OK);
  MUST(paceline_wait(comm, op, -1, nullptr) == PACELINE_OK);
  MUST(first_wrong(data, sum) == kCount);
  MUST(paceline_comm_destroy(comm) == PACELINE_OK);
  return 0;
}

class Large : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { setenv("PACELINE_WIRE", GetParam(), 1); }
  void TearDown() override { unsetenv("PACELINE_WIRE"); }
};

TEST_P(Large, MoreThanTwoGiBAreSummedAndSentByteForByte) {
  if (is_thread_sanitized()) GTEST_SKIP() << "ThreadSanitizer's account of 4 GiB takes 32";
  if (available_kib() < kNeededKiB) GTEST_SKIP() << "less than 10 GiB of memory is free";
  const unsigned seed = std::random_device{}();
  Processes ranks(2, [&](int rank, FileStore& store) { return sum_and_send(rank, store, seed); });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.wait(r, 100), 0) << "rank " << r << ", seed " << seed;
}

INSTANTIATE_TEST_SUITE_P(Wires, Large, testing::Values("tcp", "auto"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace paceline::capi
