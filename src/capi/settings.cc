#include "base/settings.h"

#include <fmt/format.h>

#include "base/log.h"
#include "capi/handle.h"
#include "capi/options.h"

using namespace paceline;  // NOLINT: the functions below are the C ABI's
using namespace paceline::capi;

namespace {

Result<Settings> load(const char* face) {
  PACELINE_ASSIGN(auto parsed, parse_face(face == nullptr ? "" : face));
  return Settings::load(parsed);
}

}  // namespace

extern "C" {

size_t paceline_settings_json(const char* face, char* text, size_t capacity) {
  auto settings = load(face);
  report(nullptr, settings.status());
  return copy_text(settings ? settings->to_json() : "", text, capacity);
}

paceline_code paceline_settings_check(const char* face, char* warnings, size_t capacity) {
  return guarded(nullptr, [&] {
    auto settings = load(face);
    std::string lines;
    if (settings) {
      for (const auto& w : settings->warnings()) lines += w + "\n";
    }
    copy_text(lines, warnings, capacity);
    return report(nullptr, settings.status());
  });
}

paceline_code paceline_settings_warn(const char* face, int32_t job_rank) {
  return guarded(nullptr, [&] {
    auto settings = load(face);
    if (settings) {
      log::set_level(log::level_named(settings->text("log_level")));
      log::set_rank(job_rank);
      if (speaks(*settings, job_rank)) warn_once(settings->warnings());
    }
    return report(nullptr, settings.status());
  });
}

size_t paceline_setting(const char* face, const char* name, char* text, size_t capacity) {
  if (name == nullptr || !Settings::exists(name)) {
    report(nullptr, {Code::kInvalidArgument,
                     fmt::format("there is no setting '{}'", name == nullptr ? "" : name)});
    return copy_text("", text, capacity);
  }
  auto settings = load(face);
  report(nullptr, settings.status());
  return copy_text(settings ? settings->text(name) : "", text, capacity);
}
}
