#include "bootstrap/key_rows.h"

#include "base/bytes.h"
#include "bootstrap/kv.h"

namespace paceline::bootstrap {

std::vector<std::byte> encode_row(const KeyValues& pairs) {
  ByteWriter out;
  for (const auto& [key, value] : pairs) {
    out.put_string(key);
    out.put_string(value);
  }
  return out.take();
}

Result<KeyValues> parse_rows(std::span<const std::byte> rows) {
  KeyValues pairs;
  ByteReader in(rows);
  while (in.remaining() > 0) {
    auto key = in.get_string(kKeyLimit);
    auto value = in.get_string(kValueLimit);
    if (in.ok()) pairs.emplace_back(std::move(key), std::move(value));
  }
  if (!in.ok()) return Status(Code::kCorrupted, "a rank sent keys that can't be read");
  return pairs;
}

}  // namespace paceline::bootstrap
