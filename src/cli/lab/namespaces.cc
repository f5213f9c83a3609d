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
#include <utility>

#include "cli/descriptors.h"

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

/// 0, or an errno.
int write_file(const char* path, const std::string& text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return errno;
  int failed = write(fd, text.data(), text.size()) < 0 ? errno : 0;
  close(fd);
  return failed;
}

/// Becomes root of a fresh user namespace, with mounts and a network of its own. 0, or the errno of what `failed`.
int enter_user_namespace(const char*& failed) {
  auto uid = geteuid();
  auto gid = getegid();
  failed = "unshare";
  if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET) != 0) return errno;
  write_file("/proc/self/setgroups", "deny");
  failed = "the user namespace's map of users";
  if (int e = write_file("/proc/self/uid_map", fmt::format("0 {} 1", uid)); e != 0) return e;
  if (int e = write_file("/proc/self/gid_map", fmt::format("0 {} 1", gid)); e != 0) return e;
  // ip(8) keeps names in /run/netns; a /run of our own, because the machine's isn't ours to write.
  failed = "a /run of its own";
  if (mount("tmpfs", "/run", "tmpfs", 0, "mode=755") != 0) return errno;
  return mkdir("/run/netns", 0755) == 0 ? 0 : errno;
}

int enter_as_root() {
  if (unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS) != 0) return errno;
  return access("/run", W_OK) == 0 ? 0 : EACCES;
}

int enter_as_user() {
  const char* failed = nullptr;
  return enter_user_namespace(failed);
}

/// As nodes have them. AppArmor's profile of containers refuses every mount, whatever the capabilities.
int try_mounts() {
  if (mount("", "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0) return errno;
  return mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") == 0 ? 0 : errno;
}

/// In a network of its own: the machine's is another's. Containers have /proc/sys read-only.
int try_settings() { return write_file("/proc/sys/net/ipv4/tcp_no_metrics_save", "1"); }

/// What a lab needs, in this order.
enum class Need { kNothing, kNamespaces, kMounts, kSettings };
struct Refusal {
  Need need = Need::kNothing;
  int error = 0;
};

/// What is refused to who has entered, in a child for each need: an exit status holds one errno. Who can't enter tries
/// nothing, for that would happen to the machine itself.
Refusal try_way(int (*enter)()) {
  struct Trial {
    Need need;
    int (*attempt)();
  };
  for (const auto& [need, attempt] :
       {Trial{Need::kNamespaces, [] { return 0; }}, Trial{Need::kMounts, try_mounts},
        Trial{Need::kSettings, try_settings}}) {
    const int error = try_in_child([enter, attempt = attempt] {
      const int refused = enter();
      return refused != 0 ? refused : attempt();
    });
    if (error != 0) return {need, error};
  }
  return {};
}

}  // namespace

Status with_next_best(Status failed) {
  if (failed.code() != Code::kUnavailable) return failed;
  return {failed.code(), fmt::format("{}. {}", failed.message(), kNextBest)};
}

Privileges probe_privileges() {
  const auto as_root = try_way(enter_as_root);
  if (as_root.need == Need::kNothing) return {kRoot, "", Status::ok()};
  const auto as_user = try_way(enter_as_user);
  if (as_user.need == Need::kNothing) return {kUserNamespace, "", Status::ok()};
  const auto& nearest = as_user.need > as_root.need ? as_user : as_root;
  if (nearest.need == Need::kNamespaces) {
    return {
        "", "root, nor user namespaces",
        with_next_best(
            {Code::kUnavailable,
             fmt::format("this process can't make network namespaces ({}), nor unprivileged user "
                         "namespaces ({}). Run {}, or let users have namespaces (sysctl "
                         "kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0)",
                         std::strerror(as_root.error), std::strerror(as_user.error), kAsRoot)})};
  }
  auto missing = fmt::format(
      "{} ({})", nearest.need == Need::kMounts ? "mounts of its own" : "writable /proc/sys",
      std::strerror(nearest.error));
  auto told =
      fmt::format("network namespaces can be made here, but a lab gets no {} in them. Run {}",
                  missing, kAsRoot);
  return {"", std::move(missing), with_next_best({Code::kUnavailable, std::move(told)})};
}

Result<std::string> acquire_privileges() {
  auto found = probe_privileges();
  PACELINE_RETURN_IF_ERROR(found.status);
  const char* failed = nullptr;
  if (found.how == kUserNamespace) {
    if (const int error = enter_user_namespace(failed); error != 0) {
      return with_next_best({Code::kUnavailable, fmt::format("no user namespace here: {}: {}",
                                                             failed, std::strerror(error))});
    }
  }
  return found.how;
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
  if (fd < 0 && cli::lacks_descriptors(errno)) return cli::out_of_descriptors();
  if (fd < 0) return {Code::kInternal, fmt::format("{}: {}", path, std::strerror(errno))};
  int failed = setns(fd, CLONE_NEWNET) == 0 ? 0 : errno;
  close(fd);
  if (failed != 0)
    return {Code::kUnavailable, fmt::format("setns {}: {}", path, std::strerror(failed))};
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
