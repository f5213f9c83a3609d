// doctor: cores, memory, limits, and how ranks of a node can share memory.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "cli/doctor_checks.h"
#include "device/cpu/kernels.h"

namespace paceline::cli {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

/// Can a process read a sibling's memory? Asked the way it will be used: between two children of
/// one parent.
bool can_read_sibling() {
  int ready[2];
  if (pipe(ready) != 0) return false;
  static char secret[16] = "sibling";
  const pid_t owner = fork();
  if (owner < 0) {  // of -1 every process would be killed below
    close(ready[0]);
    close(ready[1]);
    return false;
  }
  if (owner == 0) {
    close(ready[0]);
    ssize_t written = write(ready[1], "x", 1);
    if (written == 1) pause();
    _exit(0);
  }
  close(ready[1]);
  char byte = 0;
  ssize_t got = read(ready[0], &byte, 1);
  close(ready[0]);
  pid_t reader = got == 1 ? fork() : -1;
  if (reader == 0) {
    char copy[16] = {};
    iovec local{copy, sizeof copy};
    iovec remote{secret, sizeof secret};
    _exit(process_vm_readv(owner, &local, 1, &remote, 1, 0) == sizeof copy &&
                  std::strcmp(copy, secret) == 0
              ? 0
              : 1);
  }
  int status = 1;
  if (reader > 0) waitpid(reader, &status, 0);
  kill(owner, SIGKILL);
  waitpid(owner, nullptr, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// A rank's share of the cores, less one for what carries its gradients: compute threads on all of them would wait for
/// the one that shares its core.
long threads_for(unsigned cores, long ranks) {
  const long share = static_cast<long>(cores) / std::max(1L, ranks);
  return share > 1 ? share - 1 : 1;
}

void check_threads(Findings& findings, unsigned cores) {
  const char* omp = std::getenv("OMP_NUM_THREADS");
  const char* local = std::getenv("LOCAL_WORLD_SIZE");
  long threads = omp ? std::strtol(omp, nullptr, 10) : 0;
  long ranks = local ? std::strtol(local, nullptr, 10) : 1;
  if (omp && threads * ranks > static_cast<long>(cores)) {
    findings.push_back(
        {"threads", Verdict::kWarning,
         fmt::format("OMP_NUM_THREADS={} with {} ranks on {} cores", omp, ranks, cores),
         fmt::format("export OMP_NUM_THREADS={}", threads_for(cores, ranks))});
  } else if (!omp && ranks > 1) {
    findings.push_back(
        {"threads", Verdict::kWarning,
         fmt::format("OMP_NUM_THREADS is unset: each of {} ranks may start {} threads", ranks,
                     cores),
         fmt::format("export OMP_NUM_THREADS={}", threads_for(cores, ranks))});
  } else {
    findings.push_back(
        {"threads", Verdict::kGood,
         omp ? fmt::format("OMP_NUM_THREADS={}", omp) : "OMP_NUM_THREADS is unset; one rank here",
         ""});
  }
}

void check_limit(Findings& findings, int resource, const char* name, rlim_t wanted,
                 const std::string& fix) {
  rlimit limit{};
  getrlimit(static_cast<__rlimit_resource_t>(resource), &limit);
  auto text =
      limit.rlim_cur == RLIM_INFINITY ? std::string("unlimited") : std::to_string(limit.rlim_cur);
  bool enough = limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= wanted;
  findings.push_back({name, enough ? Verdict::kGood : Verdict::kWarning, text, enough ? "" : fix});
}

}  // namespace

void check_machine(Findings& findings) {
  utsname system{};
  uname(&system);
  unsigned cores = std::thread::hardware_concurrency();
  double memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  findings.push_back({"machine", Verdict::kGood,
                      fmt::format("{} cores, {:.0f} GiB, Linux {}, SIMD {}", cores, memory / kGiB,
                                  system.release, cpu::simd_target()),
                      ""});
  check_threads(findings, cores);
  check_limit(findings, RLIMIT_NOFILE, "open files", 4096,
              "ulimit -n 65536 (each peer takes some descriptors)");
  check_limit(findings, RLIMIT_MEMLOCK, "locked memory", 64ULL << 20,
              "ulimit -l unlimited; in a container: --ulimit memlock=-1 (GPU jobs pin memory)");
}

void check_shared_memory(Findings& findings) {
  struct statvfs space {};
  if (statvfs("/dev/shm", &space) != 0) {
    findings.push_back({"/dev/shm", Verdict::kNote, "not there",
                        "nothing to do: anonymous shared files are used instead"});
  } else {
    double gib = static_cast<double>(space.f_bavail) * static_cast<double>(space.f_frsize) / kGiB;
    bool small = gib < 0.9;
    findings.push_back(
        {"/dev/shm", small ? Verdict::kWarning : Verdict::kGood,
         fmt::format("{:.2f} GiB free", gib),
         small ? "PyTorch's data loaders and NCCL need it: in a container --shm-size=1g or more"
               : ""});
  }
  int file = memfd_create("paceline-doctor", MFD_CLOEXEC);
  bool works = file >= 0 && ftruncate(file, 1 << 20) == 0 && fallocate(file, 0, 0, 1 << 20) == 0;
  findings.push_back(
      {"shared memory", works ? Verdict::kGood : Verdict::kWarning,
       works ? "anonymous shared files work"
             : fmt::format("anonymous shared files fail: {}", std::strerror(errno)),
       works ? "" : "raise the container's memory limit; ranks of a node fall back to TCP"});
  if (file >= 0) close(file);
  bool readable = can_read_sibling();
  findings.push_back(
      {"reading sibling ranks", readable ? Verdict::kGood : Verdict::kWarning,
       readable ? "process_vm_readv is allowed"
                : "process_vm_readv is refused: one more copy per collective inside a node",
       readable ? ""
                : "in a container: --cap-add=SYS_PTRACE; else sysctl kernel.yama.ptrace_scope=0"});
}

}  // namespace paceline::cli
