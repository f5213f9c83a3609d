// What a rank tells all others of itself while the path is made, and whether that makes sense.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace paceline::gpu {

struct TableRow {
  int code = 0;  ///< of its status so far; 0: well
  int node = 0, local_rank = 0, local_size = 0;
  int lanes = 0;
  uint64_t piece_bytes = 0;
  int asked_threads = 0, wire_threads = 0;
  std::string message;  ///< of its status

  /// At most `limit` bytes: the message is what is cut.
  [[nodiscard]] std::string text(size_t limit) const;
  /// kInternal: it is not what text() writes. It came from another rank, so nothing in it is taken for granted.
  static Result<TableRow> parse(std::string_view text);
};

/// Whether the rows of all ranks, in their order, fill nodes × local_size places, each of them once. kInternal otherwise,
/// naming the rank; kUnsupported where nodes differ in size.
Status check_places(std::span<const TableRow> rows, int nodes, int local_size);

}  // namespace paceline::gpu
