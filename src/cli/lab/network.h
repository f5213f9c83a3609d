// The namespaces, the bridge and the links of one lab.
//
//   namespace …-n0: eth0 10.77.0.1 ── port0 ┐
//   namespace …-n1: eth0 10.77.0.2 ── port1 ┤ bridge "switch", 10.77.255.254, in namespace …-sw
//   …                                       ┘
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/lab/options.h"
#include "cli/lab/owner.h"
#include "cli/lab/relay.h"

namespace paceline::lab {

inline constexpr const char* kNic = "eth0";
inline constexpr const char* kSwitchAddress = "10.77.255.254";

/// Where a node is; all names are fixed before anything is made.
struct Node {
  int index = 0;
  std::string name;           ///< host name: "node0"
  std::string net_namespace;  ///< name for ip(8)
  std::string net_path;       ///< file that holds it
  std::string address;        ///< 10.77.0.1
  std::string port;           ///< the switch's end of the link
  std::string hosts_file;     ///< becomes /etc/hosts inside
  int nic_index = 0;          ///< interface index of eth0 inside the node
  int port_index = 0;         ///< of the port inside the switch
};

class Network {
 public:
  /// Makes everything (the owner's folder is there); on failure what was made is removed by remove_lab(owner).
  static Result<Network> create(const Options& options, const Owner& owner);

  [[nodiscard]] const std::vector<Node>& nodes() const { return nodes_; }
  [[nodiscard]] const std::string& switch_path() const { return switch_path_; }
  /// Starts carrying frames where there is a delay; call when no process is forked any more that should not
  /// hold the links.
  Status start_relay(const Options& options) {
    if (taps_.empty()) return Status::ok();
    PACELINE_ASSIGN(relay_, Relay::start(std::move(taps_), options.delay));
    return Status::ok();
  }
  /// From now on, where they are to get lost.
  Status lose_packets(const Options& options);
  /// Of frames that come from now on; where there is a relay.
  void change_delay(std::chrono::nanoseconds delay) {
    if (relay_) relay_->change_delay(delay);
  }
  /// The congestion control that the nodes really use.
  [[nodiscard]] const std::string& congestion() const { return congestion_; }

 private:
  Status make_namespaces();
  Status make_links(const Options& options);
  Status set_up_inside();
  Status shape(const Options& options);

  std::string ip_, tc_;
  std::string switch_namespace_, switch_path_, congestion_;
  std::vector<Node> nodes_;
  std::vector<TapPair> taps_;
  std::unique_ptr<Relay> relay_;
};

}  // namespace paceline::lab
