// Measures each link of a lab before anything else is measured on it: what TCP carries steadily in
// either direction, and how far a transfer runs ahead of the line after 50 ms of silence (the token
// bucket's gift).
#pragma once

#include <functional>
#include <vector>

#include "base/status.h"
#include "cli/lab/network.h"
#include "cli/lab/options.h"

namespace paceline::lab {

struct DirectionCalibration {
  double payload_bps = 0;  ///< TCP payload, median of windows, of `flows` together
  /// What these may carry: the line, which they are to fill, or less where kMostFlows capped ones can't.
  double may_carry_bps = 0;
  double one_flow_bps = 0;  ///< the same with one flow; measured only where flows are capped
  double ahead_bytes = 0;   ///< after 50 ms idle: most bytes (headers included) ahead of the line
  int flows = 1;
};

struct LinkCalibration {
  DirectionCalibration up, down;
};

/// What TCP can carry at best: 95 % of the line (headers, preamble, gap, at MTU 1500).
inline constexpr double kTcpShare = 0.95;
/// Below this share of that, the machine, not the link, sets the pace.
inline constexpr double kHolds = 0.93;

struct CalibrationHooks {
  /// Links that are done, and per cent of all the work; only sometimes something new.
  std::function<void(int done, int of, int percent)> progress;
  std::function<bool()> cancelled;
};

/// A link of many capped flows is measured by so many: each takes two threads and two descriptors.
inline constexpr int kMostFlows = 64;
/// Of all links that are measured at once.
inline constexpr int kFlowsAtOnce = 256;
/// How many flows it takes to fill a link whose flows are capped; kMostFlows at most.
int flows_that_fill(const Options& options);

/// What TCP carries at least where the line, not the machine, sets the pace: bits a second of payload.
double least_payload(const Options& options);
/// The same where what is sent may carry `line_bps` only.
double least_payload(const Options& options, double line_bps);

/// Whether the relay carries the links' rate, where there is a --delay: a relay that can't keep up would measure itself,
/// not the link. Measured with a short delay and before packets get lost, for over long delays and with losses TCP carries
/// less whatever the relay does; with --loss in single packets, as they come then. Refuses with kUnavailable. Below a
/// second for links at once that calibrate() measures at once, 5 below 20 Mb/s.
Status check_relay(Network& network, const Options& options, const CalibrationHooks& hooks);

/// About a second per link, 20 below 20 Mb/s; slow links in parallel, fast ones one after the other.
Result<std::vector<LinkCalibration>> calibrate(const Network& network, const Options& options,
                                               const CalibrationHooks& hooks);

}  // namespace paceline::lab
