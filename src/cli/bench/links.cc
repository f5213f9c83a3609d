#include "cli/bench/links.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cli/lab/byte_server.h"
#include "cli/text/units.h"

namespace paceline::bench {

std::optional<LinkBytes> read_links() {
  const char* path = std::getenv("PACELINE_LAB_BYTES");
  if (path == nullptr) return std::nullopt;
  auto text = lab::ask_bytes(path);
  if (!text) return std::nullopt;
  auto answer = nlohmann::json::parse(*text, nullptr, false);
  if (!answer.is_object() || !answer.contains("nodes")) return std::nullopt;
  LinkBytes out;
  for (const auto& node : answer["nodes"]) {
    out.up.push_back(node.value("up_bytes", uint64_t{0}));
    out.down.push_back(node.value("down_bytes", uint64_t{0}));
  }
  return out;
}

uint64_t busiest(const LinkBytes& before, const LinkBytes& after) {
  uint64_t most = 0;
  for (std::size_t i = 0; i < before.up.size() && i < after.up.size(); ++i) {
    most = std::max({most, after.up[i] - before.up[i], after.down[i] - before.down[i]});
  }
  return most;
}

namespace {

double told_by_lab(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? 0.0 : std::strtod(value, nullptr);
}

}  // namespace

Result<double> link_rate(const std::string& option) {
  if (!option.empty()) return cli::parse_rate(option);
  return told_by_lab("PACELINE_LAB_RATE");
}

Result<double> link_latency(const std::string& option) {
  if (option.empty()) return told_by_lab("PACELINE_LAB_DELAY");
  PACELINE_ASSIGN(auto latency, cli::parse_duration(option));
  return std::chrono::duration<double>(latency).count();
}

}  // namespace paceline::bench
