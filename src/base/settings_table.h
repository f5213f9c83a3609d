// The rows of the settings table (data only; settings.cc reads them).
#pragma once

#include <span>
#include <string_view>

#include "base/settings.h"

namespace paceline {

enum class Family { kPaceline, kPerseus, kTiacc, kLight, kHorovod, kOther };

enum class SettingType { kFlag, kInteger, kNumber, kText, kChoice };

/// What a set value leads to.
enum class Support {
  kBuilt,
  kKnown,      ///< accepted; one warning that it has no effect yet
  kNoMeaning,  ///< accepted silently: there is nothing here that it could change
};

/// Another name for a setting.
struct Alias {
  std::string_view variable;
  Family family = Family::kOther;
  /// "0=|1=two_level": raw value = canonical value; an empty canonical value says nothing. Values
  /// that are not listed are errors. Empty: values pass as they are.
  std::string_view translation = {};
  /// The alias's own range, where it is narrower: "1..12".
  std::string_view range = {};
  /// To another alias of its family that is set: there they are two settings, of which the other decides more.
  bool yields = false;
};

struct SettingRow {
  std::string_view name;  ///< "topk_ratio": the variable is PACELINE_TOPK_RATIO
  SettingType type;
  std::string_view default_value;
  std::string_view range;  ///< numbers: "1..64", "0<..1"; choices: "a|b|c"; empty: anything
  std::string_view text;
  std::span<const Alias> aliases = {};
  /// Another default under one face: "perseus=10".
  std::string_view face_default = {};
  Support support = Support::kBuilt;
};

std::span<const SettingRow> setting_rows();

/// Variables of the peers' families that have no canonical counterpart.
struct ForeignVariable {
  std::string_view variable;
  Support support;
  std::string_view text;
};
std::span<const ForeignVariable> foreign_variables();

/// NCCL's own, which NCCL reads: listed for what they mean beside Paceline.
struct NcclVariable {
  std::string_view variable;
  std::string_view text;
};
std::span<const NcclVariable> nccl_variables();

}  // namespace paceline
