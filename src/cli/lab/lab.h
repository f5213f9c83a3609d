// `paceline lab`: a small cluster of network namespaces with shaped, calibrated links, on one
// machine.
#pragma once

#include <string>
#include <vector>

#include "cli/lab/options.h"

namespace paceline::lab {

/// Returns the process's exit code: the first failing rank's, 128 + signal when interrupted, 2 for
/// wrong flags, 3 when the lab itself could not be made. Call before there are threads.
int lab_main(Flags& flags, const std::vector<std::string>& command);

/// `paceline lab-bytes`, inside a lab: prints what the links have carried so far, as JSON.
int lab_bytes_main();

}  // namespace paceline::lab
