#include "cli/run_job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>

#include "base/clock.h"
#include "cli/descriptors.h"
#include "cli/file_errors.h"
#include "cli/ignored_signals.h"
#include "cli/text/output.h"

namespace paceline::cli {
namespace {

constexpr Time kKillAfter = 5 * kSecond;  // from SIGTERM to SIGKILL, when another rank failed
constexpr int kOutputLost = 1;            // the ranks ended well, but what they said is not there
constexpr Time kSilence = 200 * kMillisecond;  // an unfinished line is shown after this
constexpr rlim_t kDescriptors = 256;           // of the launcher itself, and of strangers
constexpr rlim_t kRankDescriptors = 7;  // of each rank: pipes, files, connection to the server
constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP};
constexpr int kSshFailed = 255;  // what ssh itself ends with

struct Running {
  const JobProcess* process = nullptr;
  Guarded guarded;
  int input = -1;        // remote: our end of its standard input
  std::string to_write;  // remote: not yet written to it
  std::unique_ptr<OutputStream> output;
  std::unique_ptr<OutputStream> error;
  Time output_heard = 0;  // when it last said something, or could not
  Time error_heard = 0;
  bool ended = false;
  int exit_code = 0;
};

void close_descriptor(int& descriptor) {
  if (descriptor >= 0) ::close(descriptor);
  descriptor = -1;
}

const char* signal_word(int number) {
  switch (number) {
    case SIGINT:
      return "INT";
    case SIGHUP:
      return "HUP";
    case SIGQUIT:
      return "QUIT";
    case SIGUSR1:
      return "USR1";
    case SIGUSR2:
      return "USR2";
    case SIGKILL:
      return "KILL";
    case SIGSTOP:
      return "STOP";
    case SIGCONT:
      return "CONT";
    default:
      return "TERM";
  }
}

class Job {
 public:
  explicit Job(const JobOptions& options) : options_(options) {}
  ~Job();
  Status start(const std::vector<JobProcess>& processes);
  int run();

 private:
  void make_room(std::size_t ranks);
  Status start_one(const JobProcess& process);
  Status open_output(Running& running);
  void wait_for_something();
  void read_signals();
  bool read_output(int& descriptor, OutputStream& stream);
  void listen(int& descriptor, OutputStream& stream, Time& heard);
  void feed(Running& running);
  void reap();
  void ended(Running& running, int status);
  void signal_all(int number);
  void terminate(Time now);
  [[nodiscard]] bool finished() const;
  [[nodiscard]] bool output_lost() const { return out_.reader_gone() || error_.reader_gone(); }
  void pause();
  void drain();
  void say(const std::string& sentence);

  JobOptions options_;
  Outlet out_{STDOUT_FILENO};
  Outlet error_{STDERR_FILENO};
  std::vector<Running> running_;
  SteadyClock clock_;
  sigset_t old_mask_{};
  rlimit old_descriptors_{};
  int signals_ = -1;
  int exit_code_ = 0;
  bool terminating_ = false;
  int interrupts_ = 0;
  Time kill_at_ = kNever;
};

Job::~Job() {
  // Closing the control pipes makes the guards end whatever still runs.
  for (auto& running : running_) {
    close_descriptor(running.guarded.control);
    close_descriptor(running.guarded.output);
    close_descriptor(running.guarded.error);
    close_descriptor(running.input);
  }
  if (signals_ >= 0) {
    ::close(signals_);
    sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
  }
}

/// The usual limit of 1024 descriptors is enough for 200 remote ranks. What they start with is what the caller has.
void Job::make_room(std::size_t ranks) {
  old_descriptors_ = make_room_for_descriptors(kDescriptors + kRankDescriptors * ranks);
}

Status Job::start(const std::vector<JobProcess>& processes) {
  sigset_t watched;
  sigemptyset(&watched);
  for (int number : kForwarded) add_unless_ignored(watched, number);
  sigaddset(&watched, SIGCHLD);
  sigprocmask(SIG_BLOCK, &watched, &old_mask_);
  ::signal(SIGPIPE, SIG_IGN);
  signals_ = ::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  make_room(processes.size());
  running_.reserve(processes.size());
  for (const auto& process : processes) PACELINE_RETURN_IF_ERROR(start_one(process));
  return {};
}

Status Job::open_output(Running& running) {
  auto mark = [&](const char* name) {
    return options_.prefix_output ? fmt::format("[{}]<{}> ", running.process->rank, name) : "";
  };
  running.output = std::make_unique<OutputStream>(out_, mark("stdout"));
  running.error = std::make_unique<OutputStream>(error_, mark("stderr"));
  if (options_.output_directory.empty()) return {};
  auto folder = std::filesystem::path(options_.output_directory) /
                fmt::format("rank.{}", running.process->rank);
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure) {
    return {Code::kInvalidArgument,
            unwritable("--output-filename: " + folder.string(), failure.value(), "folder")};
  }
  PACELINE_RETURN_IF_ERROR(running.output->tee((folder / "stdout").string()));
  return running.error->tee((folder / "stderr").string());
}

