#include "bootstrap/rendezvous.h"

#include <fmt/format.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>

#include "bootstrap/host_address.h"
#include "bootstrap/kv_mpi.h"
#include "bootstrap/kv_server.h"
#include "bootstrap/kv_tcp.h"

namespace paceline::bootstrap {
namespace {

/// Rank 0's server outlives the join that started it as long as another join of the process uses
/// it.
Result<std::shared_ptr<KvServer>> shared_server(const KvServerOptions& options) {
  static std::mutex mutex;
  static auto* servers = new std::map<std::string, std::weak_ptr<KvServer>>;
  std::lock_guard lock(mutex);
  auto& slot = (*servers)[fmt::format("{} {}", options.address, options.port)];
  if (auto running = slot.lock()) return running;
  PACELINE_ASSIGN(auto started, KvServer::start(options));
  std::shared_ptr<KvServer> server = std::move(started);
  slot = server;
  return server;
}

/// Where rank 0's server is.
Result<HostPort> server_place(const Settings& settings, const Identity& identity) {
  if (const auto& text = settings.text("rendezvous"); !text.empty()) {
    return parse_host_port(text, "PACELINE_RENDEZVOUS");
  }
  if (identity.master_host.empty()) {
    return Status(
        Code::kInvalidArgument,
        fmt::format(
            "rank {} of {} (started by {}) is not told where rank 0 is: set MASTER_ADDR to rank "
            "0's host, or PACELINE_RENDEZVOUS=host:port",
            identity.rank, identity.size, launcher_name(identity.launcher)));
  }
  return HostPort{identity.master_host, static_cast<uint16_t>(settings.integer("port"))};
}

/// As written, not as resolved: Debian resolves a machine's own name to loopback, which is no use to others.
bool names_loopback(const std::string& host) {
  auto address = numeric_address(host, 0);
  return host == "localhost" || (address && address->is_loopback());
}

/// No master to route to: the first interface that leads somewhere, else loopback.
std::string any_address() {
  auto chosen = choose_interface("^docker,virbr,veth", interfaces(), false, "");
  return chosen ? chosen->host() : "127.0.0.1";
}

/// `serving`: the server that this rank is to run, if any.
Result<std::shared_ptr<KeyValue>> open_server_space(const HostPort& place, const Secret& secret,
                                                    std::optional<KvServerOptions> serving) {
  std::shared_ptr<KvServer> server;
  if (serving) {
    PACELINE_ASSIGN(server, shared_server(*serving));
  }
  PACELINE_ASSIGN(auto space, TcpKeyValue::open(place.host, place.port, secret.bytes, server));
  return std::shared_ptr<KeyValue>(std::move(space));
}

}  // namespace

std::optional<std::string> process_environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value ? std::optional<std::string>(value) : std::nullopt;
}

Result<std::shared_ptr<KeyValue>> launcher_space(const Identity& identity) {
  if (identity.launcher == Launcher::kHydra) return hydra_space();
  bool pmix = process_environment("PMIX_NAMESPACE").has_value();
  if (identity.launcher == Launcher::kOpenMpi || (identity.launcher == Launcher::kSlurm && pmix)) {
    return pmix_space();
  }
  return Status(Code::kUnavailable,
                fmt::format("{} offers no key-value space", launcher_name(identity.launcher)));
}

Result<std::string> own_address(const Settings& settings, const Identity& identity) {
  std::optional<HostAddress> master;
  if (!identity.master_host.empty()) {
    PACELINE_ASSIGN(auto addresses, resolve(identity.master_host, 0));
    master = addresses.front();
  }
  if (const auto& pattern = settings.text("interface"); !pattern.empty()) {
    bool v6 = master && master->family() == AF_INET6;
    PACELINE_ASSIGN(auto chosen,
                    choose_interface(pattern, interfaces(), v6, settings.source("interface")));
    return chosen.host();
  }
  bool all_here = identity.launcher != Launcher::kNone && identity.local_size == identity.size;
  if (!master) return all_here ? "127.0.0.1" : any_address();
  PACELINE_ASSIGN(auto source, route_source(*master));
  if (source.is_loopback() && !all_here && !names_loopback(identity.master_host))
    return any_address();
  return source.host();
}

Result<Rendezvous> find_rendezvous(const JoinOptions& options, const Identity& identity) {
  const auto& settings = *options.settings;
  Rendezvous found;
  PACELINE_ASSIGN(found.secret, find_secret(settings, identity, process_environment));
  if (identity.size == 1) {
    found.bind_address = "127.0.0.1";
    if (!found.secret) found.secret = local_secret(identity);
    return found;
  }
  found.space = options.store;
  bool server_is_named = !settings.text("rendezvous").empty();
  if (!found.space && !server_is_named) {
    auto space = launcher_space(identity);
    bool needed = identity.launcher == Launcher::kHydra || identity.launcher == Launcher::kOpenMpi;
    if (!space && needed && identity.master_host.empty()) return space.status();
    if (space) found.space = *space;
  }
  if (found.space) {
    PACELINE_ASSIGN(found.bind_address, own_address(settings, identity));
    return found;
  }

  PACELINE_ASSIGN(auto place, server_place(settings, identity));
  PACELINE_ASSIGN(auto addresses, resolve(place.host, place.port));
  Identity towards = identity;
  towards.master_host = place.host;
  PACELINE_ASSIGN(found.bind_address, own_address(settings, towards));
  PACELINE_ASSIGN(auto own, numeric_address(found.bind_address, 0));
  if (!found.secret) {
    if (!addresses.front().is_loopback() || !own.is_loopback()) {
      return Status(
          Code::kInvalidArgument,
          fmt::format(
              "the job has no secret, and {} is reached over the network: set PACELINE_SECRET (or "
              "PACELINE_SECRET_FILE) to the same text of 16 characters or more on all ranks, or "
              "start with `paceline run`",
              place.host));
    }
    found.secret = local_secret(identity);
  }
  // Ranks of the host that has this name meet where it leads the other hosts' ranks.
  if (addresses.front().is_loopback() && !own.is_loopback() && !names_loopback(place.host)) {
    place.host = found.bind_address;
    addresses = {own};
  }
  bool elsewhere = identity.launcher == Launcher::kPaceline && server_is_named;
  std::optional<KvServerOptions> serving;
  if (identity.rank == 0 && !elsewhere) {
    serving.emplace();
    serving->address = addresses.front().host();
    serving->port = place.port;
    serving->secret = found.secret->bytes;
    if (server_is_named) {
      serving->port_setting = serving->address_setting = "PACELINE_RENDEZVOUS";
    } else if (settings.is_set("port")) {
      serving->port_setting = settings.source("port");
    }
  }
  PACELINE_ASSIGN(found.space, open_server_space(place, *found.secret, serving));
  return found;
}

}  // namespace paceline::bootstrap
