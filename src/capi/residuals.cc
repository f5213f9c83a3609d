#include "capi/handle.h"

using namespace paceline;  // NOLINT: the functions below are the C ABI's
using namespace paceline::capi;

extern "C" {

paceline_code paceline_trim(paceline_comm* comm) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    comm->runner->trim();
    return report(comm, Status::ok());
  });
}

paceline_code paceline_residual_commit(paceline_comm* comm, const uint64_t* keys, uint64_t count) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    if (keys == nullptr)
      comm->runner->commit_residuals();
    else
      comm->runner->commit_residuals(std::span(keys, count));
    return report(comm, Status::ok());
  });
}

paceline_code paceline_residual_rollback(paceline_comm* comm, const uint64_t* keys,
                                         uint64_t count) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    if (keys == nullptr)
      comm->runner->rollback_residuals();
    else
      comm->runner->rollback_residuals(std::span(keys, count));
    return report(comm, Status::ok());
  });
}

paceline_code paceline_residual_scale(paceline_comm* comm, double factor) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    return report(comm, comm->runner->scale_residuals(factor));
  });
}

paceline_code paceline_residual_read(paceline_comm* comm, uint64_t key, float* data,
                                     uint64_t elements) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    if (data == nullptr && elements > 0) return invalid(comm, "the residual's buffer is null");
    return report(comm, comm->runner->read_residual(key, {data, elements}));
  });
}

paceline_code paceline_residual_write(paceline_comm* comm, uint64_t key, const float* data,
                                      uint64_t elements) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    if (data == nullptr && elements > 0) return invalid(comm, "the residual's buffer is null");
    return report(comm, comm->runner->write_residual(key, {data, elements}));
  });
}
}
