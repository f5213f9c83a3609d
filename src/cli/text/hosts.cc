#include "cli/text/hosts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>

#include "bootstrap/host_address.h"

namespace paceline::cli {
namespace {

constexpr int kMaxSlots = 4096;

std::string_view trim(std::string_view text) {
  auto begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

Result<int> parse_slots(std::string_view text, std::string_view entry) {
  int slots = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), slots);
  if (error != std::errc() || end != text.data() + text.size() || slots < 1 || slots > kMaxSlots) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("host entry '{}': slots must be a number from 1 to {}", entry, kMaxSlots));
  }
  return slots;
}

/// ssh takes a host name as its next argument: one that begins with '-' would be an option.
Status check_host(std::string_view host, std::string_view entry) {
  if (host.empty() || host.front() == '-' ||
      host.find_first_of(" \t'\"\\;&|<>$`") != std::string_view::npos) {
    return {Code::kInvalidArgument,
            fmt::format("host entry '{}': '{}' is no host name", entry, host)};
  }
  return {};
}

/// "host", "host:4", "[v6]", "[v6]:4", or a bare IPv6 address (two colons or more).
Result<HostSlots> parse_entry(std::string_view entry) {
  HostSlots result;
  std::string_view host = entry;
  std::string_view slots;
  auto bracket = entry.find('[');
  if (bracket != std::string_view::npos) {
    auto close = entry.find(']', bracket);
    if (close == std::string_view::npos) {
      return Status(Code::kInvalidArgument, fmt::format("host entry '{}': ']' is missing", entry));
    }
    result.host = std::string(entry.substr(0, bracket)) +
                  std::string(entry.substr(bracket + 1, close - bracket - 1));
    auto rest = entry.substr(close + 1);
    if (!rest.empty() && rest.front() != ':') {
      return Status(Code::kInvalidArgument,
                    fmt::format("host entry '{}': expected ':slots' after ']'", entry));
    }
    if (!rest.empty()) slots = rest.substr(1);
    if (!rest.empty() && slots.empty()) slots = "?";
  } else {
    auto colon = entry.find(':');
    if (colon != std::string_view::npos && entry.find(':', colon + 1) == std::string_view::npos) {
      host = entry.substr(0, colon);
      slots = entry.substr(colon + 1);
      if (slots.empty()) slots = "?";
    }
    result.host = std::string(host);
  }
  PACELINE_RETURN_IF_ERROR(check_host(result.host, entry));
  if (!slots.empty()) {
    PACELINE_ASSIGN(result.slots, parse_slots(slots, entry));
  }
  return result;
}

bool is_own(const bootstrap::HostAddress& address) {
  auto own = bootstrap::interfaces();
  return std::any_of(own.begin(), own.end(),
                     [&](const auto& entry) { return entry.address.host() == address.host(); });
}

}  // namespace

Result<std::vector<HostSlots>> parse_hosts(std::string_view text) {
  std::vector<HostSlots> hosts;
  while (true) {
    auto comma = text.find(',');
    PACELINE_ASSIGN(auto host, parse_entry(trim(text.substr(0, comma))));
    hosts.push_back(std::move(host));
    if (comma == std::string_view::npos) return hosts;
    text.remove_prefix(comma + 1);
  }
}

Result<std::vector<HostSlots>> read_hostfile(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return Status(Code::kInvalidArgument, fmt::format("host file '{}' can't be read", path));
  }
  std::vector<HostSlots> hosts;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    std::string_view text = trim(std::string_view(line).substr(0, line.find('#')));
    if (text.empty()) continue;
    auto space = text.find_first_of(" \t");
    auto host = parse_entry(text.substr(0, space));
    if (host && space != std::string_view::npos) {
      auto rest = trim(text.substr(space));
      if (rest.starts_with("slots")) {
        auto equals = rest.find('=');
        auto value = equals == std::string_view::npos ? "?" : trim(rest.substr(equals + 1));
        value = value.substr(0, value.find_first_of(" \t"));  // Open MPI allows max_slots= after it
        auto slots = parse_slots(value, text);
        if (!slots) {
          host = slots.status();
        } else {
          host->slots = *slots;
        }
      } else {
        host = Status(Code::kInvalidArgument,
                      fmt::format("'{}': expected 'host', 'host:4' or 'host slots=4'", text));
      }
    }
    if (!host) {
      return Status(host.status().code(),
                    fmt::format("{}:{}: {}", path, number, host.status().message()));
    }
    hosts.push_back(std::move(*host));
  }
  if (hosts.empty()) {
    return Status(Code::kInvalidArgument, fmt::format("host file '{}' names no host", path));
  }
  return hosts;
}

bool is_this_host(const std::string& host) {
  if (host == "localhost" || host == "127.0.0.1" || host == "::1") return true;
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return false;
  std::string own(name);
  auto first_label = [](const std::string& text) { return text.substr(0, text.find('.')); };
  if (host == own || host == first_label(own)) return true;
  if (auto address = bootstrap::numeric_address(host, 0)) return is_own(*address);
  // Two domains may each have a machine of this name.
  if (first_label(host) != first_label(own)) return false;
  auto addresses = bootstrap::resolve(host, 0);
  return addresses && std::any_of(addresses->begin(), addresses->end(), [](const auto& address) {
           return address.is_loopback() || is_own(address);
         });
}

Result<std::vector<Placement>> place(const std::vector<HostSlots>& hosts, int np) {
  int slots = 0;
  for (const auto& host : hosts) slots += host.slots;
  if (np == 0) np = slots;
  if (np > slots) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("-np {} but the hosts have {} slot{}: raise the slots (-H host:slots) "
                    "or lower -np",
                    np, slots, slots == 1 ? "" : "s"));
  }
  std::vector<Placement> placements;
  // A host may be listed twice, and this one under several names: local ranks go on counting.
  std::map<std::string, int> used;
  auto machine = [](const Placement& p) { return p.local ? std::string() : p.host; };
  for (const auto& host : hosts) {
    const bool local = static_cast<int>(placements.size()) < np && is_this_host(host.host);
    for (int i = 0; i < host.slots && static_cast<int>(placements.size()) < np; ++i) {
      Placement placement{
          .rank = static_cast<int>(placements.size()), .host = host.host, .local = local};
      placement.local_rank = used[machine(placement)]++;
      placements.push_back(std::move(placement));
    }
  }
  for (auto& placement : placements) placement.local_size = used[machine(placement)];
  return placements;
}

}  // namespace paceline::cli
