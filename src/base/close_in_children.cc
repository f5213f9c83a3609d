#include "base/close_in_children.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace paceline {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<int> fds;
};

/// Never destroyed: threads may end after the process's static objects.
Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

void before_fork() { registry().mutex.lock(); }
void in_parent() { registry().mutex.unlock(); }
void in_child() {
  auto& r = registry();
  for (const int fd : r.fds) ::close(fd);
  r.fds.clear();
  r.mutex.unlock();
}
[[maybe_unused]] const int registered = pthread_atfork(before_fork, in_parent, in_child);

}  // namespace

void close_in_children(int fd) {
  auto& r = registry();
  const std::lock_guard lock(r.mutex);
  r.fds.push_back(fd);
}

void keep_in_children(int fd) {
  auto& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto found = std::find(r.fds.begin(), r.fds.end(), fd);
  if (found == r.fds.end()) return;
  *found = r.fds.back();
  r.fds.pop_back();
}

}  // namespace paceline
