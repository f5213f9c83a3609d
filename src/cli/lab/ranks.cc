#include "cli/lab/ranks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "cli/lab/owner.h"
#include "cli/lab/rank_process.h"
#include "cli/text/output.h"

namespace paceline::lab {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kKillAfter = std::chrono::seconds(3);  // from SIGTERM to SIGKILL
constexpr ssize_t kChunk = 16384;
/// Where no pidfd tells of a rank's end it is looked for so often: nobody notices, and it costs next to nothing.
constexpr std::chrono::milliseconds kLook{20};

/// One of a rank's output streams on its way to the lab's own.
class Source {
 public:
  Source(int from, cli::Outlet& to, int rank)
      : from_(from), lines_(to, fmt::format("[{}] ", rank)) {}
  ~Source() { end(); }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  /// What to poll: nothing (-1) while the outlet can't take more, so that the rank waits for its reader.
  [[nodiscard]] int fd() { return lines_.outlet().is_full() ? -1 : from_; }
  /// Reads a part of what is there; 0: there is nothing (now).
  ssize_t pump() {
    char buffer[kChunk];
    if (from_ < 0) return 0;
    auto n = read(from_, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) return pump();
    if (n < 0 && errno == EAGAIN) return 0;
    if (n <= 0) return end(), 0;
    lines_.write({buffer, static_cast<std::size_t>(n)});
    return n;
  }
  /// What the pipe holds at most. A process that has left the rank's group and goes on printing is not waited for.
  void take_rest() {
    for (ssize_t left = std::max(fcntl(from_, F_GETPIPE_SZ), 0); left > 0;) {
      auto n = pump();
      if (n == 0) break;
      left -= n;
    }
    end();
  }

