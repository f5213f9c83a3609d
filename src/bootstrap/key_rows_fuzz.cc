// Keys and values that other ranks have put: read as they would be written, to the last byte, or refused.
#include <algorithm>

#include "base/testing/fuzz_input.h"
#include "bootstrap/key_rows.h"
#include "bootstrap/kv.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace paceline::bootstrap;
  using paceline::testing::require;
  const std::span rows(reinterpret_cast<const std::byte*>(data), size);
  const auto pairs = parse_rows(rows);
  if (!pairs) {
    require(pairs.status().code() == paceline::Code::kCorrupted);
    return 0;
  }
  for (const auto& [key, value] : *pairs)
    require(key.size() <= kKeyLimit && value.size() <= kValueLimit);
  require(std::ranges::equal(encode_row(*pairs), rows));
  return 0;
}
