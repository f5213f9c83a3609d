// Keys and values that ranks have put, as rows of an all-gather: how they go round where no store holds them.
//
// A row: of each pair the key and the value, each as its length (32 bits) and its bytes.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace paceline::bootstrap {

using KeyValues = std::vector<std::pair<std::string, std::string>>;

/// One rank's row. Keys and values within kKeyLimit and kValueLimit (kv.h).
std::vector<std::byte> encode_row(const KeyValues& pairs);

/// The pairs of rows that stand one after the other, in their order. kCorrupted: these are not ours.
Result<KeyValues> parse_rows(std::span<const std::byte> rows);

}  // namespace paceline::bootstrap
