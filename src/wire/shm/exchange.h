// Other pages under addresses that are in use: what lies there stays the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace paceline::wire::shm {

/// Pages [begin, begin + bytes), private memory, become those at `offset` of `fd`, which take over what they hold. Whole
/// pages; nobody else may touch them meanwhile. kResourceExhausted: nothing has changed.
Status exchange_for_shared(std::byte* begin, uint64_t bytes, int fd, uint64_t offset);
/// The other way round: fresh private pages with what the shared ones hold.
Status exchange_for_private(std::byte* begin, uint64_t bytes);
/// The same for pages at `offset` of `fd` that other threads may read and write meanwhile: nothing is lost of what they
/// write. Of what other processes write to the shared pages nothing shows any more once this has returned.
Status detach_from_shared(std::byte* begin, uint64_t bytes, int fd, uint64_t offset);

}  // namespace paceline::wire::shm
