#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <set>
#include <string>

namespace paceline::log {
namespace {

std::atomic<int> current_rank{-1};
std::atomic<int> current_level{static_cast<int>(Level::kWarning)};

spdlog::logger& logger() {
  // Never destroyed: threads may still log while the process ends.
  static auto* instance = [] {
    auto* l = new spdlog::logger("paceline", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    l->set_pattern("%v");
    l->set_level(spdlog::level::trace);
    l->flush_on(spdlog::level::trace);
    return l;
  }();
  return *instance;
}

struct Seen {
  std::mutex mutex;
  std::set<std::string> keys;
};

Seen& seen() {
  static auto* instance = new Seen;  // as above
  return *instance;
}

}  // namespace

Level level_named(std::string_view name) {
  constexpr std::string_view kNames[] = {"trace", "debug", "info", "warning", "error", "off"};
  const auto* at = std::find(std::begin(kNames), std::end(kNames), name);
  return at == std::end(kNames) ? Level::kWarning : static_cast<Level>(at - std::begin(kNames));
}
void set_level(Level level) { current_level.store(static_cast<int>(level)); }
bool enabled(Level level) { return static_cast<int>(level) >= current_level.load(); }
void set_rank(int rank) { current_rank.store(rank); }

void write(Level level, std::string_view text) {
  int rank = current_rank.load();
  const char* mark = level == Level::kWarning ? "warning: "
                     : level == Level::kError ? "error: "
                                              : "";
  if (rank < 0) {
    logger().info("[paceline] {}{}", mark, text);
  } else {
    logger().info("[paceline {}] {}{}", rank, mark, text);
  }
}

bool first(std::string_view key) {
  const std::lock_guard lock(seen().mutex);
  return seen().keys.insert(std::string(key)).second;
}

void forget_keys() {
  const std::lock_guard lock(seen().mutex);
  seen().keys.clear();
}

}  // namespace paceline::log
