#include "cli/lab/lab.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "cli/descriptors.h"
#include "cli/lab/byte_server.h"
#include "cli/lab/calibrate.h"
#include "cli/lab/counters.h"
#include "cli/lab/namespaces.h"
#include "cli/lab/network.h"
#include "cli/lab/options.h"
#include "cli/lab/owner.h"
#include "cli/lab/ranks.h"
#include "cli/lab/report.h"
#include "cli/lab/round_trip.h"
#include "cli/lab/signals.h"
#include "cli/standard_output.h"
#include "cli/text/units.h"

namespace paceline::lab {
namespace {

constexpr int kUsage = 2;
constexpr int kNotMade = 3;

std::string sentence(const Status& status) { return fmt::format("lab: {}\n", status.message()); }

int code_of(const Status& status) {
  return status.code() == Code::kInvalidArgument ? kUsage : kNotMade;
}

int fail(const Signals& signals, const Status& status) {
  tell(signals, sentence(status));
  return code_of(status);
}

/// Where signals end the program as usual.
int fail_early(const Status& status) {
  std::fputs(sentence(status).c_str(), stderr);
  return code_of(status);
}

std::string random_hex(std::size_t bytes) {
  std::vector<unsigned char> raw(bytes);
  for (std::size_t at = 0; at < bytes;) {
    auto n = getrandom(raw.data() + at, bytes - at, 0);
    if (n > 0) at += static_cast<std::size_t>(n);
  }
  std::string text;
  for (auto b : raw) text += fmt::format("{:02x}", b);
  return text;
}

int free_port() {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof a;
  int port = 0;
  if (bind(fd, reinterpret_cast<sockaddr*>(&a), size) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&a), &size) == 0) {
    port = ntohs(a.sin_port);
  }
  close(fd);
  return port;
}

/// What every lab has, with links or without.
struct Setting {
  const Options& options;
  const Signals& signals;
  ReportFile& report;
  rlimit descriptors;  ///< how many the lab's caller may have
};

/// What every rank is told; `master` and `interface` say how ranks reach each other.
struct Identity {
  std::string master, port, interface, name, bytes_socket;
  std::string rendezvous_port;  ///< empty: the usual one
  double delay = 0;             ///< seconds from node to node, as measured; 0: none was added
};

/// So many at most: of the lab itself, of its links, of the calibration's flows, and of ranks. A link's are sockets that
/// count, TAP devices, and what is open for a moment only.
rlim_t descriptors_of(const Options& o) {
  constexpr rlim_t kOwn = 256, kLink = 8, kFlow = 3, kRank = 4;
  return kOwn + kFlow * kFlowsAtOnce + kLink * static_cast<rlim_t>(o.nodes) +
         kRank * static_cast<rlim_t>(o.ranks());
}

std::vector<RankSpec> make_specs(const Setting& lab, const Identity& id,
                                 const std::vector<NodeHolder>& holders) {
  const auto& o = lab.options;
  auto secret = random_hex(32);
  // A rank's share of the cores, less one for what carries its gradients.
  const auto share = std::thread::hardware_concurrency() / static_cast<unsigned>(o.ranks());
  const auto threads = share > 1 ? share - 1 : 1;
  std::vector<RankSpec> specs;
  for (int rank = 0; rank < o.ranks(); ++rank) {
    RankSpec spec;
    spec.rank = rank;
    spec.node = rank / o.slots;
    spec.descriptors = lab.descriptors;
    if (!holders.empty()) spec.holder = holders[static_cast<std::size_t>(spec.node)].pid();
    auto local = std::to_string(rank % o.slots);
    auto& e = spec.environment;
    e["RANK"] = std::to_string(rank);
    e["WORLD_SIZE"] = std::to_string(o.ranks());
    e["LOCAL_RANK"] = local;
    e["LOCAL_WORLD_SIZE"] = std::to_string(o.slots);
    e["NODE_RANK"] = e["GROUP_RANK"] = std::to_string(spec.node);
    e["MASTER_ADDR"] = id.master;
    e["MASTER_PORT"] = id.port;
    e["GLOO_SOCKET_IFNAME"] = e["NCCL_SOCKET_IFNAME"] = e["PACELINE_INTERFACE"] = id.interface;
    e["PACELINE_SECRET"] = secret;
    e["PACELINE_JOB_ID"] = e["PACELINE_LAB_NAME"] = id.name;
    e["PACELINE_LAB_NODES"] = std::to_string(o.nodes);
    e["PACELINE_LAB_SLOTS"] = std::to_string(o.slots);
    if (!id.bytes_socket.empty()) {
      e["PACELINE_LAB_BYTES"] = id.bytes_socket;
      e["PACELINE_LAB_RATE"] = fmt::format("{:.0f}", o.rate_bps);
      if (id.delay > 0) e["PACELINE_LAB_DELAY"] = fmt::format("{:.9f}", id.delay);
      e["NCCL_HOSTID"] = fmt::format("{}node{}", id.name, spec.node);
    }
    if (!id.rendezvous_port.empty()) e["PACELINE_PORT"] = id.rendezvous_port;
    if (std::getenv("OMP_NUM_THREADS") == nullptr) e["OMP_NUM_THREADS"] = std::to_string(threads);
    if (std::getenv("PYTHONUNBUFFERED") == nullptr) e["PYTHONUNBUFFERED"] = "1";
    specs.push_back(std::move(spec));
  }
  return specs;
}

