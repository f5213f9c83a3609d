#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "cli/descriptors.h"
#include "cli/lab/namespaces.h"
#include "cli/lab/ranks.h"

namespace paceline::lab {
namespace {

/// In the child. Nullptr, or what failed.
const char* make_node(const Node& node) {
  if (!enter_namespace(node.net_path).is_ok()) return "can't enter its network namespace";
  if (unshare(CLONE_NEWNS | CLONE_NEWUTS) != 0) return "can't have mounts of its own";
  if (mount("", "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0)
    return "can't make its mounts private";
  if (sethostname(node.name.c_str(), node.name.size()) != 0) return "can't set its host name";
  if (mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") != 0)
    return "can't mount /dev/shm";
  if (mount(node.hosts_file.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) != 0)
    return "can't mount /etc/hosts";
  // /sys/class/net must show this node's NIC (NCCL looks there). Containers may refuse; most
  // programs do without.
  mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr);
  return nullptr;
}

[[noreturn]] void hold(const Node& node, int report) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_NAME, "lab-node");
  setsid();
  const char* failed = make_node(node);
  auto text =
      failed == nullptr ? std::string("+") : fmt::format("{}: {}", failed, std::strerror(errno));
  [[maybe_unused]] auto n = write(report, text.data(), text.size());
  int null = open("/dev/null", O_RDWR);
  for (int fd = 0; fd < 3; ++fd) dup2(null, fd);
  cli::close_descriptors_from(3);
  for (;;) pause();
}

}  // namespace

Result<NodeHolder> NodeHolder::start(const Node& node) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return cli::out_of_descriptors();
  pid_t pid = fork();
  if (pid < 0)
    return Status(Code::kResourceExhausted, fmt::format("fork: {}", std::strerror(errno)));
  if (pid == 0) hold(node, ends[1]);
  close(ends[1]);
  NodeHolder holder(pid);
  char buffer[256];
  auto n = read(ends[0], buffer, sizeof buffer);
  close(ends[0]);
  if (n == 1 && buffer[0] == '+') return holder;
  return Status(
      Code::kUnavailable,
      fmt::format("{}: {}", node.name,
                  n > 0 ? std::string(buffer, static_cast<std::size_t>(n)) : "its holder died"));
}

NodeHolder::NodeHolder(NodeHolder&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}

NodeHolder& NodeHolder::operator=(NodeHolder&& other) noexcept {
  std::swap(pid_, other.pid_);
  return *this;
}

NodeHolder::~NodeHolder() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace paceline::lab
