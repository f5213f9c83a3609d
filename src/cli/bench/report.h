// The table and the JSON lines.
#pragma once

#include <string>

#include "cli/bench/measure.h"

namespace paceline::bench {

class Report {
 public:
  /// On rank 0, prints the table's head. `start_line`: paceline_comm_describe(). kInvalidArgument when the file can't be
  /// written, kResourceExhausted when standard output can't.
  static Result<Report> open(const Options& options, const paceline_identity& who,
                             const std::string& start_line, double link_bits_per_second);
  /// Prints the row and appends its lines. kResourceExhausted when one of both can't be written.
  Status add(const Row& row);

 private:
  [[nodiscard]] std::string side(const Row& row, const Figures& figures, const char* name) const;
  [[nodiscard]] std::string line(const Row& row, const Figures& figures, bool peer) const;
  [[nodiscard]] double floor_us(const Row& row) const;

  Options options_;
  paceline_identity who_{};
  std::string start_line_;
  double link_ = 0;
};

}  // namespace paceline::bench
