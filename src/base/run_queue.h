// Whether the machine's cores are all busy at this moment.
#pragma once

namespace paceline {

/// The threads of the machine that compute or wait for a core, this one left out; -1 where the kernel does not tell
/// (no /proc/loadavg). About two microseconds.
int others_running();

/// As many threads beside this one would compute as the machine has cores: a core that this thread leaves has a taker.
bool cores_are_taken();

}  // namespace paceline
