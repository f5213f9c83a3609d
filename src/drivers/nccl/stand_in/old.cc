// For tests: a library that passes for NCCL of version PACELINE_NCCL_VERSION, and can nothing. With PACELINE_NCCL_LACKS it
// has no ncclBroadcast.
#pragma GCC visibility push(default)
extern "C" {

int ncclGetVersion(int* version) {
  *version = PACELINE_NCCL_VERSION;
  return 0;
}

#define PACELINE_FAILS(name) \
  int name() { return 1; }
PACELINE_FAILS(ncclGetErrorString)
PACELINE_FAILS(ncclGetLastError)
PACELINE_FAILS(ncclGetUniqueId)
PACELINE_FAILS(ncclCommInitRankConfig)
PACELINE_FAILS(ncclCommDestroy)
PACELINE_FAILS(ncclCommAbort)
PACELINE_FAILS(ncclCommGetAsyncError)
PACELINE_FAILS(ncclGroupStart)
PACELINE_FAILS(ncclGroupEnd)
PACELINE_FAILS(ncclAllReduce)
PACELINE_FAILS(ncclReduceScatter)
PACELINE_FAILS(ncclAllGather)
#ifndef PACELINE_NCCL_LACKS
PACELINE_FAILS(ncclBroadcast)
#endif
}
