// Processes that this one forks have memory of their own, also where it is shared with other ranks here.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "wire/shm/allocator.h"

namespace paceline::wire::shm {
namespace {

constexpr std::size_t kBytes = 1 << 20;

/// What waitpid() says of a child that runs `body` and ends with what it returns.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    ::alarm(60);
    _exit(body());
  }
  int how = -1;
  EXPECT_EQ(waitpid(child, &how, 0), child);
  return how;
}

bool holds(const std::vector<unsigned char>& memory, unsigned char value) {
  return std::all_of(memory.begin(), memory.end(), [&](unsigned char b) { return b == value; });
}

/// A buffer that is shared, and the same pages as a peer maps them.
class Children : public ::testing::Test {
 protected:
  Children() : memory(kBytes, 1) {
    EXPECT_TRUE(allocator.share(memory.data(), kBytes).is_ok());
    peer_ = ::mmap(nullptr, allocator.capacity(), PROT_READ | PROT_WRITE, MAP_SHARED,
                   allocator.fd(), 0);
    EXPECT_NE(peer_, MAP_FAILED);
  }
  ~Children() override { ::munmap(peer_, 64ULL << 20); }
  /// Of the byte at `i`, which lies in a whole page.
  unsigned char& at_peer(std::size_t i) {
    return static_cast<unsigned char*>(peer_)[allocator.offset_of(&memory[i], 1).value_or(0)];
  }
  std::vector<unsigned char> memory;
  ShmAllocator allocator{AllocatorOptions{64ULL << 20, false, {}}};

 private:
  void* peer_ = nullptr;
};

TEST_F(Children, KeepWhatTheyWrite) {
  EXPECT_EQ(in_child([&] {
              if (!holds(memory, 1)) return 1;
              std::memset(memory.data(), 2, kBytes);
              // The same holds for children of theirs.
              const int how = in_child([&] {
                if (!holds(memory, 2)) return 2;
                std::memset(memory.data(), 3, kBytes);
                return 0;
              });
              return how == 0 && holds(memory, 2) ? 0 : 3;
            }),
            0);
  EXPECT_TRUE(holds(memory, 1));
  // It is shared here as before.
  at_peer(50'000) = 7;
  EXPECT_EQ(memory[50'000], 7);
}

TEST_F(Children, HaveWhatIsThereNow) {
  // Pages that were detached, or exchanged again, are private here: the shared ones are not what they hold.
  ASSERT_TRUE(allocator.detach(&memory[100'000], 10'000).is_ok());
  std::memset(memory.data(), 4, kBytes);
  const auto sees = [&](unsigned char value) {
    return in_child([&] { return holds(memory, value) ? 0 : 1; });
  };
  EXPECT_EQ(sees(4), 0);
  EXPECT_EQ(in_child([&] { return std::memset(memory.data(), 5, kBytes) == nullptr ? 1 : 0; }), 0);
  EXPECT_TRUE(holds(memory, 4));
  ASSERT_TRUE(allocator.unshare(memory.data()).is_ok());
  std::memset(memory.data(), 6, kBytes);
  EXPECT_EQ(sees(6), 0);
  ASSERT_TRUE(allocator.share(memory.data(), kBytes).is_ok());
  std::memset(memory.data(), 7, kBytes);
  EXPECT_EQ(sees(7), 0);
  // One that shares the same memory itself shares it with nobody here.
  EXPECT_EQ(in_child([&] {
              ShmAllocator own(AllocatorOptions{64ULL << 20, false, {}});
              if (!own.share(memory.data(), kBytes).is_ok()) return 1;
              std::memset(memory.data(), 8, kBytes);
              return in_child([&] { return holds(memory, 8) ? 0 : 1; });
            }),
            0);
  EXPECT_TRUE(holds(memory, 7));
}

TEST_F(Children, OfAnyMomentKeepWhatTheyWrite) {
  std::atomic<bool> over{false};
  std::atomic<int> rounds{0};
  bool intact = true;
  std::vector<unsigned char> other(100'000, 9);
  std::thread sharer([&] {
    for (; !over.load(); ++rounds) {
      intact = intact && allocator.share(other.data(), other.size()).is_ok() && holds(other, 9);
      intact = intact && allocator.unshare(other.data()).is_ok() && holds(other, 9);
    }
  });
  while (rounds.load() == 0) std::this_thread::yield();
  for (int i = 0; i < 60; ++i) {
    EXPECT_EQ(in_child([&] {
                std::memset(other.data(), 10, other.size());
                std::memset(memory.data(), 10, kBytes);
                return 0;
              }),
              0);
  }
  over.store(true);
  sharer.join();
  EXPECT_TRUE(intact);
  EXPECT_TRUE(holds(memory, 1));
}

/// One that gets no pages of its own must not write to its parent's: it ends where it tries.
TEST_F(Children, WithoutPagesOfTheirOwnCanOnlyRead) {
  const int how = in_child([&] {
    ShmAllocator own(AllocatorOptions{64ULL << 20, false, {}});
    if (!own.share(memory.data(), kBytes).is_ok()) return 1;
    // A file that can't be mapped fails as a lack of memory does, and leaves sanitizers theirs.
    if (::close(own.fd()) != 0) return 1;
    const pid_t child = ::fork();
    if (child == 0) {
      (void)::signal(SIGSEGV, SIG_DFL);  // a sanitizer would report what is meant to happen
      if (!holds(memory, 1)) _exit(0);
      std::memset(memory.data() + 8192, 2, 100);
      _exit(0);
    }
    int end = 0;
    if (child < 0 || ::waitpid(child, &end, 0) != child) return 2;
    if (!WIFSIGNALED(end) || WTERMSIG(end) != SIGSEGV) return 3;
    return holds(memory, 1) ? 0 : 4;
  });
  EXPECT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 0) << how;
  EXPECT_TRUE(holds(memory, 1));
}

}  // namespace
}  // namespace paceline::wire::shm
