// CUDA's error numbers as sentences that say what to do.
#include <fmt/format.h>

#include "drivers/cuda/loader.h"

namespace paceline::drivers::cuda {
namespace {

struct Meaning {
  CudaResult error;
  Code code;
  const char* sentence;
};

constexpr const char* kBrokenKernel =
    "a kernel of this process did what a GPU can't, or the GPU is faulty (Xid 13 in dmesg); "
    "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer finds it. The process must be started again";

constexpr Meaning kMeanings[] = {
    {2, Code::kResourceExhausted,
     "there is not enough memory: take a smaller batch, give back what torch keeps "
     "(torch.cuda.empty_cache()), or let torch's own all-reduce do it (PACELINE_CUDA_PATH=torch)"},
    {3, Code::kUnavailable,
     "the driver is not initialised in this process (after fork(), CUDA "
     "can't be used in the child: start workers with spawn)"},
    {4, Code::kUnavailable, "the driver is shutting down: the process is ending"},
    {46, Code::kUnavailable,
     "the GPU is busy or in exclusive use by another process: nvidia-smi names it, "
     "CUDA_VISIBLE_DEVICES chooses another GPU"},
    {100, Code::kUnavailable, "no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES"},
    {101, Code::kInvalidArgument, "there is no such device"},
    {201, Code::kInternal,
     "this thread has no CUDA context: torch.cuda.set_device() or a tensor on the GPU makes one"},
    {209, Code::kUnsupported,
     "there is no code for this GPU's architecture: it needs a build that has, or "
     "PACELINE_CUDA_PATH=torch"},
    {214, Code::kUnavailable,
     "the GPU's memory had an error that ECC could not correct (Xid 48, 63, 64 or 94 in "
     "dmesg): restart the job without this GPU"},
    {217, Code::kUnsupported, "the two GPUs can't read each other's memory"},
    {220, Code::kUnavailable,
     "an NVLink had an error that could not be corrected (Xid 74 in dmesg): restart the job "
     "without this GPU"},
    {222, Code::kUnavailable,
     "the driver is too old for the kernels: install a newer one, or set PACELINE_CUDA_PATH=torch"},
    {226, Code::kUnavailable,
     "the GPU had an error that it could contain (Xid 94 in dmesg; NVLink or memory), and this "
     "process was using what it met: restart the job, without this GPU if it comes again"},
    {700, Code::kUnavailable,
     "a kernel of this process read or wrote memory that is not its own (Xid 31 in dmesg); "
     "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer finds it. The process must be started again"},
    {702, Code::kTimeout,
     "a kernel ran longer than the display's watchdog allows: use a GPU without a display"},
    {710, Code::kUnavailable,
     "an assertion failed in a kernel of this process; what it printed names it. The process must "
     "be started again"},
    {714, Code::kUnavailable, kBrokenKernel},
    {715, Code::kUnavailable, kBrokenKernel},
    {716, Code::kUnavailable, kBrokenKernel},
    {717, Code::kUnavailable, kBrokenKernel},
    {718, Code::kUnavailable, kBrokenKernel},
    {719, Code::kUnavailable,
     "a kernel of this process failed, or the GPU is lost (see Xid in dmesg: 79 means fallen off "
     "the bus). The "
     "process must be started again"},
    {800, Code::kUnavailable,
     "the driver does not permit it: a container needs its GPUs handed in whole (--gpus all), and "
     "MIG or MPS may forbid it"},
    {801, Code::kUnsupported, "this GPU or driver does not support it"},
    {802, Code::kUnavailable,
     "the machine's NVSwitch fabric is not ready: is nvidia-fabricmanager running?"},
    {803, Code::kUnavailable,
     "the driver's library and its kernel module differ in version: reboot, or match them"},
    {999, Code::kUnavailable, "the driver gives no reason (see Xid in dmesg)"},
};

}  // namespace

Status explain(const Api& api, CudaResult error, const std::string& what) {
  const char* name = nullptr;
  if (api.get_error_name == nullptr || api.get_error_name(error, &name) != 0 || name == nullptr)
    name = "CUDA error";
  for (const auto& m : kMeanings) {
    if (m.error == error)
      return {m.code, fmt::format("{}: {} ({}, {})", what, m.sentence, name, error)};
  }
  const char* text = nullptr;
  if (api.get_error_string == nullptr || api.get_error_string(error, &text) != 0 || text == nullptr)
    text = "no text";
  return {Code::kInternal, fmt::format("{}: {} ({}, {})", what, text, name, error)};
}

}  // namespace paceline::drivers::cuda
