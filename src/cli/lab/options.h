// What `paceline lab` was asked for: flags, units, profiles.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace CLI {
class App;
}

namespace paceline::lab {

/// A named link of a public cloud, as its provider documents it.
struct Profile {
  std::string_view name;
  double rate_bps;      ///< what the machine may send, all flows together
  double per_flow_bps;  ///< what one five-tuple may carry; 0: no documented cap
  int mtu;              ///< inside the provider's own network, by default
  std::string_view text;
};
std::span<const Profile> profiles();
/// A table for people: every profile and what it stands for.
std::string profiles_table();

struct Options {
  int nodes = 2;
  int slots = 1;
  double rate_bps = 1e9;
  double per_flow_bps = 0;            ///< 0: no cap
  double loss = 0;                    ///< share of packets lost on each path, 0 to 1
  std::chrono::nanoseconds delay{0};  ///< added one way between any two nodes
  int mtu = 1500;
  std::string congestion = "cubic";
  std::string profile;
  double scale = 1;  ///< multiplies the profile's rates
  std::string json;  ///< file for the report; empty: none
  bool keep = false;
  bool calibrate = true;
  bool loopback = false;  ///< no namespaces, no shaping
  bool quiet = false;
  std::chrono::milliseconds grace{5000};  ///< from the first failure to SIGTERM for the others
  std::vector<std::string> command;

  [[nodiscard]] int ranks() const { return nodes * slots; }
};

/// The command line's flags. Must outlive the parser that they were declared to.
class Flags {
 public:
  /// Adds them to a CLI11 parser (of the subcommand, or one of its own).
  void declare(CLI::App& app);
  /// After parsing: every wrong or contradictory value is a kInvalidArgument that names the flag.
  Result<Options> resolve(const std::vector<std::string>& command);
  [[nodiscard]] bool lists_profiles() const { return list_profiles_; }
  [[nodiscard]] bool removes_kept() const { return remove_kept_; }

 private:
  Status apply_profile();
  Status check() const;
  Status check_loopback() const;
  Options options_;
  CLI::App* app_ = nullptr;
  std::string rate_, per_flow_, loss_, delay_, grace_;
  bool list_profiles_ = false, remove_kept_ = false, no_calibration_ = false;
};

}  // namespace paceline::lab
