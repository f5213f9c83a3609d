// doctor: can the ranks meet, as src/bootstrap/rendezvous.cc has them meet?
#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "base/settings.h"
#include "bootstrap/host_address.h"
#include "bootstrap/identity.h"
#include "bootstrap/kv_server.h"
#include "bootstrap/rendezvous.h"
#include "cli/doctor_checks.h"

namespace paceline::cli {
namespace {

using bootstrap::HostPort;
using bootstrap::Identity;
using bootstrap::Launcher;

/// Torch scripts hand over the store in which torch itself meets, at MASTER_PORT.
constexpr const char* kWithoutTorch =
    "torch scripts meet in torch's own store; TensorFlow, paceline.Communicator and programs on "
    "the C ABI";

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

/// The launcher has a key-value space of its own, so that rank 0 need not listen.
bool launcher_has_space(const Identity& identity) {
  return identity.launcher == Launcher::kHydra || identity.launcher == Launcher::kOpenMpi ||
         (identity.launcher == Launcher::kSlurm && is_set("PMIX_NAMESPACE"));
}

/// True where the host has an address.
bool check_host(Findings& findings, const std::string& variable, const std::string& host) {
  const auto addresses = bootstrap::resolve(host, 0);
  if (addresses.is_ok()) return true;
  findings.push_back({"meeting point", Verdict::kFailure,
                      fmt::format("{}={}: {}", variable, host, addresses.status().message()),
                      fmt::format("set {} to a name or an address of rank 0's host that every node "
                                  "can look up",
                                  variable)});
  return false;
}

/// Where rank 0's server would listen for ranks that come to `place`.
std::string listening_address(const Settings& settings, Identity identity, const HostPort& place) {
  const auto addresses = bootstrap::resolve(place.host, place.port);
  if (!addresses.is_ok()) return "";
  identity.master_host = place.host;
  const auto own = bootstrap::own_address(settings, identity);
  // Debian resolves a machine's own name to loopback, where others would not find it.
  const bool is_a_name = !bootstrap::numeric_address(place.host, 0).is_ok();
  if (addresses->front().is_loopback() && is_a_name && place.host != "localhost" && own.is_ok())
    return *own;
  return addresses->front().host();
}

/// Listens where rank 0 would, for a moment. `who` could not meet if that failed.
void check_port(Findings& findings, const std::string& address, uint16_t port, const char* variable,
                Verdict verdict, const char* who) {
  bootstrap::KvServerOptions options;
  options.address = address;
  options.port = port;
  options.port_setting = variable;
  const auto server = bootstrap::KvServer::start(options);
  if (server.is_ok()) {
    findings.push_back({"meeting point", Verdict::kGood,
                        fmt::format("rank 0 can listen on port {} of {}", port, address), ""});
    return;
  }
  findings.push_back(
      {"meeting point", verdict,
       fmt::format("{} could not meet, for rank 0 could not listen: {}", who,
                   server.status().message()),
       fmt::format("choose by {}, on all ranks, what rank 0's host can listen on, or end what "
                   "listens there (ss -ltnp shows it)",
                   variable)});
}

void check_named_server(Findings& findings, const Settings& settings, const Identity& identity) {
  const auto& text = settings.text("rendezvous");
  const auto place = bootstrap::parse_host_port(text, "PACELINE_RENDEZVOUS");
  if (!place.is_ok()) {
    findings.push_back(
        {"meeting point", Verdict::kFailure, place.status().message(),
         "set PACELINE_RENDEZVOUS to host:port, as 10.0.0.1:6666 or [fd00::1]:6666"});
    return;
  }
  if (!check_host(findings, "PACELINE_RENDEZVOUS", place->host)) return;
  // `paceline run` is the server itself; and without a launcher this may be any rank's host.
  if (identity.launcher == Launcher::kPaceline || identity.launcher == Launcher::kNone ||
      identity.rank != 0)
    return;
  check_port(findings, listening_address(settings, identity, *place), place->port,
             "PACELINE_RENDEZVOUS", Verdict::kFailure, "the ranks");
}

void check_own_port(Findings& findings, const Settings& settings, const Identity& identity) {
  const auto port = static_cast<uint16_t>(settings.integer("port"));
  if (identity.launcher == Launcher::kNone) {
    // At which address only the ranks will know, and whether their script has a store of torch's.
    check_port(findings, "0.0.0.0", port, "PACELINE_PORT", Verdict::kWarning, kWithoutTorch);
    return;
  }
  if (identity.rank != 0 || identity.size == 1 || identity.master_host.empty()) return;
  const auto address = listening_address(settings, identity, HostPort{identity.master_host, port});
  // Who sets torch's variables, torchrun or a person, most likely starts a torch script.
  if (identity.launcher == Launcher::kTorch)
    check_port(findings, address, port, "PACELINE_PORT", Verdict::kNote, kWithoutTorch);
  else
    check_port(findings, address, port, "PACELINE_PORT", Verdict::kFailure,
               "ranks that have neither a launcher's space nor a store of torch's");
}

}  // namespace

void check_meeting_point(Findings& findings, Face face) {
  const auto settings = Settings::load(face);
  if (!settings.is_ok()) return;  // another finding
  const auto asked = bootstrap::find_identity({}, {}, settings->flag("use_ddp_launcher"));
  if (!asked.is_ok()) return;  // another finding
  bool resolves = true;
  if (const auto host = bootstrap::process_environment("MASTER_ADDR"); host && !host->empty())
    resolves = check_host(findings, "MASTER_ADDR", *host);
  if (!settings->text("rendezvous").empty())
    check_named_server(findings, *settings, *asked);
  else if (!launcher_has_space(*asked) && resolves)
    check_own_port(findings, *settings, *asked);
  const char* port = std::getenv("MASTER_PORT");
  if (port != nullptr && settings->integer("port") == std::strtol(port, nullptr, 10))
    findings.push_back({"ports", Verdict::kNote,
                        fmt::format("MASTER_PORT and Paceline's port are both {}: ranks that meet "
                                    "in torch's store do not notice, others (TensorFlow, "
                                    "paceline.Communicator) can't meet beside that store",
                                    port),
                        "set PACELINE_PORT to another port"});
}

}  // namespace paceline::cli
