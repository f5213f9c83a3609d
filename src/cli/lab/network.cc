#include "cli/lab/network.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "cli/descriptors.h"
#include "cli/file_errors.h"
#include "cli/lab/namespaces.h"
#include "cli/lab/shaping.h"
#include "cli/lab/subprocess.h"

namespace paceline::lab {
namespace {

Status write_setting(const std::string& name, const std::string& value) {
  std::ofstream file("/proc/sys/net/" + name);
  file << value << std::flush;
  if (file) return Status::ok();
  const int why = errno;
  return {Code::kUnavailable,
          fmt::format("can't set net.{} to '{}' in the lab's namespaces: {}{}", name, value,
                      std::strerror(why),
                      why == EROFS ? fmt::format(". Run {}", kAsRoot) : std::string())};
}

std::string read_setting(const std::string& name) {
  std::ifstream file("/proc/sys/net/" + name);
  std::string value;
  std::getline(file, value);
  return value;
}

/// Before any link is up: an IPv6 stack would add its own packets to the counters.
Status quiet_stack() {
  for (const char* scope : {"all", "default"}) {
    auto name = fmt::format("ipv6/conf/{}/disable_ipv6", scope);
    if (!read_setting(name).empty()) PACELINE_RETURN_IF_ERROR(write_setting(name, "1"));
  }
  return Status::ok();
}

/// The switch is one of cables: no firewall of this machine looks at what it passes on, where the kernel would ask one.
Status pass_by_firewall() {
  for (const char* kind : {"arptables", "iptables", "ip6tables"}) {
    auto name = fmt::format("bridge/bridge-nf-call-{}", kind);
    if (!read_setting(name).empty()) PACELINE_RETURN_IF_ERROR(write_setting(name, "0"));
  }
  return Status::ok();
}

/// No memory of earlier connections: a run must not depend on the one before.
Status set_tcp() { return write_setting("ipv4/tcp_no_metrics_save", "1"); }

Status check_congestion(const std::string& wanted) {
  auto offered = " " + read_setting("ipv4/tcp_available_congestion_control") + " ";
  if (offered.find(" " + wanted + " ") != std::string::npos) return Status::ok();
  return {Code::kInvalidArgument,
          fmt::format("--congestion {}: this kernel offers{}", wanted, offered)};
}

/// What a connection really gets, asked of one.
Result<std::string> congestion_of_connections(const char* address) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0 && cli::lacks_descriptors(errno)) return cli::out_of_descriptors();
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(9);
  inet_pton(AF_INET, address, &to.sin_addr);
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0 && errno != EINPROGRESS &&
      errno != ECONNREFUSED) {
    auto why = std::strerror(errno);
    close(fd);
    return Status(Code::kInternal, fmt::format("connect {}: {}", address, why));
  }
  char name[16] = {};
  socklen_t size = sizeof name - 1;
  getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size);
  close(fd);
  return std::string(name);
}

Status index_of(const std::string& device, int& index) {
  index = static_cast<int>(if_nametoindex(device.c_str()));
  if (index == 0)
    return {Code::kInternal, fmt::format("no device {}: {}", device, std::strerror(errno))};
  return Status::ok();
}

Status drop_output(const Result<std::string>& result) { return result.status(); }

/// ip(8) and tc(8) say which command failed, and the kernel rarely why. `fix` is what it takes.
Status with_fix(const Result<std::string>& result, const std::string& fix) {
  if (result.status().code() != Code::kUnavailable) return result.status();
  return {Code::kUnavailable, fmt::format("{}. {}", result.status().message(), fix)};
}

std::string takes_modules(const char* names) {
  return fmt::format("It takes a kernel with {}, built in or loaded (modprobe)", names);
}

}  // namespace

Result<Network> Network::create(const Options& options, const Owner& owner) {
  Network network;
  PACELINE_RETURN_IF_ERROR(check_congestion(options.congestion));
  PACELINE_ASSIGN(network.ip_, find_tool("ip"));
  PACELINE_ASSIGN(network.tc_, find_tool("tc"));
  network.switch_namespace_ = owner.prefix() + "sw";
  network.switch_path_ = "/run/netns/" + network.switch_namespace_;
  for (int i = 0; i < options.nodes; ++i) {
    Node node;
    node.index = i;
    node.name = fmt::format("node{}", i);
    node.net_namespace = fmt::format("{}n{}", owner.prefix(), i);
    node.net_path = "/run/netns/" + node.net_namespace;
    node.address = fmt::format("10.77.0.{}", i + 1);
    node.port = fmt::format("port{}", i);
    node.hosts_file = fmt::format("{}/hosts{}", owner.directory(), i);
    network.nodes_.push_back(node);
  }
  PACELINE_RETURN_IF_ERROR(network.make_namespaces());
  PACELINE_RETURN_IF_ERROR(network.make_links(options));
  PACELINE_RETURN_IF_ERROR(network.shape(options));
  PACELINE_RETURN_IF_ERROR(network.set_up_inside());
  return network;
}

