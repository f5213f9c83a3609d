#include "cli/lab/signals.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "cli/ignored_signals.h"
#include "cli/text/output.h"

namespace paceline::lab {

Signals::Signals() {
  sigset_t heard;
  sigemptyset(&heard);
  for (int number : {SIGINT, SIGTERM, SIGHUP}) cli::add_unless_ignored(heard, number);
  sigprocmask(SIG_BLOCK, &heard, &before_);
  signal(SIGPIPE, SIG_IGN);
  fd_ = signalfd(-1, &heard, SFD_CLOEXEC);
}

Signals::~Signals() {
  close(fd_);
  sigprocmask(SIG_SETMASK, &before_, nullptr);
}

bool Signals::pending() const {
  pollfd p{fd_, POLLIN, 0};
  return poll(&p, 1, 0) > 0;
}

int Signals::exit_code() const {
  signalfd_siginfo info{};
  return read(fd_, &info, sizeof info) == sizeof info ? 128 + static_cast<int>(info.ssi_signo) : 1;
}

void tell(const Signals& signals, const std::string& text) {
  cli::Outlet outlet(STDERR_FILENO);
  outlet.put(text);
  for (outlet.write_some(); !outlet.is_empty() && !signals.pending(); outlet.write_some()) {
    pollfd waiting[] = {{STDERR_FILENO, POLLOUT, 0}, {signals.fd(), POLLIN, 0}};
    poll(waiting, 2, -1);
  }
}

}  // namespace paceline::lab
