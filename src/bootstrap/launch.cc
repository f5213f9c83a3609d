#include "bootstrap/launch.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <set>

#include "bootstrap/arrivals.h"
#include "bootstrap/host_address.h"
#include "bootstrap/rendezvous.h"

namespace paceline::bootstrap {
namespace {

using Variables = std::vector<std::pair<std::string, std::string>>;

/// Rank 0's "address port", known to all.
Result<HostPort> agree_on_master(const Settings& settings, const Identity& identity,
                                 KeyValue& space) {
  const auto prefix = fmt::format("paceline/{}/launch/", identity.job.substr(0, 64));
  const auto key = prefix + "master";
  space.announce(here_key(prefix, identity.rank));
  if (identity.rank == 0) {
    PACELINE_ASSIGN(auto address, own_address(settings, identity));
    PACELINE_ASSIGN(auto port, free_port(address));
    PACELINE_RETURN_IF_ERROR(space.put(key, fmt::format("{} {}", address, port)));
  }
  PACELINE_RETURN_IF_ERROR(space.fence());
  SteadyClock clock;
  auto timeout = settings.number("start_timeout");
  Time deadline = after(clock.now(), to_time(timeout));
  while (clock.now() < deadline) {
    PACELINE_RETURN_IF_ERROR(space.poll(clock.now()));
    PACELINE_ASSIGN(auto value, space.get(key));
    if (value) {
      auto blank = value->rfind(' ');
      HostPort master{value->substr(0, blank), 0};
      const char* end = value->data() + value->size();
      if (blank != std::string::npos) std::from_chars(value->data() + blank + 1, end, master.port);
      if (master.port != 0) return master;
      return Status(Code::kCorrupted, fmt::format("'{}' is no address and port", *value));
    }
    ::poll(nullptr, 0, 2);
  }
  std::set<Rank> missing;
  bool tells = true;
  for (Rank r = 0; r < identity.size && tells; ++r) {
    const auto here = space.announced(here_key(prefix, r));
    tells = here.has_value();
    if (!here.value_or(true)) missing.insert(r);
  }
  if (tells && missing.empty()) return came_late(to_time(timeout), identity.size);
  if (tells) return never_came(to_time(timeout), missing, identity.size, space);
  return Status(Code::kTimeout, fmt::format("after {:g} s rank 0 has not told its address over {}",
                                            timeout, space.describe()));
}

/// The same port on all ranks of a Slurm step, another for each job: they have no way to agree on one.
uint16_t port_of_job(const std::string& job) {
  uint32_t number = 0;
  for (unsigned char c : job) number = number * 31 + c;
  return static_cast<uint16_t>(20000 + number % 10000);
}

}  // namespace

Result<uint16_t> free_port(const std::string& address) {
  PACELINE_ASSIGN(auto at, numeric_address(address, 0));
  int fd = ::socket(at.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
  Result<HostAddress> bound =
      Status(Code::kUnavailable, fmt::format("no port of {} is free", address));
  if (fd >= 0 && ::bind(fd, at.get(), at.length) == 0) bound = local_address(fd);
  if (fd >= 0) ::close(fd);
  if (!bound) return bound.status();
  return bound->port();
}

Result<Variables> launch_environment(const Settings& settings) {
  PACELINE_ASSIGN(auto identity,
                  find_identity(std::nullopt, std::nullopt, settings.flag("use_ddp_launcher")));
  auto launcher = identity.launcher;
  if (launcher == Launcher::kNone || launcher == Launcher::kTorch ||
      launcher == Launcher::kPaceline) {
    return Variables();
  }
  HostPort master{identity.master_host, port_of_job(identity.job)};
  if (identity.size == 1) {
    PACELINE_ASSIGN(auto port, free_port("127.0.0.1"));
    master = {"127.0.0.1", port};
  } else if (auto space = launcher_space(identity); space) {
    PACELINE_ASSIGN(master, agree_on_master(settings, identity, **space));
  } else if (launcher != Launcher::kSlurm || master.host.empty()) {
    return space.status();
  }
  Variables variables{{"RANK", std::to_string(identity.rank)},
                      {"WORLD_SIZE", std::to_string(identity.size)},
                      {"LOCAL_RANK", std::to_string(identity.local_rank)},
                      {"MASTER_ADDR", master.host},
                      {"MASTER_PORT", std::to_string(master.port)}};
  if (identity.local_size > 0)
    variables.emplace_back("LOCAL_WORLD_SIZE", std::to_string(identity.local_size));
  return variables;
}

}  // namespace paceline::bootstrap
