// One table of settings: every name that a user's script may set, with type, range, default and
// text. From it come the parser, `paceline doctor --settings` and the manual page docs/settings.md.
//
// PACELINE_* is canonical; LIGHT_*, PERSEUS_*, TIACC_TRAINING_*, HOROVOD_* are aliases. Precedence:
// PACELINE, then the family of the face in use, then the other families' explicit values, then
// HOROVOD, then defaults. A family's own defaults hold only under its own face.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace paceline {

enum class Face { kPaceline, kPerseus, kTiacc, kLight, kHorovod };
/// "perseus" → kPerseus …; empty or null: kPaceline.
Result<Face> parse_face(std::string_view name);
std::string_view face_name(Face face);

/// Reads a variable; nullopt when it is not set. The process environment unless a test hands in
/// another.
using Environment = std::function<std::optional<std::string>(const std::string&)>;
/// Lists the names of all variables (to find unknown ones in our families).
using EnvironmentNames = std::function<std::vector<std::string>()>;

class Settings {
 public:
  /// kInvalidArgument names the variable that is unknown, out of range or contradicts another, and
  /// the fix.
  static Result<Settings> load(Face face);
  static Result<Settings> load(Face face, const Environment& get, const EnvironmentNames& names);

  /// As load(), for showing all of them: what is wrong is in problems(), and the default stands in its place.
  static Settings load_all(Face face);

  // By canonical name without the prefix, in lower case: "log_level", "topk_ratio". Asking for a
  // name that is not in the table, or by the wrong type, is a defect and aborts.
  [[nodiscard]] bool flag(std::string_view name) const;
  [[nodiscard]] int64_t integer(std::string_view name) const;
  [[nodiscard]] double number(std::string_view name) const;
  [[nodiscard]] const std::string& text(std::string_view name) const;
  /// False where the value is a default.
  [[nodiscard]] bool is_set(std::string_view name) const;
  /// The variable that a value came from; empty: a default.
  [[nodiscard]] const std::string& source(std::string_view name) const;
  /// True for a name of the table.
  static bool exists(std::string_view name);

  /// "known but not built yet" and the like: one sentence each, for rank 0 to print once.
  [[nodiscard]] const std::vector<std::string>& warnings() const { return warnings_; }
  struct Problem {
    std::string
        name;  ///< the setting whose value is wrong; empty: an unknown variable, a contradiction
    Status status;
  };
  /// Of load_all().
  [[nodiscard]] const std::vector<Problem>& problems() const { return problems_; }
  /// [{"name", "variable", "aliases": […], "type", "range", "default", "value", "source",
  /// "precedence", "built", "problem", "text"}, …]; the secret's value is never shown. Where two
  /// settings are about one thing, the lower precedence wins: the source's family's, as above.
  [[nodiscard]] std::string to_json() const;
  /// The same for people, with the foreign variables and NCCL's.
  [[nodiscard]] std::string to_text() const;
  /// The manual page docs/settings.md: independent of any environment.
  static std::string to_markdown();

 private:
  static Settings read(Face face, const Environment& get, const EnvironmentNames& names);
  [[nodiscard]] Status check_together() const;

  struct Value {
    std::string text;
    std::string source;  ///< the variable it came from; empty: default
    int precedence;      ///< of its source's family; that of a default stands behind all
  };
  std::vector<Value> values_;  ///< parallel to the table
  std::vector<std::string> warnings_;
  std::vector<Problem> problems_;
};

}  // namespace paceline