std::vector<LinkTraffic> difference(const std::vector<LinkTraffic>& after,
                                    const std::vector<LinkTraffic>& before) {
  auto minus = [](const Traffic& a, const Traffic& b) {
    return Traffic{a.bytes - b.bytes, a.packets - b.packets, a.drops - b.drops};
  };
  std::vector<LinkTraffic> used;
  for (std::size_t i = 0; i < after.size(); ++i) {
    used.push_back({minus(after[i].up, before[i].up), minus(after[i].down, before[i].down)});
  }
  return used;
}

int finish(const Setting& lab, const Report& report) {
  auto written = lab.report.write(report);
  if (!written.is_ok()) {
    fail(lab.signals, written);
    if (report.run.exit_code == 0) return kNotMade;
  }
  return report.run.exit_code;
}

void clean_up_after_others(const Options& o, const Signals& signals) {
  const int removed = remove_stale(false).labs;
  if (removed == 0 || o.quiet) return;
  tell(signals, fmt::format("lab: removed what {} dead lab{} left behind\n", removed,
                            removed == 1 ? "" : "s"));
}

int run_on_loopback(const Setting& lab) {
  const auto& o = lab.options;
  const auto& signals = lab.signals;
  if (!o.quiet) {
    tell(signals,
         fmt::format("lab: {} plain processes on loopback: no nodes, no link speeds, no byte "
                     "counts; figures say "
                     "nothing about a network\n",
                     o.ranks()));
  }
  clean_up_after_others(o, signals);
  auto owner = Owner::self(false);
  auto janitor = Janitor::start(owner);
  if (!janitor.is_ok()) return fail(signals, janitor.status());
  Identity id{"127.0.0.1", std::to_string(free_port()), "lo", owner.lab_name(),
              "",          std::to_string(free_port())};
  auto run = run_ranks(make_specs(lab, id, {}), o.command,
                       {.grace = o.grace, .signals = signals.fd(), .janitor = janitor->listener()});
  remove_lab(owner);
  janitor->dismiss(false);
  if (!run.is_ok()) return fail(signals, run.status());
  return finish(lab, Report{o, "", {}, {}, {}, run.value(), run->seconds});
}

/// What is known of the links before anything runs on them.
struct Measured {
  std::vector<double> delays;  ///< seconds, by link; empty without --delay
  std::vector<LinkCalibration> calibration;
};

Result<Measured> measure_and_tell(const Options& o, Network& network, const Signals& signals) {
  auto hooks = [&](const char* what) {
    CalibrationHooks made;
    made.cancelled = [&signals] { return signals.pending(); };
    made.progress = [&o, &signals, what, before = std::pair(-1, -1)](int done, int of,
                                                                     int percent) mutable {
      if (o.quiet || isatty(STDERR_FILENO) == 0) return;
      if (const std::pair now(done, percent); std::exchange(before, now) == now) return;
      tell(signals, fmt::format("\rlab: {} {} of {} links ({} %){}", what, done, of, percent,
                                done == of ? "\r\033[K" : ""));
    };
    return made;
  };
  Measured links;
  PACELINE_RETURN_IF_ERROR(check_relay(network, o, hooks("checked the relay's rate on")));
  if (signals.pending()) return links;
  PACELINE_RETURN_IF_ERROR(with_next_best(network.lose_packets(o)));
  PACELINE_ASSIGN(links.delays, check_delay(network, o, hooks("checked the delay of")));
  if (signals.pending()) return links;
  if (!o.quiet && o.delay.count() > 0) tell(signals, delay_line(o, links.delays));
  if (!o.calibrate) {
    if (!o.quiet) tell(signals, "lab: links are not calibrated (--no-calibration)\n");
    return links;
  }
  PACELINE_ASSIGN(links.calibration, calibrate(network, o, hooks("calibrated")));
  if (signals.pending()) return links;
  if (!o.quiet) tell(signals, calibration_table(o, links.calibration));
  return links;
}

