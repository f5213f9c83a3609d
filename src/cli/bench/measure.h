// The measuring loop: two sides in turns.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "cli/bench/bench.h"
#include "cli/bench/peer.h"
#include "cli/bench/workload.h"

namespace paceline::bench {

/// One side's figures of one row. Times are the slowest rank's, in seconds, one an operation.
struct Figures {
  std::vector<double> seconds;
  std::optional<uint64_t> link_bytes;  ///< busiest link's busier direction, per operation
  [[nodiscard]] double percentile(double p) const;
};

struct Row {
  uint64_t bytes = 0;
  Figures ours;
  std::optional<Figures> peer;
  std::string peer_refusal;  ///< why the peer has no figures
  int threads = 1;           ///< the most that a computation of rank 0's operation had parts for
  int peer_threads = 0;      ///< of rank 0's peer
  std::string peer_torch;    ///< and its torch's version
  uint64_t predicted_bytes = 0;  ///< per operation of ours
  std::string plan;
  std::string codec;
};

/// Measures one size; every rank calls it. `peer` may be null. `random` draws the same on all ranks.
Result<Row> measure(paceline_comm* comm, const paceline_identity& who, const Options& options,
                    uint64_t bytes, GlooPeer* peer, std::mt19937_64& random);

}  // namespace paceline::bench
