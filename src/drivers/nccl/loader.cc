#include "drivers/nccl/loader.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <mutex>

namespace paceline::drivers::nccl {
namespace {

template <class F>
bool bind(void* library, F& function, const char* name) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  return function != nullptr;
}

const char* bind_all(void* library, Api& a) {
#define PACELINE_BIND(member, name) \
  if (!bind(library, a.member, name)) return name
  PACELINE_BIND(get_version, "ncclGetVersion");
  PACELINE_BIND(get_error_string, "ncclGetErrorString");
  PACELINE_BIND(get_last_error, "ncclGetLastError");
  PACELINE_BIND(get_unique_id, "ncclGetUniqueId");
  PACELINE_BIND(comm_init_rank_config, "ncclCommInitRankConfig");
  PACELINE_BIND(comm_destroy, "ncclCommDestroy");
  PACELINE_BIND(comm_abort, "ncclCommAbort");
  PACELINE_BIND(comm_get_async_error, "ncclCommGetAsyncError");
  PACELINE_BIND(group_start, "ncclGroupStart");
  PACELINE_BIND(group_end, "ncclGroupEnd");
  PACELINE_BIND(all_reduce, "ncclAllReduce");
  PACELINE_BIND(reduce_scatter, "ncclReduceScatter");
  PACELINE_BIND(all_gather, "ncclAllGather");
  PACELINE_BIND(broadcast, "ncclBroadcast");
#undef PACELINE_BIND
  return nullptr;
}

std::string version_text(int v) {
  return v >= 10000 ? fmt::format("{}.{}.{}", v / 10000, v % 10000 / 100, v % 100)
                    : fmt::format("{}.{}.{}", v / 1000, v % 1000 / 100, v % 100);
}

void* find(const std::string& path, std::string& origin) {
  constexpr int kLoaded = RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD;
  if (void* library = ::dlopen("libnccl.so.2", kLoaded); library != nullptr) {
    origin = "loaded by the process";
    return library;
  }
  // Linked in statically, or under another file name.
  if (::dlsym(RTLD_DEFAULT, "ncclCommInitRankConfig") != nullptr) {
    origin = "part of the process";
    return ::dlopen(nullptr, RTLD_NOW);
  }
  for (const std::string& name : {path, std::string("libnccl.so.2")}) {
    if (name.empty()) continue;
    if (void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL); library != nullptr) {
      origin = name;
      return library;
    }
  }
  return nullptr;
}

/// By what NCCL says it was doing: all errors of CUDA have one code.
bool wanted_memory(const std::string& said) {
  return said.find("CUDA calloc") != std::string::npos ||
         said.find("CUDA malloc") != std::string::npos ||
         said.find("out of memory") != std::string::npos;
}

}  // namespace

Result<const Library*> load(const std::string& path) {
  static std::mutex mutex;
  static const Library* found = nullptr;
  std::lock_guard lock(mutex);
  if (found != nullptr) return found;
  Library made;
  void* library = find(path, made.origin);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Status(Code::kUnavailable,
                  fmt::format("NCCL is missing: libnccl.so.2 is neither loaded in this process nor "
                              "found ({}); several GPUs of a node are joined by it: install "
                              "nvidia-nccl-cu12 or -cu13 (torch for CUDA brings it)",
                              why == nullptr ? "no reason given" : why));
  }
  const char* missing = bind_all(library, made.api);
  if (made.api.get_version != nullptr) made.api.get_version(&made.version);
  if (missing != nullptr || made.version < kOldest) {
    return Status(
        Code::kUnavailable,
        fmt::format("NCCL {} ({}) is too old: 2.14 or later is needed{}{}",
                    version_text(made.version), made.origin,
                    missing == nullptr ? "" : "; it lacks ", missing == nullptr ? "" : missing));
  }
  found = new Library(std::move(made));  // as long as the process
  return found;
}

Status explain(const Api& api, NcclResult error, Comm comm, const std::string& what) {
  const char* text = api.get_error_string == nullptr ? nullptr : api.get_error_string(error);
  const char* last = api.get_last_error == nullptr ? nullptr : api.get_last_error(comm);
  const std::string more = last == nullptr ? "" : last;
  const bool memory = wanted_memory(more);
  const Code code = memory                  ? Code::kResourceExhausted
                    : error == kRemoteError ? Code::kPeerLost
                                            : Code::kUnavailable;
  return {code,
          fmt::format("NCCL inside the node: {}: {}{}{}{} (NCCL_DEBUG=WARN says more)", what,
                      text == nullptr ? "error" : text, more.empty() ? "" : ": ", more,
                      memory ? "; the GPU has no memory left for it, unless an earlier error of "
                               "CUDA is the cause: take a smaller batch, or give back what torch "
                               "keeps (torch.cuda.empty_cache())"
                             : "")};
}

}  // namespace paceline::drivers::nccl