/// Everything between the making of the network and its end.
int run_in_network(const Setting& lab, const Owner& owner, const Janitor& janitor) {
  const auto& o = lab.options;
  const auto& signals = lab.signals;
  auto network = Network::create(o, owner);
  if (!network.is_ok()) return fail(signals, with_next_best(network.status()));
  if (!o.quiet) tell(signals, fmt::format("lab: {}\n", describe(o, network->congestion())));
  std::vector<NodeHolder> holders;
  for (const auto& node : network->nodes()) {
    auto holder = NodeHolder::start(node);
    if (!holder.is_ok()) return fail(signals, with_next_best(holder.status()));
    holders.push_back(std::move(holder).value());
  }
  auto relayed = network->start_relay(o);
  if (!relayed.is_ok()) return fail(signals, relayed);
  auto counters = Counters::open(*network);
  if (!counters.is_ok()) return fail(signals, counters.status());
  auto measured = measure_and_tell(o, *network, signals);
  if (signals.pending()) return signals.exit_code();
  if (!measured.is_ok()) return fail(signals, measured.status());

  Identity id{network->nodes()[0].address,  "29500", kNic, owner.lab_name(),
              owner.directory() + "/bytes", ""};
  if (const auto& delays = measured->delays; !delays.empty())
    id.delay = *std::max_element(delays.begin(), delays.end());
  auto server = ByteServer::start(*counters, id.bytes_socket);
  if (!server.is_ok()) return fail(signals, server.status());
  auto before = (*server)->read();
  if (!before.is_ok()) return fail(signals, before.status());
  auto run = run_ranks(make_specs(lab, id, holders), o.command,
                       {.grace = o.grace, .signals = signals.fd(), .janitor = janitor.listener()});
  if (!run.is_ok()) return fail(signals, with_next_best(run.status()));
  auto after = (*server)->read();
  if (!after.is_ok()) return fail(signals, after.status());
  auto used = difference(after.value(), before.value());
  if (!o.quiet) tell(signals, traffic_table(used, run->seconds));
  return finish(lab, Report{o, network->congestion(), measured->delays, measured->calibration, used,
                            run.value(), run->seconds});
}

int run(const Options& o) {
  Signals signals;
  ReportFile report;
  auto writable = report.open(o.json);
  if (!writable.is_ok()) return fail(signals, writable);
  const Setting lab{o, signals, report, cli::make_room_for_descriptors(descriptors_of(o))};
  if (o.loopback) return run_on_loopback(lab);
  auto privileges = acquire_privileges();
  if (!privileges.is_ok()) return fail(signals, privileges.status());
  if (o.keep && *privileges != kRoot) {
    return fail(signals,
                {Code::kUnavailable,
                 "--keep needs root: without it the lab's namespaces are known inside a user "
                 "namespace only, which ends with the lab. Run it as root (sudo), or let the "
                 "command itself wait (… -- sleep 1000) and enter a rank: nsenter -t PID -U "
                 "--preserve-credentials -n -m"});
  }
  clean_up_after_others(o, signals);
  auto owner = Owner::self(o.keep);
  // ip(8) and tc(8), too, are known by it: a killed lab's must not go on making what is being removed.
  setenv("PACELINE_LAB_NAME", owner.lab_name().c_str(), 1);
  auto folder = Folder::make(owner);
  if (!folder.is_ok()) return fail(signals, folder.status());
  auto janitor = Janitor::start(owner);
  if (!janitor.is_ok()) return fail(signals, janitor.status());
  int code = run_in_network(lab, owner, *janitor);
  if (o.keep) {
    tell(signals,
         fmt::format("lab: kept namespaces {}*; `ip netns exec {}n0 …` enters one, `paceline lab "
                     "--remove-kept` ends "
                     "them\n",
                     owner.prefix(), owner.prefix()));
  } else {
    remove_lab(owner);
  }
  janitor->dismiss(o.keep);
  return code;
}

int remove_kept() {
  const auto removed = remove_stale(true);
  auto text = fmt::format("lab: removed {}\n", removed.labs);
  for (const auto& [prefix, error] : removed.left) {
    text += fmt::format("lab: can't remove {}*: {}. {}\n", prefix, std::strerror(error),
                        geteuid() != 0 ? "It needs root: sudo paceline lab --remove-kept"
                                       : "`ip netns` lists what is left");
  }
  std::fputs(text.c_str(), stderr);
  return removed.left.empty() ? 0 : kNotMade;
}

}  // namespace

int lab_main(Flags& flags, const std::vector<std::string>& command) {
  if (flags.lists_profiles()) {
    return cli::show_or_fail(profiles_table(), 0, "lab");
  }
  if (flags.removes_kept()) return remove_kept();
  auto options = flags.resolve(command);
  if (!options.is_ok()) return fail_early(options.status());
  return run(options.value());
}

int lab_bytes_main() {
  const char* path = std::getenv("PACELINE_LAB_BYTES");
  if (path == nullptr) {
    return fail_early(
        {Code::kUnavailable,
         "lab-bytes works inside `paceline lab` only (PACELINE_LAB_BYTES is not set)"});
  }
  auto text = ask_bytes(path);
  if (!text.is_ok()) return fail_early(text.status());
  const auto answer = nlohmann::json::parse(*text, nullptr, false);
  if (!answer.is_object() || !answer.contains("nodes")) {
    const auto why = answer.is_object() ? answer.value("error", std::string()) : std::string();
    return fail_early({Code::kUnavailable, fmt::format("the lab at {} has no figures: {}", path,
                                                       why.empty() ? "it is ending" : why)});
  }
  return cli::show_or_fail(*text, 0, "lab-bytes");
}

}  // namespace paceline::lab
