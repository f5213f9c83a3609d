#include "base/scheduling.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <thread>

namespace paceline {
namespace {

int priority_of_this_thread() {
  return getpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)));
}

TEST(Scheduling, ConcernsTheCallingThreadAlone) {
  const int before = priority_of_this_thread();
  char mine[16] = {};
  prctl(PR_GET_NAME, mine);
  int there = 0;
  unsigned long slack = 0;
  char name[16] = {};
  std::thread([&] {
    become_network_thread("paceline-test");
    there = priority_of_this_thread();
    slack = static_cast<unsigned long>(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0));
    prctl(PR_GET_NAME, name);
  }).join();
  EXPECT_STREQ(name, "paceline-test");
  EXPECT_EQ(slack, 1000U);
  EXPECT_LE(there, before);  // lower where this process may
  EXPECT_EQ(priority_of_this_thread(), before);
  char after[16] = {};
  prctl(PR_GET_NAME, after);
  EXPECT_STREQ(after, mine);
}

TEST(Scheduling, TwiceIsNoHigherThanTheLimit) {
  std::thread([] {
    for (int i = 0; i < 5; ++i) become_network_thread("paceline-test");
    EXPECT_GE(priority_of_this_thread(), -20);
  }).join();
}

}  // namespace
}  // namespace paceline
