// How the kernel's scheduler treats the threads that keep the network busy.
#pragma once

namespace paceline {

/// For the calling thread: named in `top -H` (at most 15 characters), and woken promptly where the cores are full. A
/// thread of the network computes little and waits often; each wait that ends late leaves the link idle. So it asks for
///  - short slices: with them a thread that wakes up goes before those that compute (Linux 6.12 and later, no
///    privilege needed; its share of the processor stays the same);
///  - a priority ten steps higher, where the process may (root, CAP_SYS_NICE, RLIMIT_NICE);
///  - timers that are exact to a microsecond, not to fifty.
/// What the kernel refuses stays as it was.
void become_network_thread(const char* name);

}  // namespace paceline
