// For tests: a process whose table of file descriptors is full.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace paceline::testing {

/// While it lives, this process gets no file descriptor, or only `spare` more: EMFILE.
class NoDescriptors {
 public:
  explicit NoDescriptors(int spare = 0) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit low = before_;
    low.rlim_cur = std::min<rlim_t>(low.rlim_cur, 512);
    ::setrlimit(RLIMIT_NOFILE, &low);
    for (int fd = 0; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) held_.push_back(fd);
    for (int i = 0; i < spare && !held_.empty(); ++i) {
      ::close(held_.back());
      held_.pop_back();
    }
  }
  ~NoDescriptors() {
    for (int fd : held_) ::close(fd);
    ::setrlimit(RLIMIT_NOFILE, &before_);
  }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
  std::vector<int> held_;
};

}  // namespace paceline::testing
