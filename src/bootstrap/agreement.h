// The settings that must be the same on all ranks, for they decide what travels.
#pragma once

#include "base/settings.h"
#include "bootstrap/members.h"

namespace paceline::bootstrap {

SettingTexts agreed_settings(const Settings& settings);

}  // namespace paceline::bootstrap
