// One log line at a time to standard error: "[paceline 0] text". The sink lives in log.cc; nothing
// else includes the logging library.
#pragma once

#include <fmt/format.h>

#include <string_view>

namespace paceline::log {

enum class Level : int { kTrace = 0, kDebug = 1, kInfo = 2, kWarning = 3, kError = 4, kOff = 5 };

void set_level(Level level);
/// As PACELINE_LOG_LEVEL names them: "trace", "debug" … "off"; kWarning for any other name.
Level level_named(std::string_view name);
bool enabled(Level level);
/// Shown in front of every line; -1 before the rank is known.
void set_rank(int rank);
void write(Level level, std::string_view text);
/// True the first time that `key` is seen in this process: for messages that must come once.
bool first(std::string_view key);
/// For tests: every key is new again.
void forget_keys();

template <class... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kDebug))
    write(Level::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kInfo)) write(Level::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kWarning))
    write(Level::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kError))
    write(Level::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace paceline::log
