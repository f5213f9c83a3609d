// What is said of a file or folder that can't be made or written: its name, the system's reason, what to do.
#pragma once

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

namespace paceline::cli {

/// `what` names it ("--json x.json"); `kind` is "file" or "folder", of what the user gave.
inline std::string unwritable(std::string_view what, int error, std::string_view kind) {
  const bool is_full = error == ENOSPC || error == EDQUOT;
  const auto fix =
      is_full ? fmt::format("free some space or give another {}", kind)
              : fmt::format("name a {} in a folder that is there and that you may write to", kind);
  return fmt::format("{}: can't be written ({}): {}", what, std::strerror(error), fix);
}

}  // namespace paceline::cli
