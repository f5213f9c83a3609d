// What went over each link, read from the qdiscs that shape it (over netlink): the bytes of
// Ethernet frames at the link's MTU, GSO batches counted as the frames that they become,
// acknowledgements included.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/lab/network.h"

namespace paceline::lab {

struct Traffic {
  uint64_t bytes = 0;
  uint64_t packets = 0;
  uint64_t drops = 0;
};

struct LinkTraffic {
  Traffic up;    ///< from the node
  Traffic down;  ///< to the node
};

class Counters {
 public:
  static Result<Counters> open(const Network& network);
  ~Counters();
  Counters(Counters&& other) noexcept = default;
  Counters& operator=(Counters&& other) noexcept = default;

  /// One entry per node. Not thread-safe.
  Result<std::vector<LinkTraffic>> read();

 private:
  Counters() = default;
  struct Socket;
  std::vector<std::unique_ptr<Socket>> node_sockets_;
  std::unique_ptr<Socket> switch_socket_;
  std::vector<int> nic_index_, port_index_;
};

/// {"time_s": …, "nodes": [{"up_bytes": …, "up_packets": …, "up_drops": …, "down_bytes": …, …}, …]}
std::string traffic_json(const std::vector<LinkTraffic>& links);

}  // namespace paceline::lab
