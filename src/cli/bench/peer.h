// A peer that lives in Python: torch.distributed on Gloo, in a process beside each rank.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench/bench.h"

namespace paceline::bench {

class GlooPeer {
 public:
  /// Starts the process and joins the peer's own group. `share` hands rank 0's text to all ranks.
  static Result<std::unique_ptr<GlooPeer>> start(
      const Options& options, const paceline_identity& who,
      const std::function<Result<std::string>(std::string)>& share);
  ~GlooPeer();
  GlooPeer(const GlooPeer&) = delete;
  GlooPeer& operator=(const GlooPeer&) = delete;

  /// Seconds that each of so many operations took here, of a torch told to compute with so many threads.
  Result<std::vector<double>> run(const Options& options, uint64_t bytes, int iterations,
                                  int threads);
  /// That torch computed with in the last run.
  [[nodiscard]] int threads() const { return threads_; }
  /// "2.9.1": the version of its torch.
  [[nodiscard]] const std::string& torch() const { return torch_; }

 private:
  GlooPeer(std::string python, int pid, int to, int from)
      : python_(std::move(python)), pid_(pid), to_(to), from_(from) {}
  static Result<std::unique_ptr<GlooPeer>> spawn(const Options& options,
                                                 const paceline_identity& who);
  Status write_line(const std::string& line) const;
  Result<std::string> read_line(double seconds);
  /// Its end, which it has explained on standard error, or not.
  [[nodiscard]] Status gone() const;

  std::string python_;  ///< the interpreter
  int pid_;
  int to_;
  int from_;
  int threads_ = 0;
  std::string torch_;
  std::string buffered_;
};

}  // namespace paceline::bench
