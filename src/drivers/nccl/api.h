// The part of NCCL that Paceline uses, as a table of functions that is filled at run time.
//
// Declared here from NCCL's documented ABI (2.14 and later). loader.cc fills the table from the libnccl that the process
// has loaded already, if any: two NCCLs in one process would compete for the same GPUs with different tuning.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "drivers/cuda/api.h"

namespace paceline::drivers::nccl {

using Comm = struct NcclCommTag*;
using NcclResult = int;  ///< ncclResult_t; 0 is success

inline constexpr NcclResult kRemoteError = 6;  // ncclRemoteError: a neighbour's process is gone
inline constexpr NcclResult kInProgress = 7;   // ncclInProgress

enum class Type : int { kInt8 = 0, kFloat16 = 6, kFloat32 = 7, kBFloat16 = 9 };
enum class Op : int { kSum = 0, kMax = 2 };

struct UniqueId {
  char bytes[128];
};

/// ncclConfig_t as of 2.18: later versions take shorter ones and leave the rest at its default.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21805;
  int blocking = INT_MIN;  // undefined: NCCL's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

struct Api {
  NcclResult (*get_version)(int* version) = nullptr;
  const char* (*get_error_string)(NcclResult error) = nullptr;
  const char* (*get_last_error)(Comm comm) = nullptr;
  NcclResult (*get_unique_id)(UniqueId* id) = nullptr;
  NcclResult (*comm_init_rank_config)(Comm* comm, int ranks, UniqueId id, int rank,
                                      Config* config) = nullptr;
  NcclResult (*comm_destroy)(Comm comm) = nullptr;
  NcclResult (*comm_abort)(Comm comm) = nullptr;
  NcclResult (*comm_get_async_error)(Comm comm, NcclResult* error) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*all_reduce)(const void* send, void* receive, size_t count, Type type, Op op,
                           Comm comm, cuda::Stream stream) = nullptr;
  NcclResult (*reduce_scatter)(const void* send, void* receive, size_t receive_count, Type type,
                               Op op, Comm comm, cuda::Stream stream) = nullptr;
  NcclResult (*all_gather)(const void* send, void* receive, size_t send_count, Type type, Comm comm,
                           cuda::Stream stream) = nullptr;
  NcclResult (*broadcast)(const void* send, void* receive, size_t count, Type type, int root,
                          Comm comm, cuda::Stream stream) = nullptr;
};

}  // namespace paceline::drivers::nccl
