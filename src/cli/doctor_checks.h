// What `paceline doctor` looks at: one function a subject, each finding with its fix.
#pragma once

#include <string>
#include <vector>

#include "base/settings.h"

namespace paceline::cli {

enum class Verdict {
  kGood,
  kNote,     ///< worth knowing; nothing is lost for this job
  kWarning,  ///< works, but slower or less safe than it could
  kFailure,  ///< a job would not start or not survive
};

struct Finding {
  std::string subject;  ///< "shared memory"
  Verdict verdict = Verdict::kGood;
  std::string found;  ///< what is there
  std::string fix;    ///< what to do; empty for kGood
};
using Findings = std::vector<Finding>;

// Face: whose defaults and variables hold.
void check_settings(Findings& findings, Face face);  ///< the environment's variables, the secret
void check_machine(Findings& findings);        ///< cores, memory, kernel, threads per rank, limits
void check_shared_memory(Findings& findings);  ///< /dev/shm, memfd, process_vm_readv
void check_network(Findings& findings, Face face);  ///< interfaces, host name, TCP limits
void check_libraries(Findings& findings);           ///< CUDA driver, NCCL, PMIx: found at run time
void check_launchers(Findings& findings, Face face);      ///< the environment's, and programs
void check_meeting_point(Findings& findings, Face face);  ///< can rank 0 be found, and listen?
void check_lab(Findings& findings);                       ///< what `paceline lab` needs

}  // namespace paceline::cli
