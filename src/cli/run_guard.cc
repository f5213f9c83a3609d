#include "cli/run_guard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "cli/descriptors.h"

namespace paceline::cli {
namespace {

constexpr int kGraceMs = 2000;  // between SIGTERM and SIGKILL

struct Pipe {
  int read = -1;
  int write = -1;
};

Result<Pipe> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    return Status(Code::kResourceExhausted,
                  fmt::format("pipe: {} (ulimit -n)", std::strerror(errno)));
  }
  return Pipe{ends[0], ends[1]};
}

/// On the command's standard error, where the launcher reads it.
[[noreturn]] void give_up(const Command& command, int why, int exit_code) {
  auto text = fmt::format("paceline run: '{}': {}\n", command.arguments[0], std::strerror(why));
  [[maybe_unused]] auto written = ::write(2, text.data(), text.size());
  ::_exit(exit_code);
}

[[noreturn]] void execute(const Command& command) {
  for (const auto& name : command.unset) ::unsetenv(name.c_str());
  for (const auto& [name, value] : command.environment) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> arguments;
  arguments.reserve(command.arguments.size() + 1);
  for (const auto& argument : command.arguments)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  int why = errno;
  give_up(command, why, why == ENOENT ? 127 : 126);
}

/// The first process of the command's group: signals as the launcher found them, no orphan if the
/// guard dies.
[[noreturn]] void become_command(const Command& command, pid_t guard) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != guard) ::_exit(1);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  ::signal(SIGPIPE, SIG_DFL);  // the launcher's own doing; the others are as its caller has them
  execute(command);
}

[[noreturn]] void end_like(int status) {
  ::_exit(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
}

/// Runs in the guard until the command has ended.
[[noreturn]] void watch(pid_t child, int control) {
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  sigset_t ended;
  sigemptyset(&ended);
  sigaddset(&ended, SIGCHLD);
  int signals = ::signalfd(-1, &ended, SFD_CLOEXEC | SFD_NONBLOCK);
  int timeout = -1;
  while (true) {
    // A child that ended before the mask was set left no signal behind: look before every wait.
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) {
      ::kill(-child, SIGKILL);
      end_like(status);
    }
    pollfd waiting[2] = {{signals, POLLIN, 0}, {control, POLLIN, 0}};
    int ready = ::poll(waiting, control >= 0 ? 2 : 1, timeout < 0 ? 1000 : timeout);
    if (ready == 0 && timeout >= 0) ::kill(-child, SIGKILL);
    if (waiting[0].revents != 0) {
      signalfd_siginfo info;
      while (::read(signals, &info, sizeof(info)) == sizeof(info)) {
      }
    }
    if (control >= 0 && waiting[1].revents != 0) {
      unsigned char number = 0;
      auto n = ::read(control, &number, 1);
      if (n == 1) {
        ::kill(-child, number);
      } else if (n == 0) {
        ::kill(-child, SIGTERM);
        ::kill(-child, SIGCONT);  // a stopped process could not end
        control = -1;
        timeout = kGraceMs;
      }
    }
  }
}

[[noreturn]] void become_guard(const Command& command, int control, int output, int error) {
  ::setpgid(0, 0);  // a terminal's Ctrl-C reaches the launcher alone, which passes it on
  int input = command.input >= 0 ? command.input : ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::dup2(input, 0);
  ::dup2(output, 1);
  ::dup2(error, 2);
  // Only what the command needs stays open: another guard's pipe end held here would hide its end.
  constexpr int kControl = 3;
  ::dup2(control, kControl);
  ::fcntl(kControl, F_SETFD, FD_CLOEXEC);
  close_descriptors_from(kControl + 1);
  if (command.descriptors) ::setrlimit(RLIMIT_NOFILE, &*command.descriptors);
  pid_t guard = ::getpid();
  pid_t child = ::fork();
  if (child == 0) become_command(command, guard);
  if (child < 0) give_up(command, errno, 126);
  ::setpgid(child, child);
  // The command alone holds its output: when it has ended, the launcher sees the end of the stream.
  int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int descriptor = 0; descriptor < 3; ++descriptor) ::dup2(null, descriptor);
  watch(child, kControl);
}

}  // namespace

Result<Guarded> start_guarded(const Command& command) {
  PACELINE_ASSIGN(auto control, make_pipe());
  PACELINE_ASSIGN(auto output, make_pipe());
  PACELINE_ASSIGN(auto error, make_pipe());
  pid_t pid = ::fork();
  if (pid == 0) become_guard(command, control.read, output.write, error.write);
  ::close(control.read);
  ::close(output.write);
  ::close(error.write);
  if (pid < 0) {
    for (int descriptor : {control.write, output.read, error.read}) ::close(descriptor);
    return Status(Code::kResourceExhausted, fmt::format("fork: {}", std::strerror(errno)));
  }
  for (int descriptor : {output.read, error.read}) {
    ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) | O_NONBLOCK);
  }
  return Guarded{.pid = pid, .control = control.write, .output = output.read, .error = error.read};
}

}  // namespace paceline::cli
