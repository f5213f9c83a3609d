// Runs a helper program (ip, tc) to its end and gives back what it said.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace paceline::lab {

/// Standard output of `argv`; `input` is its standard input. A non-zero exit is kUnavailable with
/// the command and the first line of standard error.
Result<std::string> run_program(const std::vector<std::string>& argv,
                                const std::string& input = {});

}  // namespace paceline::lab
