// The cores that this process may use.
#pragma once

namespace paceline {

/// Those that it may run on, at most what its control group (version 2) lets it have, rounded down; at least 1.
int usable_cores();

/// Threads for a rank's encoding and decoding of top-k on the CPU, where `ranks` share `cores` of a machine: half of the
/// rank's, for the backward pass goes on meanwhile; one to four.
int fitting_codec_threads(int ranks, int cores);

}  // namespace paceline
