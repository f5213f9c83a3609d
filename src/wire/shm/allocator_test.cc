#include "wire/shm/allocator.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <vector>

namespace paceline::wire::shm {
namespace {

uint64_t pages_taken(const ShmAllocator& allocator) {
  struct stat info {};
  EXPECT_EQ(::fstat(allocator.fd(), &info), 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

TEST(Allocator, RandomSizesStayApartAndAligned) {
  ShmAllocator allocator(AllocatorOptions{256ULL << 20, true, {}});
  std::mt19937_64 random(std::random_device{}());
  struct Block {
    uint64_t bytes;
    unsigned char fill;
  };
  std::map<unsigned char*, Block> live;
  for (int i = 0; i < 3000; ++i) {
    if (live.empty() || (random() % 5 < 3 && live.size() < 60)) {
      const uint64_t bytes = random() % 8 == 0 ? random() % (3ULL << 20) : random() % 9000;
      auto* p = static_cast<unsigned char*>(allocator.allocate(bytes));
      ASSERT_NE(p, nullptr);
      ASSERT_TRUE(allocator.offset_of(p, bytes).has_value());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0U);
      if (bytes >= kHugePage) {
        EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % kHugePage, 0U);
      }
      const auto fill = static_cast<unsigned char>(random());
      std::memset(p, fill, bytes);
      auto next = live.lower_bound(p);
      if (next != live.end()) {
        ASSERT_LE(p + bytes, next->first);
      }
      if (next != live.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second.bytes, p);
      }
      live.emplace(p, Block{bytes, fill});
    } else {
      auto at = live.begin();
      std::advance(at, static_cast<long>(random() % live.size()));
      for (uint64_t b = 0; b < at->second.bytes; ++b) ASSERT_EQ(at->first[b], at->second.fill);
      ASSERT_TRUE(allocator.free(at->first));
      live.erase(at);
    }
  }
  for (auto& [p, block] : live) ASSERT_TRUE(allocator.free(p));
  EXPECT_EQ(allocator.bytes_in_use(), 0U);
  EXPECT_EQ(pages_taken(allocator), 0U) << "freed memory goes back to the system";
  // All of it is one piece again.
  void* all = allocator.allocate(256ULL << 20);
  EXPECT_TRUE(allocator.offset_of(all, 256ULL << 20).has_value());
  EXPECT_TRUE(allocator.free(all));
}

TEST(Allocator, MoreThanThereIsBecomesPrivateMemory) {
  ShmAllocator allocator(AllocatorOptions{64ULL << 20, true, {}});
  void* shared = allocator.allocate(40ULL << 20);
  void* more = allocator.allocate(40ULL << 20);
  ASSERT_NE(shared, nullptr);
  ASSERT_NE(more, nullptr);
  EXPECT_TRUE(allocator.offset_of(shared, 40ULL << 20).has_value());
  EXPECT_FALSE(allocator.offset_of(more, 1).has_value());
  std::memset(more, 1, 40ULL << 20);
  EXPECT_EQ(allocator.allocate_shared(40ULL << 20), nullptr);
  EXPECT_TRUE(allocator.free(more));
  EXPECT_TRUE(allocator.free(shared));
  EXPECT_EQ(allocator.bytes_in_use(), 0U);
}

TEST(Allocator, ForeignAndDoubleFreesAreRefused) {
  ShmAllocator allocator(AllocatorOptions{64ULL << 20, false, {}});
  int local = 0;
  EXPECT_FALSE(allocator.free(&local));
  auto* p = static_cast<std::byte*>(allocator.allocate(1000));
  EXPECT_FALSE(allocator.free(p + 64));
  EXPECT_TRUE(allocator.free(p));
  EXPECT_FALSE(allocator.free(p));
  EXPECT_TRUE(allocator.free(nullptr));
}

TEST(Allocator, WhatIsKeptIsNotHandedOutAgain) {
  ShmAllocator allocator(AllocatorOptions{64ULL << 20, false, {}});
  auto* first = static_cast<std::byte*>(allocator.allocate(1 << 20));
  auto* second = static_cast<std::byte*>(allocator.allocate(1 << 20));
  allocator.keep(second + 5000);
  int local = 0;
  allocator.keep(&local);  // private memory is its process's alone
  EXPECT_TRUE(allocator.free(first));
  EXPECT_TRUE(allocator.free(second));
  EXPECT_FALSE(allocator.free(second));
  EXPECT_EQ(allocator.bytes_in_use(), 0U);
  EXPECT_EQ(allocator.allocate(1 << 20), first);
  for (int i = 0; i < 8; ++i) EXPECT_NE(allocator.allocate(1 << 20), second);
  EXPECT_NE(allocator.allocate(50 << 20), nullptr);
}

TEST(Allocator, OffsetsEndWithTheMemory) {
  ShmAllocator allocator(AllocatorOptions{64ULL << 20, false, {}});
  EXPECT_FALSE(allocator.offset_of(&allocator, 1).has_value());
  auto* p = static_cast<std::byte*>(allocator.allocate(64ULL << 20));
  EXPECT_EQ(allocator.offset_of(p, 64ULL << 20), 0U);
  EXPECT_FALSE(allocator.offset_of(p, (64ULL << 20) + 1).has_value());
  EXPECT_FALSE(allocator.offset_of(p + 1, 64ULL << 20).has_value());
  EXPECT_FALSE(allocator.offset_of(p - 1, 1).has_value());
  EXPECT_TRUE(allocator.free(p));
}

// --- Memory of others, exchanged page by page --------------------------------------------------------------------

/// What a peer sees that has mapped the shared memory.
class Peer {
 public:
  explicit Peer(const ShmAllocator& allocator)
      : bytes_(allocator.capacity()),
        data_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, allocator.fd(), 0)) {
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~Peer() { ::munmap(data_, bytes_); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  unsigned char* at(uint64_t offset) { return static_cast<unsigned char*>(data_) + offset; }

 private:
  uint64_t bytes_;
  void* data_;
};

std::vector<unsigned char> noise(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> out(bytes);
  for (auto& b : out) b = static_cast<unsigned char>(random());
  return out;
}

TEST(Allocator, SharedPagesTakeThePlaceOfPrivateOnesWithWhatTheyHold) {
  for (const std::size_t bytes : {3 * 4096 + 100, 100'000, 5'000'003}) {
    ShmAllocator allocator(AllocatorOptions{64ULL << 20, false, {}});
    auto memory = noise(bytes, 1);
    const auto before = memory;
    unsigned char* const data = memory.data();
    EXPECT_FALSE(allocator.offset_of(data, bytes).has_value());
    ASSERT_TRUE(allocator.share(data, bytes).is_ok());
    EXPECT_EQ(memory, before);
    // Its whole pages are shared now, the ends are not.
    const auto first = reinterpret_cast<uintptr_t>(data);
    const uint64_t head = round_up(first, page_size()) - first;
    const uint64_t whole = (first + bytes) / page_size() * page_size() - (first + head);
    const auto offset = allocator.offset_of(data + head, whole);
    ASSERT_TRUE(offset.has_value());
    EXPECT_EQ(allocator.offset_of(data + head + 777, 1000), *offset + 777);
    EXPECT_FALSE(allocator.offset_of(data + head, whole + 1).has_value());
    EXPECT_FALSE(allocator.offset_of(data + head - 1, 2).has_value());
    EXPECT_EQ(allocator.bytes_in_use(), whole);
    // Both ways.
    {
      Peer peer(allocator);
      EXPECT_EQ(std::memcmp(peer.at(*offset), before.data() + head, whole), 0);
      data[head + 5] ^= 0xFFU;
      EXPECT_EQ(*peer.at(*offset + 5), data[head + 5]);
      *peer.at(*offset + whole - 1) = 17;
      EXPECT_EQ(data[head + whole - 1], 17);
      EXPECT_EQ(allocator.share(data, bytes).code(), Code::kInvalidArgument);
      EXPECT_EQ(allocator.share(data + head + page_size(), page_size()).code(),
                Code::kInvalidArgument);
      EXPECT_FALSE(allocator.free(data + head)) << "what share() takes, unshare() gives back";
      // Private again: with the same content, and the peer's writes no longer show.
      ASSERT_TRUE(allocator.unshare(data).is_ok());
      EXPECT_EQ(data[head + whole - 1], 17);
      data[head] = 1;
      *peer.at(*offset) = 2;
      EXPECT_EQ(data[head], 1);
    }
    EXPECT_FALSE(allocator.offset_of(data + head, 1).has_value());
    EXPECT_EQ(allocator.unshare(data).code(), Code::kInvalidArgument);
    EXPECT_EQ(allocator.bytes_in_use(), 0U);
  }
}

TEST(Allocator, WhatCantBeSharedStaysAsItIs) {
  ShmAllocator allocator(AllocatorOptions{1ULL << 20, false, {}});
  auto memory = noise(4ULL << 20, 2);
  const auto before = memory;
  EXPECT_EQ(allocator.share(memory.data(), 100).code(), Code::kInvalidArgument);
  const auto status = allocator.share(memory.data(), memory.size());
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find("bytes"), std::string::npos) << status.message();
  EXPECT_EQ(memory, before);
  auto* own = allocator.allocate(300'000);
  EXPECT_EQ(allocator.share(own, 300'000).code(), Code::kInvalidArgument);
  EXPECT_TRUE(allocator.free(own));
}

TEST(Allocator, ItsEndGivesMemoryPrivatePagesAgain) {
  auto memory = noise(1 << 20, 3);
  auto other = noise(1 << 20, 4);
  const auto before = memory;
  std::optional<Peer> peer;  // outlives it
  uint64_t at = 0;
  {
    ShmAllocator allocator(AllocatorOptions{64ULL << 20, false, {}});
    ASSERT_TRUE(allocator.share(memory.data(), memory.size()).is_ok());
    peer.emplace(allocator);
    at = allocator.offset_of(&memory[8192], 1).value_or(0);
    EXPECT_EQ(*peer->at(at), memory[8192]);
    ASSERT_TRUE(allocator.share(other.data(), other.size()).is_ok());
    // What is kept goes private too, and its shared pages are not handed out again.
    allocator.keep(other.data() + 8192);
    const auto kept = allocator.offset_of(other.data() + 8192, 1);
    ASSERT_TRUE(allocator.unshare(other.data()).is_ok());
    for (int i = 0; i < 20; ++i) {
      auto* p = allocator.allocate(1 << 20);
      const auto at = allocator.offset_of(p, 1);
      ASSERT_TRUE(at.has_value());
      EXPECT_TRUE(*kept < *at || *kept >= *at + (1 << 20));
    }
  }
  EXPECT_EQ(memory, before);
  *peer->at(at) ^= 0xFFU;
  EXPECT_EQ(memory, before);
  const pid_t child = fork();
  if (child == 0) {
    std::memset(memory.data(), 0, memory.size());
    _exit(0);
  }
  int how = 0;
  ASSERT_EQ(waitpid(child, &how, 0), child);
  EXPECT_EQ(memory, before);
}

/// Memory of allocate(), or the test's own after share().
class Detached : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr std::size_t kBytes = 1 << 20;
  Detached() : memory(noise(kBytes + page_size(), 5)) {
    data = memory.data() + round_up(reinterpret_cast<uintptr_t>(memory.data()), page_size()) -
           reinterpret_cast<uintptr_t>(memory.data());
    if (GetParam()) {
      EXPECT_TRUE(allocator.share(data, kBytes).is_ok());
    } else {
      const auto* values = data;
      data = static_cast<unsigned char*>(allocator.allocate(kBytes));
      std::memcpy(data, values, kBytes);
    }
    before.assign(data, data + kBytes);
    at = *allocator.offset_of(data, kBytes);
  }
  std::vector<unsigned char> memory;  // outlives the allocator, which gives it its pages back
  ShmAllocator allocator{AllocatorOptions{64ULL << 20, false, {}}};
  std::vector<unsigned char> before;
  unsigned char* data = nullptr;
  uint64_t at = 0;
};
INSTANTIATE_TEST_SUITE_P(Each, Detached, ::testing::Values(false, true), [](const auto& info) {
  return std::string(info.param ? "exchanged" : "allocated");
});

TEST_P(Detached, PagesAreThisProcesssAlone) {
  Peer peer(allocator);
  const uint64_t page = page_size();
  ASSERT_TRUE(allocator.detach(data + 10 * page + 5, page).is_ok());  // pages 10 and 11
  data[10 * page] = 1, data[11 * page] = 2;
  ASSERT_TRUE(allocator.detach(data + 9 * page, 7 * page).is_ok());
  before[10 * page] = 1, before[11 * page] = 2;
  EXPECT_EQ(std::memcmp(data, before.data(), kBytes), 0) << "what is detached stays as it is";
  std::memset(peer.at(at), 0x33, kBytes);
  for (std::size_t i = 0; i < kBytes; i += 777) {
    EXPECT_EQ(data[i], i / page >= 9 && i / page < 16 ? before[i] : 0x33) << i;
  }
  std::memset(data, 0x44, kBytes);
  for (std::size_t i = 0; i < kBytes; i += 777) {
    EXPECT_EQ(*peer.at(at + i), i / page >= 9 && i / page < 16 ? 0x33 : 0x44) << i;
  }
  // Nobody is told to look for it there any more.
  EXPECT_EQ(allocator.offset_of(data, 9 * page), at);
  EXPECT_EQ(allocator.offset_of(data + 16 * page, page), at + 16 * page);
  EXPECT_FALSE(allocator.offset_of(data, 9 * page + 1).has_value());
  EXPECT_FALSE(allocator.offset_of(data + 10 * page + 5, 10).has_value());
  EXPECT_FALSE(allocator.offset_of(data + 16 * page - 1, 10).has_value());
  EXPECT_EQ(allocator.share(data + 10 * page, page).code(), Code::kInvalidArgument);
  // Given back as ever, and not handed out again.
  if (GetParam()) {
    ASSERT_TRUE(allocator.unshare(data).is_ok());
    EXPECT_EQ(std::count(data, data + kBytes, 0x44), static_cast<long>(kBytes));
    ASSERT_TRUE(allocator.share(data, kBytes).is_ok());
    EXPECT_NE(allocator.offset_of(data, kBytes).value_or(at), at);
  } else {
    EXPECT_TRUE(allocator.free(data));
    EXPECT_NE(allocator.allocate(kBytes), data);
  }
}

TEST_P(Detached, PagesLoseNothingThatThreadsWrite) {
  // A counter in each page, counted up all the while.
  std::atomic<bool> over{false};
  const auto counter = [&](std::size_t page) {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(data + page * page_size() + 64));
  };
  const std::size_t pages = kBytes / page_size();
  for (std::size_t p = 0; p < pages; ++p) counter(p).store(0);
  uint64_t rounds = 0;
  std::thread writer([&] {
    for (; !over.load(); ++rounds) {
      for (std::size_t p = 0; p < pages; ++p) counter(p).fetch_add(1);
    }
  });
  for (std::size_t p = 0; p < pages; p += 16)
    EXPECT_TRUE(allocator.detach(data + p * page_size(), 16 * page_size()).is_ok());
  over.store(true);
  writer.join();
  for (std::size_t p = 0; p < pages; ++p) EXPECT_EQ(counter(p).load(), rounds) << "page " << p;
}

TEST(Allocator, ManyThreads) {
  ShmAllocator allocator(AllocatorOptions{128ULL << 20, true, {}});
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        const uint64_t bytes = 1 + random() % 50'000;
        auto* p = static_cast<unsigned char*>(allocator.allocate(bytes));
        std::memset(p, static_cast<int>(t), bytes);
        EXPECT_TRUE(allocator.offset_of(p, bytes).has_value());
        for (uint64_t b = 0; b < bytes; b += 101) EXPECT_EQ(p[b], t);
        EXPECT_TRUE(allocator.free(p));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(allocator.bytes_in_use(), 0U);
}

}  // namespace
}  // namespace paceline::wire::shm
