// How a network cuts a TCP stream into packets: what bytes on a link are predicted with.
#pragma once

#include <algorithm>
#include <cstdint>

namespace paceline {

/// Bytes of a full packet as `tc -s qdisc` counts them: Ethernet's 14, IP's, TCP's with timestamps, and the stream's.
struct Packets {
  static constexpr uint64_t kEthernet = 14;
  static constexpr uint64_t kIpv4 = 20;
  static constexpr uint64_t kIpv6 = 40;
  static constexpr uint64_t kTcp = 20;
  static constexpr uint64_t kTimestamps = 12;

  uint64_t payload = 1448;  ///< of the stream
  uint64_t headers = 66;

  /// Of an interface with this MTU, all of which but Ethernet's header lies inside of it.
  static Packets of_mtu(int mtu, bool is_ipv6 = false) {
    const uint64_t inside = (is_ipv6 ? kIpv6 : kIpv4) + kTcp + kTimestamps;
    return {std::max<uint64_t>(static_cast<uint64_t>(std::max(mtu, 0)), inside + 1) - inside,
            kEthernet + inside};
  }
  bool operator==(const Packets&) const = default;
};

}  // namespace paceline
