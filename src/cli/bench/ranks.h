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
/// Ok when every rank's status is; else kAborted with `otherwise`, and who failed has said why on its standard error.
/// Where the ranks can't tell each other, why not.
Status all_ok(paceline_comm* comm, int rank, const Status& mine, const std::string& otherwise);

}  // namespace paceline::bench
