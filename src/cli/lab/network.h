// The namespaces, the bridge and the links of one lab.
//
//   namespace …-n0: eth0 10.77.0.1 ── port0 ┐
//   namespace …-n1: eth0 10.77.0.2 ── port1 ┤ bridge "switch", 10.77.255.254, in namespace …-sw
//   …                                       ┘
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "cli/lab/options.h"
#include "cli/lab/owner.h"

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
  /// Makes everything; on failure what was made is removed by remove_lab(owner).
  static Result<Network> create(const Options& options, const Owner& owner);

  [[nodiscard]] const std::vector<Node>& nodes() const { return nodes_; }
  [[nodiscard]] const std::string& switch_path() const { return switch_path_; }
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
};

}  // namespace paceline::lab
