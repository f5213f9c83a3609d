// The cores that this process may use.
#pragma once

namespace paceline {

/// Those that it may run on, at most what its control group (version 2) lets it have, rounded down; at least 1.
int usable_cores();

/// Those that the machine has.
int machine_cores();

/// Whether ranks that may run on `usable` of the machine's cores each have cores of their own: bound, or in containers apart.
bool have_cores_apart(int ranks, int usable, int machine);

/// Threads for a rank's encoding and decoding of top-k on the CPU: half of its cores, for the backward pass goes on
/// meanwhile; one to four. `ranks` of the job are on the machine, which has `machine` cores, and this one may use
/// `usable`: by itself where there are as many for each, shared by all of them otherwise.
int fitting_codec_threads(int ranks, int usable, int machine);

}  // namespace paceline
