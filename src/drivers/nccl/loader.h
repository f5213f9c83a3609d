// Finds NCCL at run time.
#pragma once

#include <string>

#include "base/status.h"
#include "drivers/nccl/api.h"

namespace paceline::drivers::nccl {

inline constexpr int kOldest = 21400;  ///< communicators with a configuration

struct Library {
  Api api;
  int version = 0;     ///< 22809 is 2.28.9
  std::string origin;  ///< "loaded by the process", or the name by which it was found
};

/// The NCCL that the process has loaded; else `path` (empty: none), else libnccl.so.2 by the loader's search. The first
/// that was found stays for all later calls. kUnavailable: none, or too old. Thread-safe.
Result<const Library*> load(const std::string& path);

/// "NCCL inside the node: reduce-scatter: unhandled cuda error (…)"; kResourceExhausted and what to do where NCCL got no
/// device memory, which it calls by the same name.
Status explain(const Api& api, NcclResult error, Comm comm, const std::string& what);

}  // namespace paceline::drivers::nccl
