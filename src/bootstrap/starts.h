// Which start of a job this is, where the ranks' key-value space lives on when they are started again: torchrun's agents
// keep one store, and each counts restarts for itself (its own workers' failures, not those of other nodes).
//
// Starts are numbered in the space. Rank 0 takes the first number that is free, for all of its predecessors are gone:
// agents meet only when their workers have ended. The others take the newest number that they see. It may be the one
// before, whose keys lead to processes that are no more, so they look for a newer one for as long as they have not joined.
#pragma once

#include <memory>
#include <string>

#include "bootstrap/kv.h"

namespace paceline::bootstrap {

/// When this process began, in microseconds of the machine's clock of the day; 0: /proc does not tell.
int64_t process_began_us();

class Starts {
 public:
  /// `base`: what the keys of all starts begin with. `began_us`: process_began_us().
  Starts(std::shared_ptr<KeyValue> space, std::string base, int64_t began_us = process_began_us());

  /// Rank 0's: makes a new start.
  Status begin();
  /// The others': true where there is a newer one than before, which is this one's then. The first call: 0 where none is
  /// known yet, for that is what rank 0 will take.
  Result<bool> find_newest();
  /// Rank 0 made this start before this process began, by the clocks of both: it is likely to be over. A rank 0 of the same
  /// start has its libraries to load before it makes one, so it is rarely taken for an older one.
  [[nodiscard]] bool is_older_than_this_process() const;
  /// What this start's own keys begin with.
  [[nodiscard]] std::string prefix() const;
  /// The space, whose poll() fails once there is a newer start: whoever waits for a rank of this one waits in vain.
  [[nodiscard]] std::shared_ptr<KeyValue> watched();

 private:
  class Watched;
  [[nodiscard]] std::string key(int number) const;

  std::shared_ptr<KeyValue> space_;
  std::string base_;
  int64_t began_us_;
  int number_ = 0;
  int64_t made_us_ = 0;  ///< when rank 0 made number_, by its clock; 0: it has not yet
};

}  // namespace paceline::bootstrap
