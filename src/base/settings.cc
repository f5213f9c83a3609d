#include "base/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <map>
#include <tuple>

#include "base/settings_table.h"

extern char** environ;  // NOLINT(readability-redundant-declaration): not declared by every libc

namespace paceline {
namespace {

std::string canonical_variable(std::string_view name) {
  std::string variable = "PACELINE_";
  for (char c : name) variable += static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return variable;
}

Family family_of(Face face) {
  switch (face) {
    case Face::kPaceline:
      return Family::kPaceline;
    case Face::kPerseus:
      return Family::kPerseus;
    case Face::kTiacc:
      return Family::kTiacc;
    case Face::kLight:
      return Family::kLight;
    case Face::kHorovod:
      return Family::kHorovod;
  }
  return Family::kPaceline;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    auto at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::optional<double> parse_number(std::string_view text) {
  double value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return {};
  return value;
}

std::optional<int64_t> parse_integer(std::string_view text) {
  int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::optional<bool> parse_flag(const std::string& raw) {
  auto text = lower(raw);
  if (text == "1" || text == "true" || text == "yes" || text == "on") return true;
  if (text == "0" || text == "false" || text == "no" || text == "off") return false;
  return {};
}

/// "1..64", "0<..1" (above 0), "0..": true when value is inside.
bool in_range(double value, std::string_view range) {
  if (range.empty()) return true;
  auto dots = range.find("..");
  auto low = range.substr(0, dots);
  auto high = range.substr(dots + 2);
  bool open = !low.empty() && low.back() == '<';
  if (open) low.remove_suffix(1);
  if (!low.empty()) {
    double bound = *parse_number(low);
    if (open ? value <= bound : value < bound) return false;
  }
  return high.empty() || value <= *parse_number(high);
}

std::string range_text(std::string_view range) {
  auto dots = range.find("..");
  auto low = range.substr(0, dots);
  auto high = range.substr(dots + 2);
  bool open = !low.empty() && low.back() == '<';
  if (open) low.remove_suffix(1);
  if (high.empty()) return fmt::format("{} {}", open ? "above" : "at least", low);
  return open ? fmt::format("above {} and at most {}", low, high)
              : fmt::format("from {} to {}", low, high);
}

Status bad(std::string_view variable, std::string_view value, std::string_view wanted) {
  return {Code::kInvalidArgument,
          fmt::format("{}='{}' is not {}; set it so, or unset it", variable, value, wanted)};
}

/// Checks a canonical value against its row; `variable` and `raw` are what the user wrote.
Status check(const SettingRow& row, const std::string& value, std::string_view range,
             std::string_view variable, std::string_view raw) {
  switch (row.type) {
    case SettingType::kText:
      return Status::ok();
    case SettingType::kFlag:
      return parse_flag(value) ? Status::ok() : bad(variable, raw, "0 or 1");
    case SettingType::kChoice: {
      auto choices = split(row.range, '|');
      if (std::find(choices.begin(), choices.end(), lower(value)) != choices.end())
        return Status::ok();
      return bad(variable, raw, fmt::format("one of {}", fmt::join(choices, ", ")));
    }
    case SettingType::kInteger: {
      auto n = parse_integer(value);
      if (!n) return bad(variable, raw, "an integer");
      if (!in_range(static_cast<double>(*n), range)) return bad(variable, raw, range_text(range));
      return Status::ok();
    }
    case SettingType::kNumber: {
      auto x = parse_number(value);
      if (!x) return bad(variable, raw, "a number");
      if (!in_range(*x, range)) return bad(variable, raw, range_text(range));
      return Status::ok();
    }
  }
  return Status::ok();
}

/// A valid value as everyone reads it, ranks that compare their settings too: TOPK is topk, and True is 1.
std::string spelled(const SettingRow& row, const std::string& value) {
  if (row.type == SettingType::kChoice) return lower(value);
  const auto flag = row.type == SettingType::kFlag ? parse_flag(value) : std::nullopt;
  return !flag ? value : *flag ? "1" : "0";
}

/// The canonical value that an alias's raw value stands for; empty: it says nothing.
Result<std::string> translate(const Alias& alias, const std::string& raw) {
  if (alias.translation.empty()) return raw;
  // As Horovod reads them: DEBUG is debug, and True is 1.
  auto flag = alias.translation.starts_with("0=|1=") ? parse_flag(raw) : std::nullopt;
  std::string_view number = !flag ? "" : *flag ? "1" : "0";
  std::vector<std::string_view> accepted;
  for (auto pair : split(alias.translation, '|')) {
    auto equals = pair.find('=');
    auto name = pair.substr(0, equals);
    accepted.push_back(name);
    if (name == lower(raw) || name == number) return std::string(pair.substr(equals + 1));
  }
  return bad(alias.variable, raw, fmt::format("one of {}", fmt::join(accepted, ", ")));
}

/// Lower goes first: PACELINE, the face's family, the other families, HOROVOD.
int precedence(Family family, Family face) {
  if (family == Family::kPaceline) return 0;
  if (family == face) return 1;
  return family == Family::kHorovod ? 4 : family == Family::kOther ? 3 : 2;
}

constexpr int kDefaultsPrecedence = 5;

struct Candidate {
  int precedence;
  std::string value;
  std::string variable;
  bool yields = false;
};

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      std::size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

constexpr std::string_view kFamilies[] = {"PACELINE_", "LIGHT_", "PERSEUS_", "TIACC_TRAINING_",
                                          "HOROVOD_"};

bool in_our_families(std::string_view variable) {
  return std::any_of(std::begin(kFamilies), std::end(kFamilies),
                     [&](std::string_view prefix) { return variable.starts_with(prefix); });
}

struct KnownVariable {
  Support support = Support::kBuilt;
  const SettingRow* row = nullptr;  ///< nullptr: a foreign one
};

/// All names that may be set, with the row or foreign entry that they belong to.
std::map<std::string, KnownVariable, std::less<>> known_variables() {
  std::map<std::string, KnownVariable, std::less<>> known;
  for (const auto& row : setting_rows()) {
    known[canonical_variable(row.name)] = {row.support, &row};
    for (const auto& alias : row.aliases) known[std::string(alias.variable)] = {row.support, &row};
  }
  for (const auto& foreign : foreign_variables())
    known[std::string(foreign.variable)] = {foreign.support, nullptr};
  return known;
}

/// Of our own test suites; no setting, and nothing that a job reads.
constexpr std::string_view kTestVariables[] = {"PACELINE_TEST_NEEDS_DESCRIPTORS"};

bool is_of_tests(std::string_view variable) {
  return std::find(std::begin(kTestVariables), std::end(kTestVariables), variable) !=
         std::end(kTestVariables);
}

std::string_view default_under(const SettingRow& row, Face face) {
  if (row.face_default.empty()) return row.default_value;
  auto equals = row.face_default.find('=');
  return row.face_default.substr(0, equals) == face_name(face) ? row.face_default.substr(equals + 1)
                                                               : row.default_value;
}

/// True where a variable's value wants something else than what is without it.
bool asks_for_something(const KnownVariable& variable, const std::string& value, Face face) {
  if (value.empty()) return false;
  if (variable.row == nullptr) return parse_flag(value) != false;
  const auto standard = default_under(*variable.row, face);
  const auto number = parse_number(value);
  if (number && number == parse_number(standard)) return false;
  return spelled(*variable.row, value) != standard;
}

Status unknown(const std::string& name,
               const std::map<std::string, KnownVariable, std::less<>>& known) {
  std::string_view nearest;
  std::size_t best = std::max<std::size_t>(3, name.size() / 4);
  for (const auto& [candidate, variable] : known) {
    auto distance = edit_distance(name, candidate);
    if (distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  return {Code::kInvalidArgument,
          nearest.empty()
              ? fmt::format("{} is not a setting; unset it (paceline doctor --settings lists them)",
                            name)
              : fmt::format(
                    "{} is not a setting; did you mean {}? (paceline doctor --settings lists them)",
                    name, nearest)};
}

std::size_t row_index(std::string_view name) {
  auto rows = setting_rows();
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (rows[i].name == name) return i;
  fmt::print(stderr, "paceline: no setting '{}' in the table\n", name);
  std::abort();
}

/// Everything that was set for one row, best first; an error where two equals contradict each
/// other.
Result<std::vector<Candidate>> candidates(const SettingRow& row, Face face,
                                          const Environment& get) {
  std::vector<Candidate> found;
  auto variable = canonical_variable(row.name);
  if (auto raw = get(variable); raw && !raw->empty()) {
    PACELINE_RETURN_IF_ERROR(check(row, *raw, row.range, variable, *raw));
    found.push_back({0, spelled(row, *raw), variable});
  }
  for (const auto& alias : row.aliases) {
    auto raw = get(std::string(alias.variable));
    if (!raw || raw->empty()) continue;
    PACELINE_ASSIGN(std::string value, translate(alias, *raw));
    if (value.empty()) continue;
    auto range = alias.range.empty() ? row.range : alias.range;
    PACELINE_RETURN_IF_ERROR(check(row, value, range, alias.variable, *raw));
    found.push_back({precedence(alias.family, family_of(face)), spelled(row, value),
                     std::string(alias.variable), alias.yields});
  }
  std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.precedence, a.yields) < std::tie(b.precedence, b.yields);
  });
  const auto contradicts = [&](const Candidate& other) {
    return other.precedence == found.front().precedence && !other.yields &&
           other.value != found.front().value;
  };
  const auto other = std::find_if(found.begin(), found.end(), contradicts);
  if (other != found.end() && other->precedence < 3) {
    return Status{
        Code::kInvalidArgument,
        fmt::format("{} and {} contradict each other ({} against {}); unset one of them",
                    found.front().variable, other->variable, found.front().value, other->value)};
  }
  return found;
}

}  // namespace

std::string_view face_name(Face face) {
  switch (face) {
    case Face::kPerseus:
      return "perseus";
    case Face::kTiacc:
      return "tiacc_training";
    case Face::kLight:
      return "light";
    case Face::kHorovod:
      return "horovod";
    case Face::kPaceline:
      break;
  }
  return "paceline";
}

Result<Face> parse_face(std::string_view name) {
  for (Face face : {Face::kPaceline, Face::kPerseus, Face::kTiacc, Face::kLight, Face::kHorovod})
    if (face_name(face) == name) return face;
  if (name.empty()) return Face::kPaceline;
  return Status{
      Code::kInvalidArgument,
      fmt::format("face '{}' is not one of paceline, perseus, tiacc_training, light, horovod",
                  name)};
}

namespace {

std::optional<std::string> variable_of_process(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value ? std::optional<std::string>(value) : std::nullopt;
}

std::vector<std::string> names_of_process() {
  std::vector<std::string> names;
  for (char** entry = environ; entry && *entry; ++entry) {
    std::string_view text(*entry);
    names.emplace_back(text.substr(0, text.find('=')));
  }
  return names;
}

}  // namespace

Result<Settings> Settings::load(Face face) {
  return load(face, variable_of_process, names_of_process);
}

Result<Settings> Settings::load(Face face, const Environment& get, const EnvironmentNames& names) {
  auto settings = read(face, get, names);
  if (!settings.problems_.empty()) return settings.problems_.front().status;
  return settings;
}

Settings Settings::load_all(Face face) { return read(face, variable_of_process, names_of_process); }

Settings Settings::read(Face face, const Environment& get, const EnvironmentNames& names) {
  Settings settings;
  const auto known = known_variables();
  for (const auto& name : names()) {
    if (!in_our_families(name) || is_of_tests(name)) continue;
    const auto found = known.find(name);
    if (found == known.end())
      settings.problems_.push_back({"", unknown(name, known)});
    else if (found->second.support == Support::kKnown &&
             asks_for_something(found->second, get(name).value_or(""), face))
      settings.warnings_.push_back(
          fmt::format("{} is known but has no effect yet; the job goes on without it", name));
  }
  for (const auto& row : setting_rows()) {
    const auto found = candidates(row, face, get);
    if (!found.is_ok()) settings.problems_.push_back({std::string(row.name), found.status()});
    if (!found.is_ok() || found->empty()) {
      settings.values_.push_back({std::string(default_under(row, face)), "", kDefaultsPrecedence});
    } else {
      const auto& best = found->front();
      settings.values_.push_back({best.value, best.variable, best.precedence});
    }
  }
  if (auto status = settings.check_together(); !status.is_ok())
    settings.problems_.push_back({"", status});
  return settings;
}

Status Settings::check_together() const {
  auto source = [&](std::string_view name) {
    const auto& value = values_[row_index(name)];
    return value.source.empty() ? canonical_variable(name) : value.source;
  };
  const auto& algorithm = text("algorithm");
  const auto& codec = text("codec");
  if (codec == "topk" && (algorithm == "ring" || algorithm == "doubling" || algorithm == "tree" ||
                          algorithm == "direct"))
    return {Code::kInvalidArgument, fmt::format("{} asks for top-k and {} for the plan '{}', which "
                                                "cannot carry it; unset the latter or use "
                                                "auto, two_level or sparse",
                                                source("codec"), source("algorithm"), algorithm)};
  if ((algorithm == "doubling" || algorithm == "tree") && (codec == "fp16" || codec == "bf16") &&
      is_set("codec"))
    return {Code::kInvalidArgument,
            fmt::format("{} asks for {} and {} for the plan '{}', which carries elements as they "
                        "are; unset one of them",
                        source("codec"), codec, source("algorithm"), algorithm)};
  if (algorithm == "sparse" && codec != "topk")
    return {
        Code::kInvalidArgument,
        fmt::format("{0} asks for the sparse plan, which carries top-k, and the codec is '{1}': "
                    "set PACELINE_CODEC=topk, or unset {0}",
                    source("algorithm"), codec)};
  if (number("topk_momentum") > 0 && codec != "topk")
    return {
        Code::kInvalidArgument,
        fmt::format("{}={} asks for top-k's momentum, and the codec is '{}', which has none: set "
                    "PACELINE_CODEC=topk, or unset it and leave the momentum to the optimizer",
                    source("topk_momentum"), text("topk_momentum"), codec)};
  if (is_set("secret") && is_set("secret_file"))
    return {Code::kInvalidArgument,
            "PACELINE_SECRET and PACELINE_SECRET_FILE are both set; unset one of them"};
  if (is_set("secret") && text("secret").size() < 16)
    return {Code::kInvalidArgument,
            "PACELINE_SECRET is shorter than 16 characters; use a longer one, e.g. from `openssl "
            "rand -hex 16`"};
  if (is_set("fusion_buckets") && text("fusion_buckets") != "auto") {
    auto n = parse_integer(text("fusion_buckets"));
    if (!n || *n < 0 || *n > 128)
      return bad(source("fusion_buckets"), text("fusion_buckets"), "auto or from 0 to 128");
  }
  return Status::ok();
}

bool Settings::flag(std::string_view name) const {
  auto value = parse_flag(values_[row_index(name)].text);
  if (!value) std::abort();
  return *value;
}
int64_t Settings::integer(std::string_view name) const {
  auto value = parse_integer(values_[row_index(name)].text);
  if (!value) std::abort();
  return *value;
}
double Settings::number(std::string_view name) const {
  auto value = parse_number(values_[row_index(name)].text);
  if (!value) std::abort();
  return *value;
}
const std::string& Settings::text(std::string_view name) const {
  return values_[row_index(name)].text;
}
bool Settings::is_set(std::string_view name) const {
  return !values_[row_index(name)].source.empty();
}
bool Settings::exists(std::string_view name) {
  auto rows = setting_rows();
  return std::any_of(rows.begin(), rows.end(),
                     [&](const SettingRow& row) { return row.name == name; });
}
const std::string& Settings::source(std::string_view name) const {
  return values_[row_index(name)].source;
}

}  // namespace paceline
