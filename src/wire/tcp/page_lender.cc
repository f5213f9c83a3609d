#include "wire/tcp/page_lender.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>
#include <csignal>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "base/log.h"

namespace paceline::wire {
namespace {

constexpr int kPipeBytes = 512 * 1024;
constexpr std::size_t kAtOnce = 256 * 1024;

/// splice(2) has no MSG_NOSIGNAL: a broken connection raises SIGPIPE in this thread.
class SigpipeGuard {
 public:
  SigpipeGuard() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~SigpipeGuard() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SigpipeGuard(const SigpipeGuard&) = delete;
  SigpipeGuard& operator=(const SigpipeGuard&) = delete;
  /// Takes the signal that an EPIPE has just raised, unless the thread had blocked it anyway.
  void swallow() {
    if (sigismember(&before_, SIGPIPE) == 1) return;
    timespec none{};
    while (sigtimedwait(&pipe_, nullptr, &none) == -1 && errno == EINTR) {
    }
  }

 private:
  sigset_t pipe_{};
  sigset_t before_{};
};

}  // namespace

// False: not now, or, where usable_ has become false, not at all.
bool PageLender::open() {
  if (read_end_.valid()) return true;
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_NONBLOCK | O_CLOEXEC) == 0) {
    read_end_.reset(ends[0]);
    write_end_.reset(ends[1]);
    nowhere_.reset(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  }
  if (!nowhere_.valid()) {
    const int error = errno;
    close();
    usable_ = error == EMFILE || error == ENFILE || error == ENOMEM;
    if (usable_ && log::first("tcp pages")) {
      log::warning(
          "no descriptors to lend memory to the network ({}): it is copied until there are; raise "
          "'ulimit -n'",
          std::strerror(error));
    }
    return false;
  }
  // Where the kernel grants no more, the pipe's 64 KiB do: pieces then take more calls.
  ::fcntl(write_end_.get(), F_SETPIPE_SZ, kPipeBytes);
  int size = ::fcntl(write_end_.get(), F_GETPIPE_SZ);
  at_once_ = std::min<std::size_t>(kAtOnce, size > 0 ? static_cast<std::size_t>(size) : 0);
  usable_ = at_once_ >= kWorthwhile;
  return usable_;
}

void PageLender::close() {
  read_end_.reset();
  write_end_.reset();
  nowhere_.reset();
}

void PageLender::drop(std::size_t bytes) {
  while (bytes > 0) {
    ssize_t n = ::splice(read_end_.get(), nullptr, nowhere_.get(), nullptr, bytes, 0);
    if (n <= 0) return close();  // never seen; a new pipe is as good
    bytes -= static_cast<std::size_t>(n);
  }
}

PageLender::Sent PageLender::send_some(int socket, std::span<const std::byte> data) {
  if (!usable_ || !open()) return {Outcome::kUnsuitable, 0, 0};
  iovec part{const_cast<std::byte*>(data.data()), std::min(data.size(), at_once_)};
  ssize_t in_pipe = ::vmsplice(write_end_.get(), &part, 1, SPLICE_F_NONBLOCK);
  if (in_pipe <= 0) {
    // EFAULT: memory without pages, such as a device's. Anything else (a sandbox) will not get better.
    if (in_pipe == 0 || errno != EFAULT) usable_ = false;
    return {Outcome::kUnsuitable, 0, 0};
  }
  lent_ = true;
  auto left = static_cast<std::size_t>(in_pipe);
  SigpipeGuard guard;
  std::size_t sent = 0;
  int error = 0;
  while (left > 0) {
    ssize_t n = ::splice(read_end_.get(), nullptr, socket, nullptr, left,
                         SPLICE_F_NONBLOCK | SPLICE_F_MOVE);
    if (n <= 0) {
      error = n == 0 ? EPIPE : errno;
      if (error == EINTR) continue;
      if (error == EPIPE) guard.swallow();
      break;
    }
    sent += static_cast<std::size_t>(n);
    left -= static_cast<std::size_t>(n);
  }
  drop(left);
  if (sent > 0) return {Outcome::kSent, sent, 0};
  if (error == EAGAIN) return {Outcome::kBlocked, 0, 0};
  if (error == EINVAL) {  // a kernel that can't splice to this socket
    usable_ = false;
    return {Outcome::kUnsuitable, 0, 0};
  }
  return {Outcome::kBroken, 0, error};
}

}  // namespace paceline::wire
