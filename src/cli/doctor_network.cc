// doctor: interfaces, names, TCP limits, and what the lab needs.
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/settings.h"
#include "bootstrap/host_address.h"
#include "bootstrap/identity.h"
#include "cli/doctor_checks.h"
#include "cli/lab/namespaces.h"

namespace paceline::cli {
namespace {

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::set<std::string> interfaces_up() {
  std::set<std::string> names;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return names;
  for (auto* entry = list; entry; entry = entry->ifa_next) {
    bool address = entry->ifa_addr && (entry->ifa_addr->sa_family == AF_INET ||
                                       entry->ifa_addr->sa_family == AF_INET6);
    if (address && (entry->ifa_flags & IFF_UP) && !(entry->ifa_flags & IFF_LOOPBACK))
      names.insert(entry->ifa_name);
  }
  freeifaddrs(list);
  return names;
}

void check_interfaces(Findings& findings, Face face) {
  auto names = interfaces_up();
  if (names.empty()) {
    findings.push_back({"network", Verdict::kNote, "no interface besides loopback is up",
                        "several nodes need one: ip link set … up"});
    return;
  }
  std::string text;
  for (const auto& name : names) {
    auto speed = read_line("/sys/class/net/" + name + "/speed");
    auto mtu = read_line("/sys/class/net/" + name + "/mtu");
    bool known = !speed.empty() && speed[0] != '-';
    text += fmt::format("{}{} (MTU {}{})", text.empty() ? "" : ", ", name, mtu,
                        known ? ", " + speed + " Mb/s" : "");
  }
  findings.push_back({"network", Verdict::kGood, text, ""});
  // Other families' variables, and NCCL's, set it too. What is wrong with the settings is another finding.
  auto settings = Settings::load(face);
  if (!settings.is_ok() || settings->text("interface").empty()) return;
  const auto found = bootstrap::choose_interface(
      settings->text("interface"), bootstrap::interfaces(), false, settings->source("interface"));
  if (!found.is_ok())
    findings.push_back({"interface", Verdict::kFailure, found.status().message(),
                        fmt::format("set it to one of {}", text)});
}

void check_name(Findings& findings) {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  addrinfo* list = nullptr;
  int code = getaddrinfo(host, nullptr, nullptr, &list);
  if (code == 0) freeaddrinfo(list);
  findings.push_back(
      {"host name", code == 0 ? Verdict::kGood : Verdict::kNote,
       code == 0 ? host : fmt::format("{} does not resolve: {}", host, gai_strerror(code)),
       code == 0 ? "" : fmt::format("add it to /etc/hosts, or give MASTER_ADDR as an address")});
}

void check_tcp(Findings& findings) {
  std::istringstream words(read_line("/proc/sys/net/ipv4/tcp_wmem"));
  long low = 0;
  long usual = 0;
  long high = 0;
  words >> low >> usual >> high;
  bool small = high < (4L << 20);
  findings.push_back({"TCP buffers", small ? Verdict::kWarning : Verdict::kGood,
                      fmt::format("up to {} KiB a flow", high / 1024),
                      small ? "sysctl -w net.ipv4.tcp_wmem='4096 65536 16777216' "
                              "net.ipv4.tcp_rmem='4096 131072 16777216'"
                            : ""});
  findings.push_back({"congestion control", Verdict::kGood,
                      read_line("/proc/sys/net/ipv4/tcp_congestion_control"), ""});
}

bool program_exists(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream parts(path ? path : "/usr/sbin:/usr/bin:/sbin:/bin");
  for (std::string part; std::getline(parts, part, ':');)
    if (access(part.append("/").append(name).c_str(), X_OK) == 0) return true;
  return access(("/usr/sbin/" + name).c_str(), X_OK) == 0 ||
         access(("/sbin/" + name).c_str(), X_OK) == 0;
}

}  // namespace

void check_network(Findings& findings, Face face) {
  check_interfaces(findings, face);
  check_name(findings);
  check_tcp(findings);
}

void check_lab(Findings& findings) {
  // The lab's own questions, so that both say the same.
  auto privileges = lab::probe_privileges();
  std::string missing = privileges.missing;
  for (const char* tool : {"ip", "tc"}) {
    if (!lab::find_tool(tool).is_ok()) missing += (missing.empty() ? "" : ", ") + std::string(tool);
  }
  if (!missing.empty()) {
    findings.push_back(
        {"paceline lab", Verdict::kNote, "cannot shape links here: no " + missing,
         fmt::format("run {}, with iproute2 installed. {}", lab::kAsRoot, lab::kNextBest)});
    return;
  }
  findings.push_back({"paceline lab", Verdict::kGood,
                      fmt::format("can make nodes with shaped links here ({})", privileges.how),
                      ""});
}

void check_launchers(Findings& findings, Face face) {
  std::string found;
  for (const char* name : {"torchrun", "mpirun.openmpi", "mpirun.mpich", "mpirun", "srun", "ssh"})
    if (program_exists(name)) found += std::string(found.empty() ? "" : ", ") + name;
  findings.push_back(
      {"launchers", Verdict::kGood, found.empty() ? "paceline run" : "paceline run, " + found, ""});
  auto settings = Settings::load(face);
  // The ranks' own question: what they refuse would stop a job.
  auto identity =
      bootstrap::find_identity({}, {}, !settings.is_ok() || settings->flag("use_ddp_launcher"));
  if (!identity.is_ok())
    findings.push_back({"launcher", Verdict::kFailure, identity.status().message(),
                        "start the script with torchrun or paceline run"});
}

}  // namespace paceline::cli
