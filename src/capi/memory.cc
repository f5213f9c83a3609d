// Memory of paceline_alloc and paceline_share: where the node's other ranks can read it in place, if the job has shared memory.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "capi/handle.h"
#include "wire/shm/allocator.h"

namespace paceline::capi {

void* allocate_shared_memory(paceline_comm& comm, size_t bytes) {
  if (bytes > PTRDIFF_MAX) return nullptr;  // rounding it up would begin again at 0
  if (comm.job != nullptr && comm.job->allocator != nullptr) {
    return comm.job->allocator->allocate(bytes);
  }
  constexpr size_t kAlign = 4096;
  return std::aligned_alloc(kAlign, (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign);
}

void free_shared_memory(paceline_comm& comm, void* memory) {
  if (comm.job != nullptr && comm.job->allocator != nullptr) {
    (void)comm.job->allocator->free(memory);
  } else {
    std::free(memory);
  }
}

Status share_memory(paceline_comm& comm, void* data, size_t bytes) {
  if (data == nullptr) return {Code::kInvalidArgument, "share: the memory is null"};
  if (comm.job == nullptr || comm.job->allocator == nullptr) return Status::ok();
  return comm.job->allocator->share(data, bytes);
}

Status unshare_memory(paceline_comm& comm, void* data) {
  if (comm.job == nullptr || comm.job->allocator == nullptr) return Status::ok();
  return comm.job->allocator->unshare(data);
}

}  // namespace paceline::capi
