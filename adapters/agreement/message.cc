#include "message.h"

#include <utility>

namespace paceline::agreement {

void append_item(const Item& item, ByteWriter& out) {
  out.put(item.kind);
  out.put(item.code);
  out.put_string(item.name);
  out.put_string(item.text);
}

std::optional<std::vector<Item>> decode_items(std::span<const std::byte> message) {
  std::vector<Item> items;
  ByteReader in(message);
  while (in.ok() && in.remaining() > 0) {
    Item item;
    item.kind = in.get<uint8_t>();
    item.code = in.get<int32_t>();
    item.name = in.get_string(2 * kTextLimit);
    item.text = in.get_string(4 * kTextLimit);
    items.push_back(std::move(item));
  }
  if (!in.ok()) return std::nullopt;
  return items;
}

}  // namespace paceline::agreement
