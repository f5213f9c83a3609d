#include "cli/lab/subprocess.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "cli/descriptors.h"

namespace paceline::lab {
namespace {

/// A file in memory: unlike pipes it can't block either side.
class MemoryFile {
 public:
  explicit MemoryFile(const std::string& content)
      : fd_(memfd_create("paceline", MFD_CLOEXEC)), error_(errno) {
    for (std::size_t at = 0; fd_ >= 0 && at < content.size();) {
      auto n = write(fd_, content.data() + at, content.size() - at);
      if (n <= 0) break;
      at += static_cast<std::size_t>(n);
    }
    if (fd_ >= 0) lseek(fd_, 0, SEEK_SET);
  }
  ~MemoryFile() {
    if (fd_ >= 0) close(fd_);
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  [[nodiscard]] int fd() const { return fd_; }
  /// Why there is none.
  [[nodiscard]] int error() const { return error_; }
  [[nodiscard]] std::string content() const {
    std::string text;
    char buffer[4096];
    lseek(fd_, 0, SEEK_SET);
    for (ssize_t n; (n = read(fd_, buffer, sizeof buffer)) > 0;)
      text.append(buffer, static_cast<std::size_t>(n));
    return text;
  }

 private:
  int fd_;
  int error_;
};

}  // namespace

Result<std::string> run_program(const std::vector<std::string>& argv, const std::string& input) {
  MemoryFile in(input), out(""), err("");
  // Without one it would read and write what the lab itself has there.
  for (const auto* file : {&in, &out, &err}) {
    if (file->fd() >= 0) continue;
    if (cli::lacks_descriptors(file->error())) return cli::out_of_descriptors();
    return Status(Code::kUnavailable,
                  fmt::format("no memory file for {}: {}", argv[0], std::strerror(file->error())));
  }
  std::vector<char*> args;
  args.reserve(argv.size() + 1);
  for (const auto& a : argv) args.push_back(const_cast<char*>(a.c_str()));
  args.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.fd(), 0);
  posix_spawn_file_actions_adddup2(&actions, out.fd(), 1);
  posix_spawn_file_actions_adddup2(&actions, err.fd(), 2);
  pid_t pid = -1;
  int failed = posix_spawnp(&pid, args[0], &actions, nullptr, args.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) {
    return Status(Code::kUnavailable,
                  fmt::format("can't run {}: {}", argv[0], std::strerror(failed)));
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return out.content();
  auto said = err.content();
  said.resize(std::min(said.size(), said.find('\n')));
  if (said.ends_with('.')) said.pop_back();  // sentences go on behind it
  return Status(Code::kUnavailable, fmt::format("{} failed: {}", fmt::join(argv, " "), said));
}

}  // namespace paceline::lab
