// For how long the thread that trains may sleep once it has enqueued an optimizer's step behind what is under way.
//
// It is ahead of the GPU then, and what it enqueues next can't begin before all has arrived. Where the network takes longer than a
// stream has room (about a thousand launches), the thread waits inside the driver, which keeps a core busy. So it sleeps until
// shortly before the pass is expected to have arrived, by the passes before; then it has the time of kLead to be ahead again.
//
// A script that has other work to do between two steps, on the same thread, is late by what it slept: so passes are tried without,
// and timed (pass_trial.h).
#pragma once

#include <array>

#include "base/clock.h"
#include "gpu/pass_trial.h"

namespace paceline::gpu {

class HostRest {
 public:
  static constexpr Time kLead = 30 * kMillisecond;
  /// The first trial comes when that of the joins is over.
  static constexpr uint64_t kFirst = PassTrial::kFirst + PassTrial::kTurns * PassTrial::kTurn + 4;

  /// Once a pass, at `now`: until when to sleep; not later than `now`: not at all. `joined`: the end of the join of this pass;
  /// `before`: when the pass before had arrived, 0: nobody knows.
  Time until(Time now, Time joined, Time before);

 private:
  std::array<Time, 4> taken_{};  ///< from the join to the arrival, of the last passes; 0: unknown
  size_t next_ = 0;
  Time joined_ = 0;  ///< of the pass before
  PassTrial trial_{kFirst};
};

}  // namespace paceline::gpu
