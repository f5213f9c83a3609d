// Rank 0's table: which names are ready where, since when, and who will never come.
//
// A round of a name is over when every rank has reported it, or when it is given up: after the time-out, or because a
// rank that is missing has left. A rank that comes to a round that was given up after the time-out is refused as well,
// so that its k-th report never meets the others' next one.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "paceline/comm.h"

namespace paceline::agreement {

/// Pure; deterministic in the order of its calls. Times are seconds of one clock.
class Table {
 public:
  struct Decision {
    std::string name;
    std::string refusal;         ///< empty: run it
    int32_t code = PACELINE_OK;  ///< of the refusal
    std::vector<int32_t> ranks;  ///< whom it concerns; empty: all
  };
  explicit Table(int32_t size) : size_(size), gone_(static_cast<std::size_t>(size)) {}
  /// Rank `rank` is ready for `name`. The decision, when it was the last one, or when it waits in vain.
  std::optional<Decision> ready(int32_t rank, const std::string& name, const std::string& signature,
                                double now = 0);
  /// Gives up what has waited for `timeout_s`.
  std::vector<Decision> expire(double now, double timeout_s);
  /// Rank `rank` will report nothing more: gives up what waits for it, now and later.
  std::vector<Decision> leave(int32_t rank);
  /// Names that wait, with the ranks that have not come: "grad/3 (rank 1, rank 2)".
  [[nodiscard]] std::vector<std::string> waiting() const;

 private:
  struct Entry {
    std::vector<std::deque<std::string>> signatures;  ///< by rank
    std::vector<std::deque<double>> since;            ///< by rank: when each was reported
    std::vector<std::deque<std::string>> late;  ///< by rank: refusals of rounds that it missed
    int32_t present = 0;                        ///< ranks with at least one signature
  };
  [[nodiscard]] bool is_idle(const Entry& entry) const;
  [[nodiscard]] std::vector<int32_t> missing(const Entry& entry) const;
  std::vector<int32_t> pop_round(Entry& entry);
  std::optional<Decision> refuse_for_the_gone(const std::string& name, Entry& entry);

  int32_t size_;
  std::vector<bool> gone_;
  std::unordered_map<std::string, Entry> entries_;
};

}  // namespace paceline::agreement
