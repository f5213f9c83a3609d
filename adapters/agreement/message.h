// What a named queue's control messages hold: items, one after the other. They come from other processes, so every
// length is checked.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "paceline/comm.h"

namespace paceline::agreement {

/// The longest name, and the longest signature.
inline constexpr std::size_t kTextLimit = 4096;

enum Kind : uint8_t { kReport = 1, kOrder = 2, kBye = 3, kClose = 4 };

/// One line of the conversation; what a kind does not use is empty.
struct Item {
  uint8_t kind = 0;
  int32_t code = PACELINE_OK;  ///< kOrder: why it is refused
  std::string name;
  std::string text;  ///< kReport: the signature; kOrder: the refusal
};

void append_item(const Item& item, ByteWriter& out);
/// None: truncated, or a text longer than any rank sends. What a kind means, and to whom, is the queue's to say.
std::optional<std::vector<Item>> decode_items(std::span<const std::byte> message);

}  // namespace paceline::agreement
