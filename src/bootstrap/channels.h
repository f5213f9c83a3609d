// The channels of a rank: TCP to everyone, shared memory to the ranks of its node, and the router over both.
#pragma once

#include <memory>
#include <string>

#include "base/settings.h"
#include "bootstrap/topology.h"
#include "wire/shm/shm_channel.h"
#include "wire/tcp/tcp_channel.h"

namespace paceline::bootstrap {

class Channels {
 public:
  /// Listens. Shared memory that can't be had is no failure unless the setting `wire` asks for it alone.
  static Result<Channels> open(const Settings& settings, const wire::TcpOptions& tcp);

  /// What others need to reach this rank: Member::address.
  [[nodiscard]] std::string address() const;
  /// The only one in use until the members are known.
  [[nodiscard]] wire::TcpChannel& tcp() { return *tcp_; }
  [[nodiscard]] std::shared_ptr<wire::shm::ShmAllocator> allocator() const;
  /// One channel to all. `early` is what TCP brought before its owner listened. Both ends of every pair choose
  /// alike, from the same table.
  Result<std::unique_ptr<wire::Channel>> route(const Topology& topology, wire::Events early) &&;

 private:
  std::string wanted_;  ///< the setting `wire`
  std::unique_ptr<wire::TcpChannel> tcp_;
  std::unique_ptr<wire::shm::ShmChannel> shm_;
};

}  // namespace paceline::bootstrap
