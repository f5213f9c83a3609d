#include "cli/bench/peer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace paceline::bench {
namespace {

namespace fs = std::filesystem;
constexpr double kStartSeconds = 180;  // importing torch on a busy machine
constexpr double kRunSeconds = 600;
constexpr const char* kReady = "ready ";  // what follows is torch's version

fs::path program_folder() { return fs::read_symlink("/proc/self/exe").parent_path(); }

Result<std::string> script() {
  fs::path bin = program_folder();
  for (const fs::path& candidate :
       {bin.parent_path() / "_bench_gloo.py",
        bin.parent_path().parent_path() / "python/paceline/_bench_gloo.py"}) {
    if (fs::exists(candidate)) return candidate.string();
  }
  return Status(Code::kUnavailable,
                "--vs gloo: _bench_gloo.py is not beside this program; reinstall the package");
}

/// The package's own before an environment that is active: who calls a program by its path means what lies beside it.
std::string interpreter(const Options& options) {
  if (!options.python.empty()) return options.python;
  if (const char* own = std::getenv("PACELINE_PYTHON"); own != nullptr && *own != '\0') return own;
  if (const char* venv = std::getenv("VIRTUAL_ENV")) return std::string(venv) + "/bin/python";
  fs::path tree = program_folder().parent_path().parent_path() / ".venv/bin/python";
  return fs::exists(tree) ? tree.string() : "python3";
}

std::vector<std::string> environment(const paceline_identity& who) {
  std::vector<std::string> out;
  bool interface_chosen = std::getenv("GLOO_SOCKET_IFNAME") != nullptr;
  for (char** e = environ; *e != nullptr; ++e) out.emplace_back(*e);
  if (!interface_chosen && who.node_count == 1) out.emplace_back("GLOO_SOCKET_IFNAME=lo");
  return out;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> out;
  out.reserve(words.size() + 1);
  for (auto& w : words) out.push_back(w.data());
  out.push_back(nullptr);
  return out;
}

struct Pipe {
  int read = -1;
  int write = -1;
};
Result<Pipe> make_pipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0)
    return Status(Code::kResourceExhausted, fmt::format("pipe: {}", std::strerror(errno)));
  return Pipe{fds[0], fds[1]};
}

}  // namespace

Result<std::unique_ptr<GlooPeer>> GlooPeer::spawn(const Options& options,
                                                  const paceline_identity& who) {
  PACELINE_ASSIGN(auto file, script());
  PACELINE_ASSIGN(auto down, make_pipe());
  PACELINE_ASSIGN(auto up, make_pipe());
  std::vector<std::string> words = {interpreter(options), file, std::to_string(who.rank),
                                    std::to_string(who.size), std::to_string(who.node_count)};
  auto env_words = environment(who);
  auto argv = pointers(words);
  auto envp = pointers(env_words);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, down.read, 0);
  posix_spawn_file_actions_adddup2(&actions, up.write, 1);
  pid_t pid = 0;
  int failed = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&actions);
  close(down.read);
  close(up.write);
  std::unique_ptr<GlooPeer> peer(new GlooPeer(words[0], failed ? 0 : pid, down.write, up.read));
  if (failed) {
    return Status(Code::kUnavailable,
                  fmt::format("--vs gloo: {} can't be started: {}; name an interpreter that has "
                              "torch by --python",
                              words[0], std::strerror(failed)));
  }
  return peer;
}

Result<std::unique_ptr<GlooPeer>> GlooPeer::start(
    const Options& options, const paceline_identity& who,
    const std::function<Result<std::string>(std::string)>& share) {
  auto peer = spawn(options, who);
  Status status = peer.status();
  std::string address;
  if (who.rank == 0 && status) {
    auto line = (*peer)->read_line(kStartSeconds);
    status = line.status();
    if (line) address = *line;
  }
  // Whatever went wrong here: all ranks take part, and learn it by an empty address.
  PACELINE_ASSIGN(address, share(address));
  PACELINE_RETURN_IF_ERROR(status);
  if (address.empty()) return Status(Code::kAborted, "--vs gloo: rank 0's peer did not start");
  PACELINE_RETURN_IF_ERROR((*peer)->write_line(address));
  PACELINE_ASSIGN(auto ready, (*peer)->read_line(kStartSeconds));
  if (!ready.starts_with(kReady))
    return Status(Code::kUnavailable,
                  fmt::format("--vs gloo: {} says: {}", (*peer)->python_, ready));
  (*peer)->torch_ = ready.substr(std::strlen(kReady));
  return peer;
}

GlooPeer::~GlooPeer() {
  close(to_);
  close(from_);
  if (pid_ <= 0) return;
  // It ends by itself when its input does; a hung one is not waited for.
  for (int i = 0; i < 50; ++i) {
    if (waitpid(pid_, nullptr, WNOHANG) != 0) return;
    usleep(100'000);
  }
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

Status GlooPeer::gone() const {
  return {
      Code::kPeerLost,
      fmt::format("--vs gloo: {} has ended (what it said is above); if it has no torch, name an "
                  "interpreter that has it by --python",
                  python_)};
}

Status GlooPeer::write_line(const std::string& line) const {
  std::string text = line + "\n";
  for (std::size_t at = 0; at < text.size();) {
    ssize_t n = write(to_, text.data() + at, text.size() - at);
    if (n <= 0) return gone();
    at += static_cast<std::size_t>(n);
  }
  return Status::ok();
}

Result<std::string> GlooPeer::read_line(double seconds) {
  for (;;) {
    if (auto end = buffered_.find('\n'); end != std::string::npos) {
      std::string line = buffered_.substr(0, end);
      buffered_.erase(0, end + 1);
      return line;
    }
    pollfd fd{from_, POLLIN, 0};
    if (poll(&fd, 1, static_cast<int>(seconds * 1000)) == 0) {
      return Status(Code::kTimeout,
                    fmt::format("--vs gloo: no answer of {} for {} s", python_, seconds));
    }
    char buffer[65536];
    ssize_t n = read(from_, buffer, sizeof buffer);
    if (n <= 0) return gone();
    buffered_.append(buffer, static_cast<std::size_t>(n));
  }
}

Result<std::vector<double>> GlooPeer::run(const Options& options, uint64_t bytes, int iterations,
                                          int threads) {
  nlohmann::json order = {{"operation", options.operation},
                          {"bytes", bytes},
                          {"dtype", options.dtype},
                          {"iterations", iterations},
                          {"threads", threads}};
  PACELINE_RETURN_IF_ERROR(write_line(order.dump()));
  PACELINE_ASSIGN(auto line, read_line(kRunSeconds));
  const auto answer = nlohmann::json::parse(line, nullptr, false);
  if (answer.is_object() && answer.contains("error") && answer["error"].is_string())
    return Status(Code::kUnsupported, "gloo: " + answer["error"].get<std::string>());
  std::vector<double> seconds;
  if (answer.is_object() && answer.contains("seconds") && answer["seconds"].is_array()) {
    for (const auto& one : answer["seconds"]) {
      if (one.is_number()) seconds.push_back(one.get<double>());
    }
  }
  if (seconds.size() != static_cast<std::size_t>(iterations) || !answer.contains("threads") ||
      !answer["threads"].is_number_integer())
    return Status(Code::kUnavailable, "--vs gloo: no answer to an order: " + line);
  threads_ = answer["threads"].get<int>();
  return seconds;
}

}  // namespace paceline::bench
