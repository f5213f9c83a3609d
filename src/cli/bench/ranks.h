// What the bench itself needs to agree on among its ranks.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "paceline/comm.h"

namespace paceline::bench {

/// Element-wise maximum over all ranks, in place. All ranks hand in equally many.
Status maximum(paceline_comm* comm, std::vector<double>& values);
/// Rank 0's text on all ranks.
Result<std::string> share(paceline_comm* comm, int rank, std::string text);
Status barrier(paceline_comm* comm);
/// True when every rank's status is ok; else the first failing rank's sentence is on rank 0's standard error.
bool all_ok(paceline_comm* comm, int rank, const Status& mine);

}  // namespace paceline::bench
