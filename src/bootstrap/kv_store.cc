#include "bootstrap/kv_store.h"

#include <fmt/format.h>

namespace paceline::bootstrap {
namespace {

/// Bootstrap's own values have at most kValueLimit bytes; what another wrote under its keys is read to be complained of.
constexpr long kStoredLimit = 1L << 24;

Status failed(const char* what, const std::string& key, long code) {
  return {Code::kUnavailable,
          fmt::format("the store handed to paceline_comm_create failed to {} '{}' ({})", what, key,
                      code)};
}

}  // namespace

Status StoreKeyValue::put(const std::string& key, const std::string& value) {
  const int rc = store_.put(store_.context, key.c_str(), value.data(), value.size());
  if (rc == 0) return {};
  return failed("put", key, rc);
}

Result<std::optional<std::string>> StoreKeyValue::get(const std::string& key) {
  std::string value(kValueLimit, '\0');
  for (;;) {
    const long size = store_.get(store_.context, key.c_str(), value.data(), value.size());
    if (size == -1) return std::optional<std::string>();
    if (size < 0 || size > kStoredLimit) return failed("get", key, size);
    const bool whole = static_cast<std::size_t>(size) <= value.size();
    value.resize(static_cast<std::size_t>(size));
    if (whole) return std::optional<std::string>(std::move(value));
  }
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
