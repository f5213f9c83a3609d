// Signals that the program's caller ignores, as nohup does with the hang-up.
#pragma once

#include <signal.h>

namespace paceline::cli {

/// Adds `number` to the signals that are to be blocked and read, unless the caller ignores it: blocked it would be queued
/// all the same, and end what its caller wants to outlive it.
inline void add_unless_ignored(sigset_t& heard, int number) {
  struct sigaction now {};
  const bool is_ignored = ::sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
  if (!is_ignored) sigaddset(&heard, number);
}

}  // namespace paceline::cli
