// What the pump does with encodings of rows: they say themselves how long they are.
#include <fmt/format.h>

#include <cstring>

#include "gpu/pump.h"

namespace paceline::gpu {

Result<uint64_t> Pump::rows_to_send(Operation& o, const PathPiece& piece, const std::byte* from) {
  const auto format = o.plan->row_format(piece);
  uint32_t count = 0;
  std::memcpy(&count, from, sizeof count);
  if (count > format.capacity)
    return Status(Code::kCorrupted, fmt::format("{}: an encoding says that it holds {} of {} rows",
                                                o.name, count, format.capacity));
  o.rows += count;
  rows_sent_ += count;
  rows_bound_ += format.capacity;
  return device::cuda::used_row_bytes(format, count);
}

Result<uint64_t> Pump::most_rows(const Operation& operation) const {
  std::unique_lock lock(mutex_);
  arrived_turn_.wait(lock,
                     [&] { return failure_ ? arrived_through_ >= operation.sequence : told_; });
  if (!failure_) return failure_;
  return static_cast<uint64_t>(operation.report & (Operation::kNonFinite - 1));
}

}  // namespace paceline::gpu
