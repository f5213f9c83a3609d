// The one line that a job shows when it starts.
#pragma once

#include <string>

#include "base/settings.h"
#include "bootstrap/join.h"
#include "engine/engine.h"

namespace paceline::capi {

/// "4 ranks on 4 nodes (torchrun) · tcp, 2 flows · ring for large buffers, exact: 4 nodes of one rank each".
std::string start_line(const bootstrap::Job& job, const Settings& settings,
                       const engine::EngineOptions& options);

}  // namespace paceline::capi
