#include "base/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

namespace paceline {
namespace {

/// What the control group of this process may use, in cores; 0: no limit, or none that can be read.
double group_limit() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) != 0) continue;
    const std::string path = line.substr(3) == "/" ? "" : line.substr(3);
    std::ifstream limit("/sys/fs/cgroup" + path + "/cpu.max");
    double quota = 0, period = 0;  // "max 100000" where there is no limit: no number
    return limit >> quota >> period && period > 0 ? quota / period : 0;
  }
  return 0;
}

}  // namespace

int usable_cores() {
  // Too small for a machine of more than 1024 processors: then all of them are taken for allowed.
  cpu_set_t set;
  const int allowed =
      sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : machine_cores();
  const double limit = group_limit();
  const int granted = limit > 0 ? static_cast<int>(std::min(limit, 1e6)) : allowed;
  return std::max(1, std::min(allowed, granted));
}

int machine_cores() { return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN))); }

bool have_cores_apart(int ranks, int usable, int machine) {
  return static_cast<int64_t>(usable) * ranks <= machine;
}

int fitting_codec_threads(int ranks, int usable, int machine) {
  const int all = std::max(ranks, 1);
  return std::clamp((have_cores_apart(all, usable, machine) ? usable : usable / all) / 2, 1, 4);
}

}  // namespace paceline
