#include "cli/lab/rank_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>

#include "cli/descriptors.h"
#include "cli/lab/owner.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace paceline::lab {
namespace {

/// What another launcher may have left here, and what would win over, or contradict, what the lab tells its ranks.
bool is_foreign(std::string_view name) {
  for (std::string_view one :
       {"PACELINE_RANK", "PACELINE_SIZE", "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE",
        "PACELINE_RENDEZVOUS", "PACELINE_NODE_ID", "PACELINE_SECRET_FILE"}) {
    if (name == one) return true;
  }
  return name.starts_with("TORCHELASTIC_") || name.starts_with("PACELINE_LAB_");
}

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& over) {
  std::vector<std::string> merged;
  for (char** e = environ; *e != nullptr; ++e) {
    std::string entry(*e);
    auto name = entry.substr(0, entry.find('='));
    if (over.count(name) == 0 && !is_foreign(name)) merged.push_back(std::move(entry));
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

/// What leads into a node.
struct Doors {
  int holder = -1;  ///< its holder's pidfd; -1: the kernel gives none
  int root = -1;
  /// Files of its namespaces, the mounts last; empty where none is known.
  std::array<std::string, 3> spaces;
  void shut() const {
    for (int fd : {holder, root}) {
      if (fd >= 0) close(fd);
    }
  }
};

/// A /proc of another pid namespace shows others under our numbers.
bool proc_is_ours() {
  char self[16] = {};
  return readlink("/proc/self", self, sizeof self - 1) > 0 && std::to_string(getpid()) == self;
}

/// 0, or the errno that stands in the way.
int open_doors(pid_t holder, Doors& doors) {
  doors.holder = static_cast<int>(syscall(SYS_pidfd_open, holder, 0));
  const bool refused =
      errno == ENOSYS || errno == EPERM || errno == EACCES;  // to whomever it leads
  if (doors.holder < 0 && !refused) return errno;
  auto file = [&](const char* name) { return fmt::format("/proc/{}/{}", holder, name); };
  if (proc_is_ours()) doors.spaces = {file("ns/net"), file("ns/uts"), file("ns/mnt")};
  doors.root = open(file("root").c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  return doors.root < 0 && cli::lacks_descriptors(errno) ? errno : 0;
}

/// In the child. Kernels before 5.8 take no pidfd here, those before 5.3 and filters of containers give none: one by one
/// then, the mounts last, for /proc is another one behind them.
bool enter(const Doors& doors) {
  if (doors.holder >= 0) {
    if (setns(doors.holder, CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS) == 0) return true;
    if (errno != EINVAL) return false;
  }
  for (const auto& space : doors.spaces) {
    int fd = open(space.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, 0) != 0) return false;
    close(fd);
  }
  return true;
}

/// What the child needs, all made before the fork.
struct Start {
  pid_t parent;
  int janitor;
  const Doors* doors;         ///< nullptr: none
  const rlimit* descriptors;  ///< nullptr: as the lab has them
  const char* directory;
  int out, err;
  char** argv;
  char** env;
};

/// Between fork and exec: system calls only, for other threads of the lab may hold locks.
[[noreturn]] void become_rank(const Start& s) {
  auto fail = [&](const char* what) {
    const char* why = std::strerror(errno);  // of known errors: a read of a table
    for (const char* part : {"lab: ", what, ": ", why, "\n"}) {
      [[maybe_unused]] auto n = write(s.err, part, std::strlen(part));
    }
    _exit(127);
  };
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != s.parent) _exit(127);
  setpgid(0, 0);
  if (s.janitor >= 0) tell_janitor(s.janitor, JanitorWord::kStarted, getpid());
  if (s.doors != nullptr) {
    if (!enter(*s.doors)) fail("can't enter its node");
    // Entering a mount namespace begins at its root, which lies above ours where the lab was started in a chroot.
    const int root = s.doors->root;
    if (root >= 0 && (fchdir(root) != 0 || chroot(".") != 0)) fail("can't enter its root");
    if (chdir(s.directory) != 0) fail(s.directory);
  }
  int null = open("/dev/null", O_RDONLY);
  dup2(null, 0);
  dup2(s.out, 1);
  dup2(s.err, 2);
  if (s.descriptors != nullptr) setrlimit(RLIMIT_NOFILE, s.descriptors);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);  // the lab's own doing; the others are as its caller has them
  execvpe(s.argv[0], s.argv, s.env);
  fail(s.argv[0]);
  _exit(127);
}

}  // namespace

Result<RankProcess> start_rank(const RankSpec& spec, const std::vector<std::string>& command,
                               int janitor) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0) {
    return cli::out_of_descriptors();
  }
  if (pipe2(err, O_CLOEXEC) != 0) {
    for (int fd : out) close(fd);
    return cli::out_of_descriptors();
  }
  auto env_texts = merged_environment(spec.environment);
  auto env = pointers(env_texts);
  auto argv = pointers(command);
  char directory[4096];
  if (getcwd(directory, sizeof directory) == nullptr) std::strcpy(directory, "/");
  Doors doors;
  if (spec.holder >= 0) {
    const int why = open_doors(spec.holder, doors);
    // Without them the rank would run outside of its node, or of the lab's root.
    if (why != 0) {
      doors.shut();
      for (int fd : {out[0], out[1], err[0], err[1]}) close(fd);
      if (cli::lacks_descriptors(why)) return cli::out_of_descriptors();
      return Status(Code::kUnavailable, fmt::format("rank {} can't enter node{}: {}", spec.rank,
                                                    spec.node, std::strerror(why)));
    }
  }
  const Start start{getpid(),
                    janitor,
                    spec.holder >= 0 ? &doors : nullptr,
                    spec.descriptors ? &*spec.descriptors : nullptr,
                    directory,
                    out[1],
                    err[1],
                    argv.data(),
                    env.data()};
  pid_t pid = fork();
  if (pid == 0) become_rank(start);
  int failed = errno;
  doors.shut();
  for (int fd : {out[1], err[1]}) close(fd);
  if (pid < 0) {
    close(out[0]);
    close(err[0]);
    return Status(Code::kResourceExhausted, fmt::format("fork: {}", std::strerror(failed)));
  }
  setpgid(pid, pid);
  for (int fd : {out[0], err[0]}) fcntl(fd, F_SETFL, O_NONBLOCK);
  // Close-on-exec by itself; where there is none (before Linux 5.3, filters of containers) the rank's end is looked for.
  int pid_fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  return RankProcess{.pid = pid, .pid_fd = pid_fd, .output = out[0], .error = err[0]};
}

}  // namespace paceline::lab
