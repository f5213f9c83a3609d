// For tests: settings that come from these variables alone, whatever this process's environment holds.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/settings.h"

namespace paceline::testing {

using Variables = std::map<std::string, std::string>;

inline Result<Settings> load_settings(const Variables& variables, Face face = Face::kPaceline) {
  return Settings::load(
      face,
      [&](const std::string& name) -> std::optional<std::string> {
        auto found = variables.find(name);
        return found == variables.end() ? std::nullopt : std::optional(found->second);
      },
      [&] {
        std::vector<std::string> names;
        for (const auto& [name, value] : variables) names.push_back(name);
        return names;
      });
}

}  // namespace paceline::testing
