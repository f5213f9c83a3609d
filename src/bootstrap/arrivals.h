// Who of a job has come, as far as the place where ranks meet shows it, and what is said of those who have not.
#pragma once

#include <set>
#include <string>

#include "base/clock.h"
#include "base/status.h"
#include "base/types.h"
#include "bootstrap/kv.h"

namespace paceline::bootstrap {

/// By what a rank announces that it is here (see KeyValue::announce).
std::string here_key(const std::string& prefix, Rank rank);
/// Whether `rank` has announced itself; where `space` can't tell, whether it has put something at `put_key`.
bool is_here(KeyValue& space, const std::string& prefix, Rank rank, const std::string& put_key);

/// Seconds of a patience as it was asked for, and not to the microsecond.
double shown_seconds(Time waited);
/// kTimeout: `ranks` of `size` have not come within `waited`, as `space` says; or why it can't say so.
Status never_came(Time waited, const std::set<Rank>& ranks, Rank size, const KeyValue& space);
/// kTimeout: all have come, but not in time.
Status came_late(Time waited, Rank size);

}  // namespace paceline::bootstrap
