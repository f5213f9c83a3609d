#include "cli/lab/owner.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "cli/descriptors.h"
#include "cli/file_errors.h"

namespace paceline::lab {
namespace {

namespace fs = std::filesystem;
constexpr const char* kNamespaces = "/run/netns";
constexpr const char* kLock = "/lock";
constexpr const char* kJanitorName = "lab-janitor";
constexpr std::time_t kYoung = 60;  // seconds

/// Field 22 of /proc/PID/stat: the start time in clock ticks after boot; 0 when there is no such
/// process.
uint64_t start_time(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  auto close = text.rfind(')');  // the name may hold blanks and parentheses
  if (close == std::string::npos) return 0;
  std::size_t at = close + 1;
  for (int field = 3; field < 22 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  if (at == std::string::npos) return 0;
  uint64_t value = 0;
  std::from_chars(text.data() + at + 1, text.data() + text.size(), value);
  return value;
}

std::string temporary_directory() {
  const char* configured = std::getenv("TMPDIR");
  return configured != nullptr && *configured != '\0' ? configured : "/tmp";
}

/// Takes "PID-START" from behind `head`.
std::optional<Owner> parse_owner(std::string_view name, std::string_view head, bool keep) {
  if (name.substr(0, head.size()) != head) return std::nullopt;
  name.remove_prefix(head.size());
  Owner owner;
  owner.keep = keep;
  auto [dash, error] = std::from_chars(name.data(), name.data() + name.size(), owner.pid);
  if (error != std::errc() || dash == name.data() + name.size() || *dash != '-')
    return std::nullopt;
  auto [end, error2] = std::from_chars(dash + 1, name.data() + name.size(), owner.start);
  if (error2 != std::errc() || owner.pid <= 0) return std::nullopt;
  return owner;
}

std::vector<std::string> list(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  return names;
}

std::vector<std::string> namespaces_of(const Owner& owner) {
  std::vector<std::string> paths;
  auto prefix = owner.prefix();
  for (const auto& name : list(kNamespaces)) {
    if (name.compare(0, prefix.size(), prefix) == 0)
      paths.push_back(fmt::format("{}/{}", kNamespaces, name));
  }
  return paths;
}

bool is_inside(pid_t pid, const std::set<ino_t>& inodes) {
  struct stat net {};
  return !inodes.empty() && stat(fmt::format("/proc/{}/ns/net", pid).c_str(), &net) == 0 &&
         inodes.count(net.st_ino) > 0;
}

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Whether the environment that it was started with holds `entry` ("NAME=VALUE"). Finds a lab's daemons too, which
/// have left their rank's process group. A janitor of a lab inside this one has work to do and ends by itself.
bool was_told(pid_t pid, const std::string& entry) {
  auto environment = std::string(1, '\0') + content_of(fmt::format("/proc/{}/environ", pid));
  return environment.find('\0' + entry + '\0') != std::string::npos &&
         content_of(fmt::format("/proc/{}/comm", pid)) != std::string(kJanitorName) + "\n";
}

/// Kills the processes inside the given network namespaces, and those that belong to the lab by name; true when there
/// were some.
bool kill_all(const std::set<ino_t>& inodes, const std::string& lab_name) {
  const auto told = "PACELINE_LAB_NAME=" + lab_name;
  bool found = false;
  for (const auto& name : list("/proc")) {
    pid_t pid = 0;
    std::from_chars(name.data(), name.data() + name.size(), pid);
    if (pid <= 1 || pid == getpid()) continue;
    if (is_inside(pid, inodes) || was_told(pid, told)) found |= kill(pid, SIGKILL) == 0;
  }
  return found;
}

void kill_until_gone(const std::set<ino_t>& inodes, const std::string& lab_name) {
  for (int i = 0; i < 100 && kill_all(inodes, lab_name); ++i) usleep(5000);
}

bool is_locked(const std::string& folder) {
  int fd = open((folder + kLock).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  bool locked = flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  close(fd);
  return locked;
}

/// A lab's folder before it is locked.
std::string fresh_directory(const Owner& owner) {
  return fmt::format("{}/paceline-fresh-{}", temporary_directory(), owner.lab_name());
}

struct Message {
  JanitorWord word;
  pid_t group;
};

/// Until the lab ends, in whichever way; true when it said itself what becomes of what it made.
bool listen_to_lab(int pipe, std::set<pid_t>& groups, JanitorWord& last) {
  Message message{};
  for (;;) {
    auto n = read(pipe, &message, sizeof message);
    if (n < 0 && errno == EINTR) continue;
    if (n != sizeof message) return false;
    last = message.word;
    if (last == JanitorWord::kStarted) {
      groups.insert(message.group);
    } else if (last == JanitorWord::kEnded) {
      groups.erase(message.group);
    } else {
      return true;
    }
  }
}

}  // namespace

Owner Owner::self(bool keep) { return {getpid(), start_time(getpid()), keep}; }

bool Owner::alive() const {
  return start_time(pid) == start || is_locked(fresh_directory(*this)) || is_locked(directory());
}

std::string Owner::prefix() const {
  return fmt::format("paceline-{}{}-{}-", keep ? "keep-" : "", pid, start);
}

std::string Owner::lab_name() const { return prefix() + "lab"; }

Result<Folder> Folder::make(const Owner& owner) {
  // Under its own name only once it is locked: without a lock another lab would take it for a dead one's.
  const auto path = owner.directory();
  const auto fresh = fresh_directory(owner);
  auto failed = [&](int why) {
    std::error_code error;
    fs::remove_all(fresh, error);
    return Status(Code::kUnavailable, cli::unwritable("TMPDIR: " + path, why, "folder"));
  };
  if (mkdir(fresh.c_str(), 0700) != 0) return failed(errno);
  Folder folder(open((fresh + kLock).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (folder.lock_ < 0 || flock(folder.lock_, LOCK_EX | LOCK_NB) != 0) return failed(errno);
  if (rename(fresh.c_str(), path.c_str()) != 0) return failed(errno);
  return folder;
}

Folder::Folder(Folder&& other) noexcept : lock_(std::exchange(other.lock_, -1)) {}

Folder& Folder::operator=(Folder&& other) noexcept {
  std::swap(lock_, other.lock_);
  return *this;
}

Folder::~Folder() {
  if (lock_ >= 0) close(lock_);
}

std::string Owner::directory() const {
  return fmt::format("{}/paceline-lab-{}{}-{}", temporary_directory(), keep ? "keep-" : "", pid,
                     start);
}

int remove_lab(const Owner& owner) {
  // Where the lab was killed its ip(8) may still be making namespaces.
  kill_until_gone({}, owner.lab_name());
  auto paths = namespaces_of(owner);
  struct stat own {};
  stat("/proc/self/ns/net", &own);
  std::set<ino_t> inodes;
  for (const auto& path : paths) {
    struct stat s {};
    // A file that is no namespace (its mount is gone) has another inode; ours must never be among
    // them.
    if (stat(path.c_str(), &s) == 0 && s.st_dev == own.st_dev && s.st_ino != own.st_ino)
      inodes.insert(s.st_ino);
  }
  kill_until_gone(inodes, owner.lab_name());
  int why = 0;
  for (const auto& path : paths) {
    umount2(path.c_str(), MNT_DETACH);
    if (unlink(path.c_str()) != 0 && errno != ENOENT) why = errno;
  }
  for (const auto& folder : {owner.directory(), fresh_directory(owner)}) {
    std::error_code error;
    fs::remove_all(folder, error);
    if (error) why = error.value();
  }
  return why;
}

Removed remove_stale(bool kept_too) {
  std::vector<Owner> found;
  auto note = [&](const std::string& name, std::string_view head, bool keep) {
    auto owner = parse_owner(name, head, keep);
    if (!owner || owner->alive()) return;
    auto same = [&](const Owner& o) { return o.prefix() == owner->prefix(); };
    if (std::none_of(found.begin(), found.end(), same)) found.push_back(*owner);
  };
  for (const auto& name : list(kNamespaces)) {
    if (kept_too) note(name, "paceline-keep-", true);
    note(name, "paceline-", false);
  }
  for (const auto& name : list(temporary_directory())) {
    struct stat s {};
    if (stat((temporary_directory() + "/" + name).c_str(), &s) != 0 || s.st_uid != geteuid())
      continue;
    if (kept_too) note(name, "paceline-lab-keep-", true);
    note(name, "paceline-lab-", false);
    // A container's lab, whose process is not known here, may be about to lock its own.
    if (std::time(nullptr) - s.st_mtime < kYoung) continue;
    note(name, "paceline-fresh-paceline-keep-", true);  // there is nothing in it to keep
    note(name, "paceline-fresh-paceline-", false);
  }
  Removed removed;
  for (const auto& owner : found) {
    if (const int why = remove_lab(owner); why == 0) {
      ++removed.labs;
    } else {
      removed.left.push_back({owner.prefix(), why});
    }
  }
  return removed;
}

void tell_janitor(int listener, JanitorWord word, pid_t group) {
  const Message message{word, group};
  [[maybe_unused]] auto written = write(listener, &message, sizeof message);
}

Result<Janitor> Janitor::start(const Owner& owner) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return cli::out_of_descriptors();
  pid_t pid = fork();
  if (pid < 0)
    return Status(Code::kResourceExhausted, fmt::format("fork: {}", std::strerror(errno)));
  if (pid == 0) {
    setsid();  // Ctrl-C reaches the lab, not its janitor
    for (int s : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(s, SIG_IGN);
    prctl(PR_SET_NAME, kJanitorName);
    // The lab's output may be a pipe whose reader waits for its end: hold nothing but our own end.
    int null = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; ++fd) dup2(null, fd);
    dup2(ends[0], 3);
    cli::close_descriptors_from(4);
    std::set<pid_t> groups;
    auto last = JanitorWord::kStarted;
    if (!listen_to_lab(3, groups, last)) {
      for (auto group : groups) kill(-group, SIGKILL);
    }
    if (last != JanitorWord::kKept) remove_lab(owner);
    _exit(0);
  }
  close(ends[0]);
  Janitor janitor;
  janitor.pipe_ = ends[1];
  janitor.pid_ = pid;
  return janitor;
}

Janitor::Janitor(Janitor&& other) noexcept
    : pipe_(std::exchange(other.pipe_, -1)), pid_(std::exchange(other.pid_, -1)) {}

Janitor& Janitor::operator=(Janitor&& other) noexcept {
  std::swap(pipe_, other.pipe_);
  std::swap(pid_, other.pid_);
  return *this;
}

void Janitor::dismiss(bool keep) {
  if (pipe_ < 0) return;
  tell_janitor(pipe_, keep ? JanitorWord::kKept : JanitorWord::kRemoved);
  close(std::exchange(pipe_, -1));
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace paceline::lab
