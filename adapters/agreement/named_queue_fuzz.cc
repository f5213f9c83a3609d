// Control messages of other ranks' queues: what is accepted is what would be sent, byte for byte.
#include <algorithm>
#include <cstdlib>

#include "base/testing/fuzz_input.h"
#include "message.h"

namespace {

using paceline::testing::require;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  using namespace paceline::agreement;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto items = decode_items(bytes);
  if (!items) return 0;
  paceline::ByteWriter again;
  for (const Item& item : *items) {
    require(item.name.size() <= 2 * kTextLimit && item.text.size() <= 4 * kTextLimit);
    append_item(item, again);
  }
  require(std::ranges::equal(again.bytes(), bytes));
  return 0;
}
