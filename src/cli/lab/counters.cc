#include "cli/lab/counters.h"

#include <fmt/format.h>
#include <linux/gen_stats.h>
#include <linux/pkt_sched.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>

#include "cli/lab/namespaces.h"

namespace paceline::lab {

/// A route socket that lives in one network namespace.
struct Counters::Socket {
  int fd = -1;
  ~Socket() {
    if (fd >= 0) close(fd);
  }
};

namespace {

/// Calls `visit(attribute)` for each attribute in [at, at + length).
template <class Visit>
void each_attribute(const rtattr* at, int length, Visit visit) {
  for (; RTA_OK(at, length); at = RTA_NEXT(at, length)) visit(*at);
}

template <class T>
bool read_struct(const rtattr& a, T& into) {
  std::memset(&into, 0, sizeof into);
  auto have = static_cast<std::size_t>(RTA_PAYLOAD(&a));
  std::memcpy(&into, RTA_DATA(&a), have < sizeof into ? have : sizeof into);
  return have > 0;
}

Traffic parse_stats(const rtattr& stats) {
  Traffic traffic;
  each_attribute(static_cast<const rtattr*>(RTA_DATA(&stats)),
                 static_cast<int>(RTA_PAYLOAD(&stats)), [&](const rtattr& a) {
                   if (a.rta_type == TCA_STATS_BASIC) {
                     gnet_stats_basic basic;
                     read_struct(a, basic);
                     traffic.bytes = basic.bytes;
                     traffic.packets = basic.packets;
                   } else if (a.rta_type == TCA_STATS_QUEUE) {
                     gnet_stats_queue queue;
                     read_struct(a, queue);
                     traffic.drops = queue.drops;
                   }
                 });
  return traffic;
}

/// The root qdisc's figures, by interface.
Result<std::map<int, Traffic>> dump_roots(int fd) {
  struct {
    nlmsghdr header;
    tcmsg body;
  } request{};
  request.header.nlmsg_len = sizeof request;
  request.header.nlmsg_type = RTM_GETQDISC;
  request.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  if (send(fd, &request, sizeof request, 0) < 0) {
    return Status(Code::kInternal, fmt::format("netlink send: {}", std::strerror(errno)));
  }
  std::map<int, Traffic> roots;
  alignas(nlmsghdr) char buffer[65536];
  for (;;) {
    auto got = recv(fd, buffer, sizeof buffer, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      return Status(Code::kInternal, fmt::format("netlink receive: {}", std::strerror(errno)));
    int left = static_cast<int>(got);
    for (auto* m = reinterpret_cast<nlmsghdr*>(buffer); NLMSG_OK(m, static_cast<unsigned>(left));
         m = NLMSG_NEXT(m, left)) {
      if (m->nlmsg_type == NLMSG_DONE) return roots;
      if (m->nlmsg_type == NLMSG_ERROR)
        return Status(Code::kInternal, "netlink refused to list the qdiscs");
      if (m->nlmsg_type != RTM_NEWQDISC) continue;
      const auto* body = static_cast<const tcmsg*>(NLMSG_DATA(m));
      if (body->tcm_parent != TC_H_ROOT) continue;
      each_attribute(TCA_RTA(body), static_cast<int>(m->nlmsg_len - NLMSG_LENGTH(sizeof(tcmsg))),
                     [&](const rtattr& a) {
                       if (a.rta_type == TCA_STATS2) roots[body->tcm_ifindex] = parse_stats(a);
                     });
    }
  }
}

}  // namespace

Counters::~Counters() = default;

Result<Counters> Counters::open(const Network& network) {
  Counters counters;
  auto open_in = [](const std::string& path, std::unique_ptr<Socket>& into) {
    into = std::make_unique<Socket>();
    return in_namespace(path, [&] {
      into->fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
      if (into->fd < 0)
        return Status(Code::kInternal, fmt::format("netlink: {}", std::strerror(errno)));
      return Status::ok();
    });
  };
  PACELINE_RETURN_IF_ERROR(open_in(network.switch_path(), counters.switch_socket_));
  for (const auto& node : network.nodes()) {
    counters.node_sockets_.emplace_back();
    PACELINE_RETURN_IF_ERROR(open_in(node.net_path, counters.node_sockets_.back()));
    counters.nic_index_.push_back(node.nic_index);
    counters.port_index_.push_back(node.port_index);
  }
  return counters;
}

Result<std::vector<LinkTraffic>> Counters::read() {
  PACELINE_ASSIGN(auto ports, dump_roots(switch_socket_->fd));
  std::vector<LinkTraffic> links(node_sockets_.size());
  for (std::size_t i = 0; i < links.size(); ++i) {
    PACELINE_ASSIGN(auto nics, dump_roots(node_sockets_[i]->fd));
    links[i] = {nics[nic_index_[i]], ports[port_index_[i]]};
  }
  return links;
}

std::string traffic_json(const std::vector<LinkTraffic>& links) {
  auto now =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  auto text = fmt::format("{{\"time_s\": {:.6f}, \"nodes\": [", now);
  for (std::size_t i = 0; i < links.size(); ++i) {
    const auto& l = links[i];
    text += fmt::format(
        "{}{{\"up_bytes\": {}, \"up_packets\": {}, \"up_drops\": {}, \"down_bytes\": {}, "
        "\"down_packets\": {}, \"down_drops\": {}}}",
        i == 0 ? "" : ", ", l.up.bytes, l.up.packets, l.up.drops, l.down.bytes, l.down.packets,
        l.down.drops);
  }
  return text + "]}\n";
}

}  // namespace paceline::lab
