// The signals that end a lab, as readable events: nothing is torn down inside a signal handler.
#pragma once

#include <signal.h>

#include <string>

namespace paceline::lab {

/// SIGINT, SIGTERM and SIGHUP come as readable events for as long as it lives; those that the caller
/// ignores (nohup: the hang-up) stay ignored. SIGPIPE is ignored: a lost reader is an error of write().
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  /// A signalfd.
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] bool pending() const;
  /// 128 + the pending signal, which it takes.
  [[nodiscard]] int exit_code() const;

 private:
  int fd_ = -1;
  sigset_t before_{};
};

/// Writes to standard error. Waits for a reader that does not read, until a signal is pending: who holds the output up
/// must not hold up the lab's end.
void tell(const Signals& signals, const std::string& text);

}  // namespace paceline::lab