Status Job::start_one(const JobProcess& process) {
  auto& running = running_.emplace_back();
  running.process = &process;
  PACELINE_RETURN_IF_ERROR(open_output(running));
  Command command = process.command;
  command.descriptors = old_descriptors_;
  int ends[2] = {-1, -1};
  if (process.remote) {
    if (::pipe2(ends, O_CLOEXEC) != 0) {
      return {Code::kResourceExhausted, fmt::format("pipe: {} (ulimit -n)", std::strerror(errno))};
    }
    ::fcntl(ends[1], F_SETFL, O_NONBLOCK);
    command.input = ends[0];
    running.input = ends[1];
    running.to_write = process.first_input;
  }
  auto started = start_guarded(command);
  if (ends[0] >= 0) ::close(ends[0]);
  if (!started) {
    running.ended = true;
    return started.status();
  }
  running.guarded = *started;
  return {};
}

bool Job::read_output(int& descriptor, OutputStream& stream) {
  char buffer[16384];
  auto n = ::read(descriptor, buffer, sizeof(buffer));
  if (n > 0) {
    stream.write({buffer, static_cast<std::size_t>(n)});
    return true;
  }
  if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
    stream.flush();
    close_descriptor(descriptor);
  }
  return false;
}

void Job::listen(int& descriptor, OutputStream& stream, Time& heard) {
  if (descriptor < 0) return;
  // Who is not read is not silent: the rest of its line may wait in the pipe.
  if (stream.outlet().is_full() || read_output(descriptor, stream)) {
    heard = clock_.now();
  } else if (clock_.now() - heard >= kSilence) {
    stream.flush();
  }
}

void Job::feed(Running& running) {
  while (running.input >= 0 && !running.to_write.empty()) {
    auto n = ::write(running.input, running.to_write.data(), running.to_write.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) {
      close_descriptor(running.input);
      return;
    }
    running.to_write.erase(0, static_cast<std::size_t>(n));
  }
}

void Job::read_signals() {
  signalfd_siginfo info;
  while (::read(signals_, &info, sizeof(info)) == sizeof(info)) {
    int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) continue;
    if (number == SIGTSTP) {
      pause();
      continue;
    }
    signal_all(number);
    if (number == SIGUSR1 || number == SIGUSR2) continue;
    // Asked to end: the ranks may clean up, then they are ended. A second Ctrl-C does not wait.
    if (exit_code_ == 0) exit_code_ = 128 + number;
    terminating_ = true;
    kill_at_ = std::min(kill_at_, after(clock_.now(), kKillAfter));
    if (++interrupts_ > 1) kill_at_ = clock_.now();
  }
}

/// Ctrl-Z: the ranks, whose groups the terminal does not reach, stop and go on with the launcher.
void Job::pause() {
  signal_all(SIGSTOP);
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTSTP);
  ::raise(SIGTSTP);
  sigprocmask(SIG_UNBLOCK, &stop, nullptr);  // here it stops
  sigprocmask(SIG_BLOCK, &stop, nullptr);
  signal_all(SIGCONT);
}

void Job::say(const std::string& sentence) {
  if (!options_.quiet) error_.put("paceline run: " + sentence + "\n");
}

void Job::signal_all(int number) {
  for (auto& running : running_) {
    if (running.ended) continue;
    if (running.process->remote && running.input >= 0) {
      running.to_write += fmt::format("{}\n", signal_word(number));
      feed(running);
    } else {
      auto byte = static_cast<unsigned char>(number);
      [[maybe_unused]] auto written = ::write(running.guarded.control, &byte, 1);
    }
  }
}

void Job::terminate(Time now) {
  if (terminating_) return;
  terminating_ = true;
  kill_at_ = after(now, kKillAfter);
  signal_all(SIGTERM);
  signal_all(SIGCONT);
}

