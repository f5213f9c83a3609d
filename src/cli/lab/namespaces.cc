#include "cli/lab/namespaces.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

namespace paceline::lab {
namespace {

/// What errno a child gets from `attempt` (0: it works).
template <class Attempt>
int try_in_child(const Attempt& attempt) {
  pid_t pid = fork();
  if (pid < 0) return errno;
  if (pid == 0) {
    int failed = attempt();
    _exit(failed < 256 ? failed : EPERM);
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : EPERM;
}

bool write_file(const char* path, const std::string& text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  bool ok = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  return ok;
}

/// Becomes root of a fresh user namespace, with mounts and a network of its own.
Status enter_user_namespace() {
  auto uid = geteuid();
  auto gid = getegid();
  if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET) != 0) {
    return {Code::kUnavailable, fmt::format("unshare: {}", std::strerror(errno))};
  }
  write_file("/proc/self/setgroups", "deny");
  if (!write_file("/proc/self/uid_map", fmt::format("0 {} 1", uid)) ||
      !write_file("/proc/self/gid_map", fmt::format("0 {} 1", gid))) {
    return {Code::kUnavailable, "the user namespace refused its map of users"};
  }
  // ip(8) keeps names in /run/netns; a /run of our own, because the machine's isn't ours to write.
  if (mount("tmpfs", "/run", "tmpfs", 0, "mode=755") != 0 || mkdir("/run/netns", 0755) != 0) {
    return {Code::kUnavailable, fmt::format("no /run of its own: {}", std::strerror(errno))};
  }
  return Status::ok();
}

}  // namespace

Result<std::string> probe_privileges() {
  auto unshared = [](int flags) { return unshare(flags) == 0 ? 0 : errno; };
  int as_is = try_in_child([&] { return unshared(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS); });
  if (as_is == 0) {
    if (access("/run", W_OK) == 0) return std::string(kRoot);
    as_is = EACCES;
  }
  int as_user = try_in_child([&] { return unshared(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS); });
  if (as_user == 0) {
    // Some systems let everybody have a user namespace that may then do nothing.
    as_user = try_in_child([] { return enter_user_namespace().is_ok() ? 0 : EACCES; });
  }
  if (as_user == 0) return std::string(kUserNamespace);
  return Status(
      Code::kUnavailable,
      fmt::format(
          "this process can't make network namespaces ({}), nor unprivileged user namespaces "
          "({}). Run as root (sudo, or a container with --cap-add NET_ADMIN --cap-add SYS_ADMIN), "
          "or "
          "let users have namespaces (sysctl kernel.unprivileged_userns_clone=1, "
          "user.max_user_namespaces above 0). Next best here: --loopback runs the same ranks as "
          "plain "
          "processes, without link speeds",
          std::strerror(as_is), std::strerror(as_user)));
}

Result<std::string> acquire_privileges() {
  PACELINE_ASSIGN(auto how, probe_privileges());
  if (how == kUserNamespace) PACELINE_RETURN_IF_ERROR(enter_user_namespace());
  return how;
}

Result<std::string> find_tool(const std::string& name) {
  // The system's own folders first, for a user's PATH may lack them; then wherever else it says.
  std::string folders = "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin";
  if (const char* more = std::getenv("PATH")) folders += std::string(":") + more;
  std::istringstream rest(folders);
  for (std::string folder; std::getline(rest, folder, ':');) {
    auto path = fmt::format("{}/{}", folder, name);
    if (!folder.empty() && access(path.c_str(), X_OK) == 0) return path;
  }
  return Status(Code::kUnavailable,
                fmt::format("no {} here: install iproute2 (apt-get install iproute2)", name));
}

Status enter_namespace(const std::string& path) {
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {Code::kInternal, fmt::format("{}: {}", path, std::strerror(errno))};
  int failed = setns(fd, CLONE_NEWNET) == 0 ? 0 : errno;
  close(fd);
  if (failed != 0)
    return {Code::kInternal, fmt::format("setns {}: {}", path, std::strerror(failed))};
  return Status::ok();
}

Status in_namespace(const std::string& path, const std::function<Status()>& work) {
  Status result;
  std::thread([&] {
    result = enter_namespace(path);
    if (result.is_ok()) result = work();
  }).join();
  return result;
}

}  // namespace paceline::lab
