#include "cli/bench/measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "capi/handle.h"
#include "cli/bench/links.h"
#include "cli/bench/ranks.h"
#include "plan/plan.h"

namespace paceline::bench {
namespace {

// Sums grow when they are summed again: the values are renewed this often, outside the time taken.
constexpr int kRenew = 8;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Result<std::vector<double>> run_ours(paceline_comm* comm, Workload& work, int iterations) {
  bool one_way = work.args().collective == 1;
  std::vector<double> out;
  for (int i = 0; i < iterations; ++i) {
    if (i % kRenew == 0) work.refill();
    // After a pause of unequal length all begin together; a broadcast's root would run ahead.
    if (i % kRenew == 0 || one_way) PACELINE_RETURN_IF_ERROR(barrier(comm));
    double begin = now();
    PACELINE_RETURN_IF_ERROR(work.run());
    out.push_back(now() - begin);
  }
  return out;
}

/// A side in turn: runs a block, and adds what it took to `into`.
class Turn {
 public:
  Turn(paceline_comm* comm, const paceline_identity& who, const Options& options, Workload& work,
       GlooPeer* peer)
      : comm_(comm), who_(who), options_(options), work_(work), peer_(peer) {}

  /// The peer's from now on: as many as this rank's operations have had.
  int count_threads() { return threads_ = std::max(1, comm_->workers->take_used()); }

  Status run(bool ours, int iterations, Figures& into) {
    PACELINE_RETURN_IF_ERROR(barrier(comm_));
    std::optional<LinkBytes> before;
    if (who_.rank == 0) before = read_links();
    PACELINE_RETURN_IF_ERROR(barrier(comm_));
    auto times = ours ? run_ours(comm_, work_, iterations)
                      : peer_->run(options_, work_.bytes(), iterations, threads_);
    if (!times) return times.status();
    PACELINE_RETURN_IF_ERROR(barrier(comm_));
    if (before) {
      if (auto after = read_links()) {
        into.link_bytes = into.link_bytes.value_or(0) + busiest(*before, *after);
      }
    }
    PACELINE_RETURN_IF_ERROR(maximum(comm_, *times));
    into.seconds.insert(into.seconds.end(), times->begin(), times->end());
    return Status::ok();
  }

 private:
  paceline_comm* comm_;
  const paceline_identity& who_;
  const Options& options_;
  Workload& work_;
  GlooPeer* peer_;
  int threads_ = 1;
};

/// What the engine would do.
void describe(const Workload& work, int rank, Row& row) {
  const auto told = [&](const auto& result) { return result.status().to_string(); };
  const auto request = work.request();
  if (!request) return void(row.plan = told(request));
  const auto plan = plan::build(*request, rank);
  if (!plan) return void(row.plan = told(plan));
  row.plan = plan->summary();
}

uint64_t predicted_so_far(paceline_comm* comm) {
  paceline_stats stats{};
  stats.struct_size = sizeof stats;
  return paceline_comm_stats(comm, &stats) == PACELINE_OK ? stats.predicted_link_bytes : 0;
}

int block_length(const Options& options, double seconds_each) {
  double whole =
      options.iterations > 0 ? options.iterations : options.seconds / std::max(seconds_each, 1e-7);
  double block = std::ceil(whole / options.turns);
  if (options.iterations > 0) return static_cast<int>(block);
  // At least three a side and block: the first after a change of sides finds cold caches.
  return static_cast<int>(std::clamp(block, 3.0, 2000.0));
}

Status warm_up(Turn& turn, GlooPeer* peer, Row& row, double& ours, double& theirs) {
  Figures first;
  PACELINE_RETURN_IF_ERROR(turn.run(true, 3, first));
  ours = first.seconds.back();
  row.threads = turn.count_threads();
  if (peer == nullptr) return Status::ok();
  Figures other;
  Status status = turn.run(false, 3, other);
  if (status.code() == Code::kUnsupported) {
    row.peer_refusal = status.message();
    return Status::ok();
  }
  if (status) theirs = other.seconds.back();
  return status;
}

}  // namespace

double Figures::percentile(double p) const {
  if (seconds.empty()) return 0;
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  auto at = static_cast<std::size_t>(std::ceil(p * static_cast<double>(sorted.size())));
  return sorted[std::clamp<std::size_t>(at, 1, sorted.size()) - 1];
}

Result<Row> measure(paceline_comm* comm, const paceline_identity& who, const Options& options,
                    uint64_t bytes, GlooPeer* peer, std::mt19937_64& random) {
  PACELINE_ASSIGN(auto work, Workload::make(comm, who, options, bytes));
  Row row;
  row.bytes = work.bytes();
  describe(work, who.rank, row);
  row.codec = codec_word(work.codec().codec);

  work.refill();
  uint64_t predicted = predicted_so_far(comm);
  comm->workers->take_used();
  PACELINE_RETURN_IF_ERROR(work.run());
  row.predicted_bytes = predicted_so_far(comm) - predicted;
  PACELINE_RETURN_IF_ERROR(all_ok(comm, who.rank, work.verify(), "wrong result"));

  Turn turn(comm, who, options, work, peer);
  double ours = 0, theirs = 0;
  PACELINE_RETURN_IF_ERROR(warm_up(turn, peer, row, ours, theirs));
  bool both = peer != nullptr && row.peer_refusal.empty();
  int our_block = block_length(options, ours);
  int their_block = block_length(options, theirs);
  if (both) {
    row.peer.emplace();
    row.peer_threads = peer->threads();
    row.peer_torch = peer->torch();
  }
  for (int t = 0; t < options.turns; ++t) {
    bool we_begin = (random() & 1) != 0;
    for (bool first : {true, false}) {
      bool our_turn = first == we_begin;
      if (!our_turn && !both) continue;
      PACELINE_RETURN_IF_ERROR(
          turn.run(our_turn, our_turn ? our_block : their_block, our_turn ? row.ours : *row.peer));
    }
  }
  for (Figures* f : {&row.ours, row.peer ? &*row.peer : nullptr}) {
    if (f != nullptr && f->link_bytes) *f->link_bytes /= f->seconds.size();
  }
  return row;
}

}  // namespace paceline::bench
