// What another rank says of itself while the path is made: understood as it would be written, or refused; and a table of
// such rows fills its places or is refused, whatever their numbers.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "base/testing/fuzz_input.h"
#include "gpu/table_row.h"

namespace {

using paceline::testing::require;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  using namespace paceline::gpu;
  // Rows end with a zero byte.
  std::vector<TableRow> table;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  while (!rest.empty()) {
    const std::string_view text = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(text.size() + 1, rest.size()));
    const auto row = TableRow::parse(text);
    if (!row) continue;
    const std::string said = row->text(text.size() + 1000);
    const auto again = TableRow::parse(said);
    require(again.is_ok() && again->text(text.size() + 1000) == said &&
            again->message == row->message);
    require(row->text(300).size() <= 300);
    table.push_back(*row);
  }
  if (table.empty()) return 0;
  const int local_size = table[0].local_size;
  const int nodes = table[0].node;
  const auto placed = check_places(table, nodes, local_size);
  if (!placed.is_ok()) {
    require(!placed.message().empty());
    return 0;
  }
  for (int node = 0; node < nodes; ++node)
    for (int local = 0; local < local_size; ++local)
      require(std::ranges::count_if(table, [&](const TableRow& row) {
                return row.node == node && row.local_rank == local;
              }) == 1);
  return 0;
}