 private:
  void end() {
    if (from_ < 0) return;
    lines_.flush();
    close(std::exchange(from_, -1));
  }
  int from_;
  cli::OutputStream lines_;
};

struct Process {
  Process(RankProcess started_as, cli::Outlet& to_out, cli::Outlet& to_err, int rank)
      : it(started_as), out(started_as.output, to_out, rank), err(started_as.error, to_err, rank) {}
  ~Process() {
    if (it.pid_fd >= 0) close(it.pid_fd);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  RankProcess it;
  Source out, err;
  Clock::time_point started = Clock::now();
  std::optional<RankResult> result;
};

/// The state of a run: who lives, who failed first, when patience ends.
class Run {
 public:
  Run(const std::vector<RankSpec>& specs, const RunOptions& options)
      : specs_(specs), options_(options) {}
  ~Run() {
    for (auto& p : processes_) {
      if (p->result) continue;
      kill(-p->it.pid, SIGKILL);
      waitpid(p->it.pid, nullptr, 0);
    }
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  Status start(const std::vector<std::string>& command) {
    for (const auto& spec : specs_) {
      PACELINE_ASSIGN(auto process, start_rank(spec, command, options_.janitor));
      processes_.push_back(std::make_unique<Process>(process, out_, err_, spec.rank));
    }
    return Status::ok();
  }
  RunResult wait() {
    while (living() > 0) step();
    result_.seconds = std::chrono::duration<double>(Clock::now() - started_).count();
    tell_failure();
    drain();
    for (const auto& p : processes_) result_.ranks.push_back(*p->result);
    return result_;
  }

 private:
  [[nodiscard]] int living() const {
    return static_cast<int>(
        std::count_if(processes_.begin(), processes_.end(), [](auto& p) { return !p->result; }));
  }
  [[nodiscard]] int timeout_ms() const {
    auto next = kill_at_ ? kill_at_ : term_at_;
    const bool looks = std::any_of(processes_.begin(), processes_.end(), is_unannounced);
    if (!next) return looks ? static_cast<int>(kLook.count()) : -1;
    auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
    if (looks) left = std::min(left, kLook);
    return static_cast<int>(std::max(left, std::chrono::milliseconds(0)).count());
  }
  /// One that lives, and whose end no descriptor will tell.
  static bool is_unannounced(const std::unique_ptr<Process>& p) {
    return !p->result && p->it.pid_fd < 0;
  }
  void signal_living(int signal) {
    for (auto& p : processes_) {
      if (!p->result) kill(-p->it.pid, signal);
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
    if (read(options_.signals, &info, sizeof info) != sizeof info) return;
    bool again = result_.interrupted_by != 0;
    result_.interrupted_by = static_cast<int>(info.ssi_signo);
    result_.exit_code = 128 + result_.interrupted_by;
    signal_living(again ? SIGKILL : result_.interrupted_by);
    term_at_.reset();
    kill_at_ = Clock::now() + kKillAfter;
    if (living() == 0) gives_up_ = true;
  }
  void reap(Process& p, int rank);
  void tell_failure();
  void check_output();
  void step();
  void drain();

  const std::vector<RankSpec>& specs_;
  RunOptions options_;
  cli::Outlet out_{STDOUT_FILENO}, err_{STDERR_FILENO};
  std::vector<std::unique_ptr<Process>> processes_;
  Clock::time_point started_ = Clock::now();
  std::optional<Clock::time_point> term_at_, kill_at_;
  bool reader_gone_ = false, gives_up_ = false;
  RunResult result_;
};

/// Takes the end of a rank. What is left of its group ends with it, while its pid still is its own.
void Run::reap(Process& p, int rank) {
  siginfo_t ended{};
  if (waitid(P_PID, static_cast<id_t>(p.it.pid), &ended, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      ended.si_pid != p.it.pid) {
    return;
  }
  kill(-p.it.pid, SIGKILL);
  p.out.take_rest();
  p.err.take_rest();
  if (options_.janitor >= 0) tell_janitor(options_.janitor, JanitorWord::kEnded, p.it.pid);
  int status = 0;
  rusage usage{};
  while (wait4(p.it.pid, &status, 0, &usage) < 0 && errno == EINTR) {
  }
  RankResult r;
  r.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  r.seconds = std::chrono::duration<double>(Clock::now() - p.started).count();
  auto cpu = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  r.cpu_seconds = cpu(usage.ru_utime) + cpu(usage.ru_stime);
  r.max_rss_kb = usage.ru_maxrss;
  p.result = r;
  if (r.exit_code == 0 || result_.first_failed >= 0 || result_.interrupted_by != 0 || reader_gone_)
    return;
  result_.first_failed = rank;
  result_.exit_code = r.exit_code;
  if (living() > 0) term_at_ = Clock::now() + options_.grace;
}

void Run::tell_failure() {
  if (result_.first_failed < 0) return;
  const int failed = result_.first_failed;
  const int code = processes_[static_cast<std::size_t>(failed)]->result->exit_code;
  auto how = code > 128 && code < 128 + 65
                 ? fmt::format("was killed by signal {} ({})", code - 128, strsignal(code - 128))
                 : fmt::format("ended with exit code {}", code);
  err_.put(fmt::format("lab: rank {} on node{} {}, the first to fail\n", failed,
                       specs_[static_cast<std::size_t>(failed)].node, how));
}

/// A lost reader ends the ranks, as it ends a command in a pipeline; a full disk only changes the exit code.
void Run::check_output() {
  if (reader_gone_ || !(out_.reader_gone() || err_.reader_gone())) return;
  reader_gone_ = true;
  if (result_.exit_code == 0) result_.exit_code = 128 + SIGPIPE;
  if (living() > 0) term_at_ = Clock::now();
}

void Run::step() {
  std::vector<pollfd> fds{{options_.signals, POLLIN, 0}};
  for (const auto* outlet : {&out_, &err_})
    fds.push_back({outlet->is_empty() ? -1 : outlet->descriptor(), POLLOUT, 0});
  for (auto& p : processes_) {
    fds.push_back({p->result ? -1 : p->it.pid_fd, POLLIN, 0});
    fds.push_back({p->out.fd(), POLLIN, 0});
    fds.push_back({p->err.fd(), POLLIN, 0});
  }
  if (poll(fds.data(), fds.size(), timeout_ms()) > 0) {
    if (fds[0].revents != 0) on_signal();
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      auto& p = *processes_[i];
      if (fds[4 + 3 * i].revents != 0) p.out.pump();
      if (fds[5 + 3 * i].revents != 0) p.err.pump();
      if (fds[3 + 3 * i].revents != 0) reap(p, specs_[i].rank);
    }
  }
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    if (is_unannounced(processes_[i])) reap(*processes_[i], specs_[i].rank);
  }
  out_.write_some();
  err_.write_some();
  check_output();
  check_clock();
}

/// Until the readers have all, or a signal says that nobody wants it.
void Run::drain() {
  bool was_said = false;
  for (auto* outlet : {&out_, &err_}) outlet->end_line();
  const auto until = result_.interrupted_by != 0 ? kill_at_ : std::nullopt;
  while (!gives_up_) {
    out_.write_some();
    if (!was_said && !out_.status().is_ok() && !out_.reader_gone()) {
      was_said = true;
      err_.put(fmt::format("lab: {}\n", out_.status().message()));
    }
    err_.write_some();
    check_output();
    if (out_.is_empty() && err_.is_empty()) break;
    if (until && Clock::now() >= *until) break;
    step();
  }
  bool lost = !out_.status().is_ok() || !err_.status().is_ok();
  if (lost && result_.exit_code == 0) result_.exit_code = kOutputLost;
}

}  // namespace

Result<RunResult> run_ranks(const std::vector<RankSpec>& specs,
                            const std::vector<std::string>& command, const RunOptions& options) {
  Run run(specs, options);
  PACELINE_RETURN_IF_ERROR(run.start(command));
  return run.wait();
}

}  // namespace paceline::lab
