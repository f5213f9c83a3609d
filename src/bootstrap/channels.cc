#include "bootstrap/channels.h"

#include <fmt/format.h>

#include "base/log.h"
#include "bootstrap/early_channel.h"
#include "bootstrap/identity.h"
#include "wire/address.h"
#include "wire/router.h"

namespace paceline::bootstrap {
namespace {

Result<std::unique_ptr<wire::shm::ShmChannel>> open_shared_memory(const Settings& settings,
                                                                  const wire::TcpOptions& tcp) {
  wire::shm::ShmOptions options;
  options.rank = tcp.rank;
  options.size = tcp.size;
  options.secret = {reinterpret_cast<const char*>(tcp.secret.data()), tcp.secret.size()};
  options.version = tcp.build + " " + tcp.job_id;
  const auto& pull = settings.text("shm_pull");
  options.use_vm_read = pull == "auto" || pull == "process_vm_readv";
  options.use_arena = pull == "auto" || pull == "mapped";
  return wire::shm::ShmChannel::create(std::move(options));
}

/// Which kernel and network namespace a rank runs in, whatever PACELINE_NODE_ID says: sockets of the node's ranks
/// can't be reached from another.
std::string neighbourhood() { return node_identity(); }

bool shares_memory(const Member& a, const Member& b) {
  auto here = wire::address_field(a.address, "ns");
  return a.node == b.node && here && here == wire::address_field(b.address, "ns") &&
         wire::address_field(a.address, "shm") && wire::address_field(b.address, "shm");
}

}  // namespace

Result<Channels> Channels::open(const Settings& settings, const wire::TcpOptions& tcp) {
  Channels channels;
  channels.wanted_ = settings.text("wire");
  PACELINE_ASSIGN(channels.tcp_, wire::TcpChannel::listen(tcp));
  if (channels.wanted_ == "tcp" || tcp.size == 1) return channels;
  auto shm = open_shared_memory(settings, tcp);
  if (shm) {
    channels.shm_ = std::move(shm).value();
  } else if (channels.wanted_ == "shm") {
    return Status(shm.status().code(),
                  fmt::format("PACELINE_WIRE=shm, but: {}", shm.status().message()));
  } else if (log::first("no shared memory")) {
    log::warning("the ranks of this node talk over TCP: {}", shm.status().message());
  }
  return channels;
}

std::string Channels::address() const {
  auto text = tcp_->address();
  if (!shm_) return text;
  return wire::join_addresses(text, fmt::format("shm={};ns={}", shm_->address(), neighbourhood()));
}

std::shared_ptr<wire::shm::ShmAllocator> Channels::allocator() const {
  return shm_ ? shm_->allocator() : nullptr;
}

Result<std::unique_ptr<wire::Channel>> Channels::route(const Topology& topology,
                                                       wire::Events early) && {
  wire::RouterOptions options;
  options.rank = topology.rank;
  options.size = topology.size();
  for (const auto& member : topology.members) {
    if (member.rank == topology.rank) continue;
    if (shm_ && shares_memory(topology.self(), member)) {
      shm_->set_peer(member.rank, *wire::address_field(member.address, "shm"), member.host);
      options.near_ranks.push_back(member.rank);
    } else if (wanted_ == "shm") {
      return Status(
          Code::kInvalidArgument,
          fmt::format(
              "PACELINE_WIRE=shm, but {} shares no memory with {}: shm works within one node",
              topology.name(member.rank), topology.name(topology.rank)));
    }
  }
  if (!options.near_ranks.empty()) options.near = std::move(shm_);
  options.far = std::move(tcp_);
  if (!early.empty()) {
    options.far = std::make_unique<EarlyChannel>(std::move(options.far), std::move(early));
  }
  return std::unique_ptr<wire::Channel>(std::make_unique<wire::Router>(std::move(options)));
}

}  // namespace paceline::bootstrap
