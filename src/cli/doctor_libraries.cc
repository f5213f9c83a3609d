// doctor: libraries that are found at run time.
#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>

#include "cli/doctor_checks.h"
#include "drivers/cuda/loader.h"
#include "drivers/nccl/loader.h"

namespace paceline::cli {
namespace {

/// Opens without initialising more than the loader does; closes again.
bool loads(const char* name, std::string& why) {
  void* handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
  if (!handle) {
    why = dlerror();
    return false;
  }
  dlclose(handle);
  return true;
}

/// Of several GPUs of a node. What torch loads into a process goes before what is found here.
void check_nccl(Findings& findings) {
  const auto nccl = drivers::nccl::load("");
  if (!nccl.is_ok()) {
    findings.push_back(
        {"NCCL", Verdict::kNote, nccl.status().message(),
         "only needed for several GPUs of a node; PyTorch's wheels for CUDA bring their own"});
    return;
  }
  const int v = (*nccl)->version;
  findings.push_back(
      {"NCCL", Verdict::kGood,
       fmt::format("{}, version {}.{}.{}", (*nccl)->origin, v / 10000, v % 10000 / 100, v % 100),
       ""});
}

void check_cuda(Findings& findings) {
  std::string why;
  bool device =
      access("/dev/nvidia0", F_OK) == 0 || access("/proc/driver/nvidia/version", F_OK) == 0;
  if (!device) {
    findings.push_back(
        {"GPU", Verdict::kNote, "none", "CPU tensors travel through Paceline; nothing to do"});
    return;
  }
  if (const auto driver = drivers::cuda::load(); !driver.is_ok()) {
    findings.push_back({"GPU", Verdict::kFailure, "a device, but " + driver.status().message(),
                        "CUDA models need such a driver; those on the CPU do without"});
    return;
  }
  findings.push_back({"GPU", Verdict::kGood, "device and driver library", ""});
  if (!loads("libcudart.so.13", why) && !loads("libcudart.so.12", why))
    findings.push_back({"CUDA runtime", Verdict::kNote, "not on the loader's path: " + why,
                        "PyTorch's wheels bring their own"});
  check_nccl(findings);
}

}  // namespace

void check_libraries(Findings& findings) {
  check_cuda(findings);
  std::string why;
  if (loads("libpmix.so.2", why))
    findings.push_back({"PMIx", Verdict::kGood, "libpmix.so.2 (for Open MPI's mpirun)", ""});
  else
    findings.push_back({"PMIx", Verdict::kNote, "not found",
                        "only needed under Open MPI's mpirun, which brings it"});
}

}  // namespace paceline::cli
