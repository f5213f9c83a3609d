#include "capi/handle.h"

using namespace paceline;  // NOLINT: the functions below are the C ABI's
using namespace paceline::capi;

extern "C" {

paceline_code paceline_group_create(paceline_comm* comm, const int32_t* ranks, size_t count,
                                    uint32_t* group) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    if (group == nullptr || (ranks == nullptr && count > 0))
      return invalid(comm, "ranks or group is null");
    auto made = comm->runner->create_group({ranks, count});
    if (!made) return report(comm, made.status());
    *group = *made;
    return report(comm, Status::ok());
  });
}

paceline_code paceline_group_destroy(paceline_comm* comm, uint32_t group) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    return report(comm, comm->runner->destroy_group(group));
  });
}
}
