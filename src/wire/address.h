// What Member::address contains: "tcp=10.0.0.1:40321;shm=…", one field for each way to reach the
// rank. A field's value is known only to the channel that wrote it; keys and values hold neither
// ';' nor '='.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace paceline::wire {

/// The value of `key` in `address`, if it is there.
inline std::optional<std::string> address_field(std::string_view address, std::string_view key) {
  while (!address.empty()) {
    auto end = address.find(';');
    auto field = address.substr(0, end);
    auto equals = field.find('=');
    if (equals != std::string_view::npos && field.substr(0, equals) == key) {
      return std::string(field.substr(equals + 1));
    }
    if (end == std::string_view::npos) break;
    address.remove_prefix(end + 1);
  }
  return std::nullopt;
}

/// Both addresses' fields in one string.
inline std::string join_addresses(std::string_view a, std::string_view b) {
  if (a.empty() || b.empty()) return std::string(a.empty() ? b : a);
  return std::string(a) + ";" + std::string(b);
}

}  // namespace paceline::wire
