#include "bootstrap/kv_store.h"

#include <fmt/format.h>

namespace paceline::bootstrap {

Status StoreKeyValue::put(const std::string& key, const std::string& value) {
  int rc = store_.put(store_.context, key.c_str(), value.data(), value.size());
  if (rc == 0) return {};
  return {Code::kUnavailable, fmt::format("the caller's store refused the key '{}' ({})", key, rc)};
}

Result<std::optional<std::string>> StoreKeyValue::get(const std::string& key) {
  std::string value(kValueLimit, '\0');
  long size = store_.get(store_.context, key.c_str(), value.data(), value.size());
  if (size == -1) return std::optional<std::string>();
  if (size < 0 || size > static_cast<long>(value.size())) {
    return Status(Code::kUnavailable,
                  fmt::format("the caller's store can't give the key '{}' ({})", key, size));
  }
  value.resize(static_cast<std::size_t>(size));
  return std::optional<std::string>(std::move(value));
}

Status MemoryKeyValue::put(const std::string& key, const std::string& value) {
  ++space_->puts;
  space_->entries.try_emplace(key, value);
  return {};
}

Result<std::optional<std::string>> MemoryKeyValue::get(const std::string& key) {
  ++space_->gets;
  auto found = space_->entries.find(key);
  if (found == space_->entries.end()) return std::optional<std::string>();
  return std::optional<std::string>(found->second);
}

}  // namespace paceline::bootstrap
