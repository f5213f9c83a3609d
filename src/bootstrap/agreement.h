// The settings that must be the same on all ranks, for they decide what travels.
#pragma once

#include "base/settings.h"
#include "bootstrap/members.h"

namespace paceline::bootstrap {

/// LIGHT_TOPK_ALLREDUCE alone: every rank's own top-k. With LIGHT_2D_ALLREDUCE, or by PACELINE_CODEC: full precision
/// inside the node.
bool every_rank_selects(const Settings& settings);

SettingTexts agreed_settings(const Settings& settings);

}  // namespace paceline::bootstrap
