// What people write: variables, host lists and files, rates, durations, shares, addresses, interfaces. Whatever stands there is taken as
// something in range that reads back the same, or refused in a sentence that quotes it.
//
// Input: one byte which of them, then its text (a setting: its row, its alias, the face).
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/settings_table.h"
#include "base/testing/fuzz_input.h"
#include "base/testing/variables.h"
#include "bootstrap/host_address.h"
#include "cli/text/hosts.h"
#include "cli/text/units.h"
#include "wire/tcp/socket.h"

namespace {

using namespace paceline;  // NOLINT: a fuzzer has no headers to leak into
using paceline::testing::FuzzInput;
using paceline::testing::require;

constexpr double kYear = 365.0 * 24 * 3600 * 1e9;

void a_setting(FuzzInput in) {
  const auto rows = setting_rows();
  const SettingRow& row = rows[in.byte() % rows.size()];
  const std::size_t which = in.byte() % (row.aliases.size() + 1);
  const auto face = static_cast<Face>(in.byte() % 5);
  std::string variable = "PACELINE_";
  if (which > 0) {
    variable = row.aliases[which - 1].variable;
  } else {
    for (const char c : row.name) variable += static_cast<char>(std::toupper(c));
  }
  const std::string text(reinterpret_cast<const char*>(in.rest.data()), in.rest.size());
  if (text.find('\0') != std::string::npos) return;  // no variable holds one
  const auto settings = testing::load_settings({{variable, text}}, face);
  if (!settings) {
    require(settings.status().message().find(variable) != std::string::npos);
    return;
  }
  switch (row.type) {
    case SettingType::kFlag:
      (void)settings->flag(row.name);
      break;
    case SettingType::kInteger:
      (void)settings->integer(row.name);
      break;
    case SettingType::kNumber:
      require(std::isfinite(settings->number(row.name)));
      break;
    default: {
      const std::string& value = settings->text(row.name);
      if (row.type == SettingType::kChoice)
        require(fmt::format("|{}|", row.range).find(fmt::format("|{}|", value)) !=
                std::string::npos);
    }
  }
  if (settings->is_set(row.name)) require(settings->source(row.name) == variable);
  (void)settings->to_json();
}

void check_hosts(const std::vector<cli::HostSlots>& hosts) {
  require(!hosts.empty());
  int slots = 0;
  for (const auto& h : hosts) {
    require(!h.host.empty() && h.host.front() != '-' && h.slots >= 1 && h.slots <= 4096);
    slots += h.slots;
    // In brackets it reads back, with its slots.
    const auto again = cli::parse_hosts(fmt::format("[{}]:{}", h.host, h.slots));
    if (h.host.find_first_of("[],") == std::string::npos)
      require(again.is_ok() && again->size() == 1 && again->front().host == h.host &&
              again->front().slots == h.slots);
  }
  if (slots > 1000) return;    // many a process to place
  for (const auto& h : hosts)  // names are looked up: by no server here
    if (h.host.find_first_not_of("0123456789.") != std::string::npos) return;
  const auto placed = cli::place(hosts, 0);
  require(placed.is_ok() && placed->size() == static_cast<std::size_t>(slots));
  for (std::size_t i = 0; i < placed->size(); ++i) {
    const auto& p = (*placed)[i];
    require(p.rank == static_cast<int>(i) && p.local_rank >= 0 && p.local_rank < p.local_size);
  }
}

void a_host_file(std::string_view text) {
  const int fd = ::memfd_create("hosts", MFD_CLOEXEC);
  require(fd >= 0 && ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  const auto path = fmt::format("/proc/self/fd/{}", fd);
  const auto hosts = cli::read_hostfile(path);
  ::close(fd);
  if (hosts) return check_hosts(*hosts);
  require(hosts.status().message().find(path) != std::string::npos);
}

template <typename T>
void quoted(const Result<T>& result, std::string_view text) {
  require(result.is_ok() || result.status().message().find(text) != std::string::npos);
}

void a_number(const Result<double>& number, std::string_view text) {
  quoted(number, text);
  require(!number || std::isfinite(*number));
}

/// NCCL's way to name interfaces: what is chosen is one of them, what excludes some never means loopback.
void an_interface(const std::string& pattern) {
  using namespace bootstrap;  // NOLINT: as above
  std::vector<InterfaceAddress> all;
  for (auto [name, address] : {std::pair{"lo", "127.0.0.1"},
                               {"docker0", "172.17.0.1"},
                               {"eth0", "10.0.0.1"},
                               {"eth0", "fd00::1"},
                               {"eth01", "fd00::2"}})
    all.push_back({name, *numeric_address(address, 0)});
  for (const bool v6 : {false, true}) {
    const auto chosen = choose_interface(pattern, all, v6, "PACELINE_INTERFACE");
    if (!chosen) {
      quoted(chosen, pattern);
      require(chosen.status().message().find("docker0, eth0, eth01, lo") != std::string::npos);
      continue;
    }
    require(std::any_of(all.begin(), all.end(), [&](const InterfaceAddress& one) {
      return one.address.host() == chosen->host();
    }));
    require(!pattern.starts_with('^') || !chosen->is_loopback());
    if (chosen->host() == "10.0.0.1" || chosen->host() == "fd00::1")
      require((chosen->family() == AF_INET6) == v6);
  }
}

void a_host_and_port(const std::string& text) {
  const auto parsed = bootstrap::parse_host_port(text, "PACELINE_MASTER");
  quoted(parsed, text);
  if (!parsed) return;
  require(!parsed->host.empty());
  const auto again =
      bootstrap::parse_host_port(fmt::format("[{}]:{}", parsed->host, parsed->port), "x");
  require(parsed->host.find_first_of("[]") != std::string::npos ||
          (again.is_ok() && again->host == parsed->host && again->port == parsed->port));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  FuzzInput in{{data, size}};
  const uint8_t first = in.byte();
  const int what = first < 254 ? first % 7 : first;
  const std::string text(reinterpret_cast<const char*>(in.rest.data()), in.rest.size());
  switch (what) {
    case 0:
      a_setting(in);
      break;
    case 1: {
      const auto hosts = cli::parse_hosts(text);
      if (hosts) check_hosts(*hosts);
      require(hosts.is_ok() || !hosts.status().message().empty());
      break;
    }
    case 2:
      a_host_file(text);
      break;
    case 3:
      a_number(cli::parse_rate(text), text);
      break;
    case 4: {
      const auto delay = cli::parse_duration(text);
      quoted(delay, text);
      require(!delay || std::abs(static_cast<double>(delay->count())) <= kYear);
      break;
    }
    case 5:
      a_number(cli::parse_share(text), text);
      break;
    case 254:
      an_interface(text);
      break;
    case 255:
      a_host_and_port(text);
      break;
    default: {
      const auto address = wire::parse_endpoint(text);
      if (!address) {
        require(!address.status().message().empty());
        break;
      }
      const auto again = wire::parse_endpoint(address->text());
      require(again.is_ok() && again->text() == address->text());
    }
  }
  return 0;
}
