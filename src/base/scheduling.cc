#include "base/scheduling.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace paceline {
namespace {

constexpr int kSteps = 10;
constexpr uint64_t kSliceNs = 100'000;  // the shortest that the kernel takes
constexpr unsigned long kTimerSlackNs = 1000;

/// sched_setattr(2) has no wrapper in the C libraries that this has to load with; the struct's first form.
struct Attributes {
  uint32_t size = sizeof(Attributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0;  ///< of an ordinary thread: its slice
  uint64_t deadline = 0;
  uint64_t period = 0;
};

}  // namespace

void become_network_thread(const char* name) {
  prctl(PR_SET_NAME, name);
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
  const auto self = static_cast<id_t>(syscall(SYS_gettid));
  // The main thread's, not its own: one that was started by a thread of the network has inherited the higher one.
  const int nice = getpriority(PRIO_PROCESS, static_cast<id_t>(getpid()));
  (void)setpriority(PRIO_PROCESS, self, nice - kSteps);
  const int policy = sched_getscheduler(0);
  if (policy != SCHED_OTHER && policy != SCHED_BATCH) return;  // somebody has chosen another kind
  Attributes a;
  a.policy = static_cast<uint32_t>(policy);
  a.nice = getpriority(PRIO_PROCESS, self);
  a.runtime = kSliceNs;
  (void)syscall(SYS_sched_setattr, 0, &a, 0U);
}

}  // namespace paceline
