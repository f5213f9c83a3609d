#include "cli/lab/ranks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "base/log.h"

namespace paceline::lab {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kKillAfter = std::chrono::seconds(3);  // from SIGTERM to SIGKILL
constexpr auto kDrainFor = std::chrono::milliseconds(300);

/// One of a rank's output streams: whole lines go on, each with the rank in front.
class LineStream {
 public:
  LineStream(int from, int to, int rank)
      : from_(from), to_(to), prefix_(fmt::format("[{}] ", rank)) {}
  ~LineStream() { end(); }
  LineStream(const LineStream&) = delete;
  LineStream& operator=(const LineStream&) = delete;
  [[nodiscard]] int fd() const { return from_; }

  /// Reads what is there.
  void pump() {
    char buffer[16384];
    auto n = read(from_, buffer, sizeof buffer);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) return end();
    pending_.append(buffer, static_cast<std::size_t>(n));
    std::string out;
    std::size_t at = 0;
    for (std::size_t line; (line = pending_.find('\n', at)) != std::string::npos; at = line + 1) {
      out += prefix_;
      out.append(pending_, at, line + 1 - at);
    }
    pending_.erase(0, at);
    if (pending_.size() > (64U << 10)) append_rest(out);
    put(out);
  }
  void end() {
    if (from_ < 0) return;
    std::string rest;
    if (!pending_.empty()) append_rest(rest);
    put(rest);
    close(std::exchange(from_, -1));
  }

 private:
  /// What has no line end yet, as a line.
  void append_rest(std::string& out) {
    out.append(prefix_).append(std::exchange(pending_, {})) += '\n';
  }
  void put(const std::string& text) const {
    for (std::size_t at = 0; at < text.size();) {
      auto n = write(to_, text.data() + at, text.size() - at);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return;  // our own reader has gone; the ranks go on
      at += static_cast<std::size_t>(n);
    }
  }
  int from_, to_;
  std::string prefix_, pending_;
};

struct Process {
  pid_t pid = -1;
  int pid_fd = -1;
  std::unique_ptr<LineStream> out, err;
  Clock::time_point started;
  std::optional<RankResult> result;
};

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& over) {
  std::vector<std::string> merged;
  for (char** e = environ; *e != nullptr; ++e) {
    std::string entry(*e);
    if (over.count(entry.substr(0, entry.find('='))) == 0) merged.push_back(std::move(entry));
  }
  for (const auto& [name, value] : over) merged.push_back(fmt::format("{}={}", name, value));
  return merged;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  out.reserve(texts.size() + 1);
  for (const auto& t : texts) out.push_back(const_cast<char*>(t.c_str()));
  out.push_back(nullptr);
  return out;
}

/// Between fork and exec: system calls only, for other threads of the lab may hold locks.
[[noreturn]] void become_rank(pid_t parent, int holder_fd, int root_fd, const char* directory,
                              int out, int err, char** argv, char** env) {
  auto fail = [&](const char* what) {
    const char* why = std::strerror(errno);  // of known errors: a read of a table
    for (const char* part : {"lab: ", what, ": ", why, "\n"}) {
      [[maybe_unused]] auto n = write(err, part, std::strlen(part));
    }
    _exit(127);
  };
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  setpgid(0, 0);
  if (holder_fd >= 0) {
    if (setns(holder_fd, CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS) != 0)
      fail("can't enter its node");
    // Entering a mount namespace begins at its root, which lies above ours where the lab was started in a chroot.
    if (root_fd >= 0 && (fchdir(root_fd) != 0 || chroot(".") != 0)) fail("can't enter its root");
    if (chdir(directory) != 0) fail(directory);
  }
  int null = open("/dev/null", O_RDONLY);
  dup2(null, 0);
  dup2(out, 1);
  dup2(err, 2);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  execvpe(argv[0], argv, env);
  fail(argv[0]);
  _exit(127);
}

Result<Process> start_rank(const RankSpec& spec, const std::vector<std::string>& command) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) {
    return Status(Code::kResourceExhausted, "out of descriptors; raise ulimit -n");
  }
  auto env_texts = merged_environment(spec.environment);
  auto env = pointers(env_texts);
  auto argv = pointers(command);
  char directory[4096];
  if (getcwd(directory, sizeof directory) == nullptr) std::strcpy(directory, "/");
  int holder = -1;
  int root = -1;
  if (spec.holder >= 0) {
    holder = static_cast<int>(syscall(SYS_pidfd_open, spec.holder, 0));
    root =
        open(fmt::format("/proc/{}/root", spec.holder).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  }
  pid_t self = getpid();
  pid_t pid = fork();
  if (pid == 0) become_rank(self, holder, root, directory, out[1], err[1], argv.data(), env.data());
  int failed = errno;
  for (int fd : {holder, root, out[1], err[1]}) {
    if (fd >= 0) close(fd);
  }
  if (pid < 0)
    return Status(Code::kResourceExhausted, fmt::format("fork: {}", std::strerror(failed)));
  setpgid(pid, pid);
  Process process;
  process.pid = pid;
  process.pid_fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  fcntl(process.pid_fd, F_SETFD, FD_CLOEXEC);
  for (int fd : {out[0], err[0]}) fcntl(fd, F_SETFL, O_NONBLOCK);
  process.out = std::make_unique<LineStream>(out[0], 1, spec.rank);
  process.err = std::make_unique<LineStream>(err[0], 2, spec.rank);
  process.started = Clock::now();
  return process;
}

