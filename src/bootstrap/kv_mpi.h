// The key-value spaces of the MPI launchers: Hydra's (PMI-1) and PMIx. One conversation a process: the launchers
// allow no second one, so these stay open until the process ends.
#pragma once

#include <memory>
#include <string>

#include "bootstrap/kv.h"
#include "drivers/pmix/pmix.h"

namespace paceline::bootstrap {

/// Over PMI_FD. kUnavailable: not set, or nobody answers there.
Result<std::shared_ptr<KeyValue>> hydra_space();
/// The same over any descriptor, for tests.
Result<std::shared_ptr<KeyValue>> pmi1_space(int fd);
/// Over libpmix.so.2. kUnavailable: not there, or this process was not started by a PMIx launcher.
Result<std::shared_ptr<KeyValue>> pmix_space();
/// The same over any client (the mock's), for tests.
std::shared_ptr<KeyValue> pmix_space(std::shared_ptr<drivers::PmixClient> client);

/// Values travel as hexadecimal digits in parts that fit the launcher's limit: part 0 begins with their number.
std::string to_hex(std::string_view bytes);
/// kCorrupted: an odd number of digits, or none of them.
Result<std::string> from_hex(std::string_view digits);

}  // namespace paceline::bootstrap
