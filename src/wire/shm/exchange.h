// Other pages under addresses that are in use: what lies there stays the same.
//
// A process that this one forks keeps what it writes there to itself, as it would with the private pages that were there
// before. It has the file's pages until it writes to them: what its parent or a peer writes before that it may see, and
// zeros when they have been exchanged back here. One that is forked by clone() or vfork() without the C library's fork() has
// the shared pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace paceline::wire::shm {

/// Pages [begin, begin + bytes), private memory, become those at `offset` of `fd`, which take over what they hold. Whole
/// pages; nobody else may touch them meanwhile. `fd` stays open as long as they are there. kResourceExhausted: nothing has
/// changed.
Status exchange_for_shared(std::byte* begin, uint64_t bytes, int fd, uint64_t offset);
/// The other way round: fresh private pages with what the shared ones hold.
Status exchange_for_private(std::byte* begin, uint64_t bytes);
/// The same for pages at `offset` of `fd` that other threads may read and write meanwhile: nothing is lost of what they
/// write. Of what other processes write to the shared pages nothing shows any more once this has returned.
Status detach_from_shared(std::byte* begin, uint64_t bytes, int fd, uint64_t offset);
/// For pages that stay shared when `fd` is closed: children have them as they are.
void share_with_children(std::byte* begin, uint64_t bytes);

}  // namespace paceline::wire::shm
