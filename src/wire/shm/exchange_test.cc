// Pages that are exchanged keep what they hold, also where the system does not put the others in their place.
#include "wire/shm/exchange.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <functional>
#include <random>
#include <vector>

#include "base/fd.h"

namespace paceline::wire::shm {
namespace {

constexpr uint64_t kBytes = 3 << 20;

/// From now on mremap() fails in this process as it does where there are too many mappings.
bool refuse_to_move_mappings() {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mremap, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(rules), rules};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

class Exchange : public testing::Test {
 protected:
  Exchange() {
    std::mt19937_64 random(1);
    for (auto& byte : held) byte = static_cast<std::byte>(random());
    std::copy(held.begin(), held.end(), begin);
  }
  ~Exchange() override { ::munmap(begin, kBytes); }
  [[nodiscard]] bool holds() const { return std::equal(held.begin(), held.end(), begin); }

  Fd file{::memfd_create("exchange", MFD_CLOEXEC)};
  bool has_room = ::ftruncate(file.get(), kBytes) == 0;
  std::byte* begin = static_cast<std::byte*>(
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::vector<std::byte> held = std::vector<std::byte>(kBytes);
};

TEST_F(Exchange, ThereAndBack) {
  ASSERT_TRUE(has_room);
  ASSERT_TRUE(exchange_for_shared(begin, kBytes, file.get(), 0).is_ok());
  EXPECT_TRUE(holds());
  begin[5] = held[5] = std::byte{7};
  std::byte shared{};
  ASSERT_EQ(::pread(file.get(), &shared, 1, 5), 1);
  EXPECT_EQ(shared, std::byte{7});
  ASSERT_TRUE(exchange_for_private(begin, kBytes).is_ok());
  EXPECT_TRUE(holds());
  begin[5] = held[5] = std::byte{8};
  ASSERT_EQ(::pread(file.get(), &shared, 1, 5), 1);
  EXPECT_EQ(shared, std::byte{7});
}

/// In a child, whose mappings can't be moved.
int exit_of(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(refuse_to_move_mappings() ? body() : 100);
  int how = 0;
  return ::waitpid(child, &how, 0) == child && WIFEXITED(how) ? WEXITSTATUS(how) : -1;
}

TEST_F(Exchange, WhatCantBeExchangedHoldsWhatItHeld) {
  ASSERT_TRUE(has_room);
  EXPECT_EQ(exit_of([&] {
              const Status status = exchange_for_shared(begin, kBytes, file.get(), 0);
              if (status.code() != Code::kResourceExhausted) return 1;
              return holds() ? 0 : 2;
            }),
            0);
  ASSERT_TRUE(exchange_for_shared(begin, kBytes, file.get(), 0).is_ok());
  // A child has private pages of the file where its parent's are shared.
  EXPECT_EQ(exit_of([&] {
              if (exchange_for_private(begin, kBytes).code() != Code::kResourceExhausted) return 1;
              return holds() ? 0 : 2;
            }),
            0);
  EXPECT_TRUE(holds());
}

}  // namespace
}  // namespace paceline::wire::shm
