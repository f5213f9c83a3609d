#include "gpu/table_row.h"

#include <fmt/format.h>

#include <charconv>
#include <vector>

#include "base/bytes.h"

namespace paceline::gpu {
namespace {

constexpr size_t kNumbers = 160;  ///< that the numbers take at most

/// The next number; what follows it must be `end`.
template <class T>
bool take(std::string_view& rest, T& value, char end) {
  const auto [at, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  const auto used = static_cast<size_t>(at - rest.data());
  if (error != std::errc() || used == rest.size() || rest[used] != end) return false;
  rest.remove_prefix(used + 1);
  return true;
}

}  // namespace

std::string TableRow::text(size_t limit) const {
  return fmt::format("{} {} {} {} {} {} {} {}\n{}", code, node, local_rank, local_size, lanes,
                     piece_bytes, asked_threads, wire_threads,
                     shortened(message, limit - kNumbers));
}

Result<TableRow> TableRow::parse(std::string_view text) {
  TableRow row;
  for (int* number : {&row.code, &row.node, &row.local_rank, &row.local_size, &row.lanes}) {
    if (!take(text, *number, ' '))
      return Status(Code::kInternal, "a row of the path's table that can't be read");
  }
  if (!take(text, row.piece_bytes, ' ') || !take(text, row.asked_threads, ' ') ||
      !take(text, row.wire_threads, '\n'))
    return Status(Code::kInternal, "a row of the path's table that can't be read");
  row.message = text;
  return row;
}

Status check_places(std::span<const TableRow> rows, int nodes, int local_size) {
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].local_size == local_size) continue;
    return {Code::kUnsupported,
            fmt::format("nodes differ in size: rank {} is one of {} on its node, this rank one of "
                        "{}; the path for CUDA tensors needs as many GPUs on every node",
                        r, rows[r].local_size, local_size)};
  }
  if (nodes < 1 || local_size < 1 ||
      rows.size() / static_cast<size_t>(nodes) != static_cast<size_t>(local_size) ||
      rows.size() % static_cast<size_t>(nodes) != 0)
    return {Code::kInternal,
            fmt::format("{} ranks are not {} nodes of {}", rows.size(), nodes, local_size)};
  std::vector<int> taken(rows.size(), -1);
  for (size_t r = 0; r < rows.size(); ++r) {
    const TableRow& row = rows[r];
    if (row.node < 0 || row.node >= nodes || row.local_rank < 0 || row.local_rank >= local_size)
      return {Code::kInternal,
              fmt::format("rank {} says that it is local rank {} of {} on node {} of {}", r,
                          row.local_rank, local_size, row.node, nodes)};
    int& owner = taken[static_cast<size_t>(row.node) * static_cast<size_t>(local_size) +
                       static_cast<size_t>(row.local_rank)];
    if (owner >= 0)
      return {Code::kInternal,
              fmt::format("ranks {} and {} both say that they are local rank {} on node {}", owner,
                          r, row.local_rank, row.node)};
    owner = static_cast<int>(r);
  }
  return Status::ok();
}

}  // namespace paceline::gpu
