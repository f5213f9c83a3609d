// Refuses what can't be right before anything is sent, by name and with the fix.
#pragma once

#include "base/status.h"
#include "engine/engine.h"

namespace paceline::engine {

/// Bytes of the buffers that an operation reads and writes on one rank.
struct BufferBytes {
  uint64_t input = 0;
  uint64_t output = 0;
};

/// Whether the collective takes Operation::counts.
bool per_rank(plan::Collective collective);
/// `size` ranks in the group, of which this one is `me`. Ok: the operation makes sense on this
/// rank.
Status validate(const Operation& operation, Rank size, Rank me);
/// Of a valid operation. Buffers that a rank need not have (a broadcast's input away from the root)
/// are 0.
BufferBytes buffer_bytes(const Operation& operation, Rank size, Rank me);

}  // namespace paceline::engine