Status Network::make_namespaces() {
  auto batch = fmt::format("netns add {}\n", switch_namespace_);
  for (const auto& node : nodes_) batch += fmt::format("netns add {}\n", node.net_namespace);
  PACELINE_RETURN_IF_ERROR(
      with_fix(run_program({ip_, "-batch", "-"}, batch), fmt::format("Run {}", kAsRoot)));
  PACELINE_RETURN_IF_ERROR(in_namespace(switch_path_, [] {
    PACELINE_RETURN_IF_ERROR(pass_by_firewall());
    return quiet_stack();
  }));
  for (const auto& node : nodes_) {
    PACELINE_RETURN_IF_ERROR(in_namespace(node.net_path, [&] {
      PACELINE_RETURN_IF_ERROR(quiet_stack());
      return set_tcp();
    }));
  }
  return in_namespace(switch_path_, set_tcp);
}

Status Network::make_links(const Options& options) {
  // A packet must be a packet where single ones get lost: no segmentation offload then.
  const auto batch_limit = batch_bytes(options.rate_bps);
  const std::string segments = options.loss > 0 ? " gso_max_segs 1"
                               : batch_limit < kLargestBatch
                                   ? fmt::format(" gso_max_size {}", batch_limit)
                                   : "";
  // By route, for the system's own choice (a sysctl) may be forbidden inside a namespace.
  auto route = [&](const char* device, const char* source) {
    return fmt::format("route replace 10.77.0.0/16 dev {} scope link src {} congctl {}\n", device,
                       source, options.congestion);
  };
  std::string batch = "link set lo up\n";
  batch += fmt::format(
      "link add switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n"
      "addr add {}/16 dev switch noprefixroute\nlink set switch mtu {}{} up\n",
      kSwitchAddress, options.mtu, segments);
  batch += route("switch", kSwitchAddress);
  for (const auto& node : nodes_) {
    if (options.delay.count() > 0) {
      taps_.emplace_back();
      PACELINE_ASSIGN(taps_.back(), make_taps(node, switch_path_));
      batch += fmt::format("link set {} mtu {} txqueuelen 8192\n", node.port, options.mtu);
    } else {
      batch += fmt::format("link add {} mtu {} type veth peer name {} mtu {} netns {}\n", node.port,
                           options.mtu, kNic, options.mtu, node.net_namespace);
    }
    batch += fmt::format("link set {} master switch{} up\n", node.port, segments);
  }
  PACELINE_RETURN_IF_ERROR(
      with_fix(run_program({ip_, "-n", switch_namespace_, "-batch", "-"}, batch),
               takes_modules("veth and bridge")));
  for (const auto& node : nodes_) {
    auto inside =
        fmt::format(
            "link set lo up\naddr add {}/16 dev {} noprefixroute\nlink set {} mtu {}{}{} up\n",
            node.address, kNic, kNic, options.mtu, segments,
            options.delay.count() > 0 ? " txqueuelen 8192" : "") +
        route(kNic, node.address.c_str());
    PACELINE_RETURN_IF_ERROR(
        drop_output(run_program({ip_, "-n", node.net_namespace, "-batch", "-"}, inside)));
  }
  return Status::ok();
}

Status Network::shape(const Options& options) {
  std::string ports;
  const auto needs =
      takes_modules(options.per_flow_bps > 0 ? "sch_tbf, sch_htb and cls_bpf" : "sch_tbf");
  for (const auto& node : nodes_) {
    ports += port_shaping(options, node.port);
    PACELINE_RETURN_IF_ERROR(with_fix(
        run_program({tc_, "-n", node.net_namespace, "-batch", "-"}, node_shaping(options, kNic)),
        needs));
  }
  return with_fix(run_program({tc_, "-n", switch_namespace_, "-batch", "-"}, ports), needs);
}

Status Network::lose_packets(const Options& options) {
  if (options.loss == 0) return Status::ok();
  std::string ports;
  for (const auto& node : nodes_) ports += port_loss(options, node.port);
  return with_fix(run_program({tc_, "-n", switch_namespace_, "-batch", "-"}, ports),
                  takes_modules("sch_ingress (clsact) and cls_bpf"));
}

Status Network::set_up_inside() {
  std::string names = "127.0.0.1 localhost\n";
  for (const auto& node : nodes_)
    names += fmt::format("{0} {1}\n::ffff:{0} {1}\n", node.address, node.name);
  for (auto& node : nodes_) {
    std::ofstream hosts(node.hosts_file);
    hosts << names << std::flush;
    // Without their names nodes would not find each other, and nothing would say why.
    if (!hosts)
      return {Code::kResourceExhausted,
              cli::unwritable("TMPDIR: " + node.hosts_file, errno, "folder")};
    PACELINE_RETURN_IF_ERROR(in_namespace(node.net_path, [&] {
      PACELINE_ASSIGN(congestion_, congestion_of_connections(kSwitchAddress));
      return index_of(kNic, node.nic_index);
    }));
  }
  return in_namespace(switch_path_, [&] {
    for (auto& node : nodes_) PACELINE_RETURN_IF_ERROR(index_of(node.port, node.port_index));
    return Status::ok();
  });
}

}  // namespace paceline::lab