void Job::ended(Running& running, int status) {
  running.ended = true;
  close_descriptor(running.guarded.control);
  close_descriptor(running.input);
  running.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (running.exit_code == 0 || terminating_) return;
  exit_code_ = running.exit_code;
  auto how = running.exit_code > 128 && running.exit_code < 128 + 65
                 ? fmt::format("was ended by signal {} ({})", running.exit_code - 128,
                               ::strsignal(running.exit_code - 128))
                 : fmt::format("ended with exit code {}", running.exit_code);
  if (running.process->remote && running.exit_code == kSshFailed) {
    how += fmt::format(
        ", as ssh does where it can't log in: 'ssh -o BatchMode=yes {} true' must succeed from "
        "here",
        running.process->where);
  }
  bool others = std::any_of(running_.begin(), running_.end(), [](auto& r) { return !r.ended; });
  say(fmt::format("rank {} (host {}) {}{}", running.process->rank, running.process->where, how,
                  others ? "; ending the others" : ""));
  terminate(clock_.now());
}

void Job::reap() {
  for (auto& running : running_) {
    int status = 0;
    if (!running.ended && ::waitpid(running.guarded.pid, &status, WNOHANG) == running.guarded.pid) {
      ended(running, status);
    }
  }
}

bool Job::finished() const {
  return std::all_of(running_.begin(), running_.end(), [](auto& r) { return r.ended; });
}

void Job::wait_for_something() {
  std::vector<pollfd> waiting{{signals_, POLLIN, 0}};
  if (options_.service_fd >= 0) waiting.push_back({options_.service_fd, POLLIN, 0});
  for (const Outlet* outlet : {&out_, &error_}) {
    if (!outlet->is_empty()) waiting.push_back({outlet->descriptor(), POLLOUT, 0});
  }
  for (auto& running : running_) {
    if (running.guarded.output >= 0 && !out_.is_full())
      waiting.push_back({running.guarded.output, POLLIN, 0});
    if (running.guarded.error >= 0 && !error_.is_full())
      waiting.push_back({running.guarded.error, POLLIN, 0});
    if (running.input >= 0 && !running.to_write.empty())
      waiting.push_back({running.input, POLLOUT, 0});
  }
  ::poll(waiting.data(), waiting.size(), static_cast<int>(kSilence / kMillisecond));
}

int Job::run() {
  while (!finished()) {
    wait_for_something();
    if (options_.service) options_.service();
    read_signals();
    for (auto& running : running_) {
      listen(running.guarded.output, *running.output, running.output_heard);
      listen(running.guarded.error, *running.error, running.error_heard);
      feed(running);
    }
    out_.write_some();
    error_.write_some();
    if (output_lost() && !terminating_) {
      exit_code_ = 128 + SIGPIPE;  // as a command in a pipeline ends whose reader has gone
      terminate(clock_.now());
    }
    reap();
    if (clock_.now() >= kill_at_) {
      signal_all(SIGKILL);
      for (auto& running : running_) close_descriptor(running.input);
      kill_at_ = after(clock_.now(), kSecond);
    }
  }
  drain();
  return exit_code_;
}

/// What is still in the pipes, until the reader has taken it or a signal says that nobody wants it.
void Job::drain() {
  // A process that left the group and kept its pipes open is not waited for.
  for (auto& running : running_) {
    while (running.guarded.output >= 0 && read_output(running.guarded.output, *running.output)) {
    }
    while (running.guarded.error >= 0 && read_output(running.guarded.error, *running.error)) {
    }
    close_descriptor(running.guarded.output);
    close_descriptor(running.guarded.error);
    running.output->flush();
    running.error->flush();
    for (auto* stream : {running.output.get(), running.error.get()}) {
      if (stream->status().is_ok()) continue;
      say(fmt::format("rank {}: {}", running.process->rank, stream->status().message()));
      if (exit_code_ == 0) exit_code_ = kOutputLost;
    }
  }
  for (bool was_said = false;;) {
    if (options_.service) options_.service();  // who knocks still would keep poll() awake
    out_.write_some();
    if (!was_said && !out_.status().is_ok()) {
      was_said = true;
      if (exit_code_ == 0) exit_code_ = kOutputLost;
      if (!out_.reader_gone()) say(out_.status().message());
    }
    error_.write_some();
    if (out_.is_empty() && error_.is_empty()) return;
    const int before = interrupts_;
    read_signals();
    if (interrupts_ > before || (interrupts_ > 0 && clock_.now() >= kill_at_)) return;
    wait_for_something();
  }
}

}  // namespace

Result<int> run_job(const std::vector<JobProcess>& processes, const JobOptions& options) {
  Job job(options);
  PACELINE_RETURN_IF_ERROR(job.start(processes));
  return job.run();
}

}  // namespace paceline::cli