/// The state of a run: who lives, who failed first, when patience ends.
class Run {
 public:
  Run(const std::vector<RankSpec>& specs, std::chrono::milliseconds grace, int signal_fd)
      : specs_(specs), grace_(grace), signal_fd_(signal_fd) {}
  ~Run() {
    for (auto& p : processes_) {
      if (!p.result) {
        kill(-p.pid, SIGKILL);
        waitpid(p.pid, nullptr, 0);
      }
      if (p.pid_fd >= 0) close(p.pid_fd);
    }
  }
  Status start(const std::vector<std::string>& command) {
    for (const auto& spec : specs_) {
      PACELINE_ASSIGN(auto process, start_rank(spec, command));
      processes_.push_back(std::move(process));
    }
    return Status::ok();
  }
  RunResult wait() {
    while (living() > 0) step(timeout());
    auto until = Clock::now() + kDrainFor;  // a grandchild may hold a pipe open: don't wait for it
    while (Clock::now() < until && streams_open()) step(std::chrono::milliseconds(20));
    for (const auto& p : processes_) result_.ranks.push_back(*p.result);
    return result_;
  }

 private:
  [[nodiscard]] int living() const {
    return static_cast<int>(
        std::count_if(processes_.begin(), processes_.end(), [](auto& p) { return !p.result; }));
  }
  [[nodiscard]] bool streams_open() const {
    return std::any_of(processes_.begin(), processes_.end(),
                       [](auto& p) { return p.out->fd() >= 0 || p.err->fd() >= 0; });
  }
  [[nodiscard]] std::chrono::milliseconds timeout() const {
    auto next = kill_at_ ? kill_at_ : term_at_;
    if (!next) return std::chrono::milliseconds(-1);
    auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
    return std::max(left, std::chrono::milliseconds(0));
  }
  void signal_living(int signal) {
    for (auto& p : processes_) {
      if (!p.result) kill(-p.pid, signal);
    }
  }
  void check_clock() {
    auto now = Clock::now();
    if (term_at_ && now >= *term_at_) {
      term_at_.reset();
      signal_living(SIGTERM);
      if (!kill_at_) kill_at_ = now + kKillAfter;
    }
    if (kill_at_ && now >= *kill_at_) {
      signal_living(SIGKILL);
      kill_at_ = now + kKillAfter;
    }
  }
  void on_signal() {
    signalfd_siginfo info{};
    if (read(signal_fd_, &info, sizeof info) != sizeof info) return;
    bool again = result_.interrupted_by != 0;
    result_.interrupted_by = static_cast<int>(info.ssi_signo);
    signal_living(again ? SIGKILL : result_.interrupted_by);
    term_at_.reset();
    kill_at_ = Clock::now() + kKillAfter;
  }
  void reap(std::size_t i) {
    auto& p = processes_[i];
    int status = 0;
    rusage usage{};
    if (wait4(p.pid, &status, WNOHANG, &usage) != p.pid) return;
    RankResult r;
    r.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    r.seconds = std::chrono::duration<double>(Clock::now() - p.started).count();
    auto cpu = [](const timeval& t) {
      return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
    };
    r.cpu_seconds = cpu(usage.ru_utime) + cpu(usage.ru_stime);
    r.max_rss_kb = usage.ru_maxrss;
    p.result = r;
    if (r.exit_code == 0 || result_.first_failed >= 0 || result_.interrupted_by != 0) return;
    result_.first_failed = specs_[i].rank;
    result_.exit_code = r.exit_code;
    if (living() > 0) term_at_ = Clock::now() + grace_;
  }
  void step(std::chrono::milliseconds limit) {
    std::vector<pollfd> fds{{signal_fd_, POLLIN, 0}};
    for (auto& p : processes_) {
      fds.push_back({p.result ? -1 : p.pid_fd, POLLIN, 0});
      fds.push_back({p.out->fd(), POLLIN, 0});
      fds.push_back({p.err->fd(), POLLIN, 0});
    }
    if (poll(fds.data(), fds.size(), static_cast<int>(limit.count())) > 0) {
      if (fds[0].revents != 0) on_signal();
      for (std::size_t i = 0; i < processes_.size(); ++i) {
        if (fds[2 + 3 * i].revents != 0) processes_[i].out->pump();
        if (fds[3 + 3 * i].revents != 0) processes_[i].err->pump();
        if (fds[1 + 3 * i].revents != 0) reap(i);
      }
    }
    check_clock();
  }

  const std::vector<RankSpec>& specs_;
  std::chrono::milliseconds grace_;
  int signal_fd_;
  std::vector<Process> processes_;
  std::optional<Clock::time_point> term_at_, kill_at_;
  RunResult result_;
};

}  // namespace

Result<RunResult> run_ranks(const std::vector<RankSpec>& specs,
                            const std::vector<std::string>& command,
                            std::chrono::milliseconds grace, int signal_fd) {
  Run run(specs, grace, signal_fd);
  PACELINE_RETURN_IF_ERROR(run.start(command));
  auto result = run.wait();
  if (result.first_failed >= 0) {
    auto rank = static_cast<std::size_t>(result.first_failed);
    int code = result.exit_code;
    auto how = code > 128
                   ? fmt::format("was killed by signal {} ({})", code - 128, strsignal(code - 128))
                   : fmt::format("ended with exit code {}", code);
    log::error("lab: rank {} on node{} {}, the first to fail", result.first_failed,
               specs[rank].node, how);
  }
  if (result.interrupted_by != 0) result.exit_code = 128 + result.interrupted_by;
  return result;
}

}  // namespace paceline::lab
