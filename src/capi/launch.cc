#include "bootstrap/launch.h"

#include "capi/handle.h"

using namespace paceline;  // NOLINT: the function below is the C ABI's
using namespace paceline::capi;

namespace {

Result<std::string> variables(const char* face) {
  PACELINE_ASSIGN(auto parsed, parse_face(face == nullptr ? "" : face));
  // Switched off, a script still lacks torch's variables under mpirun; the other settings are not looked at then.
  const auto settings = Settings::load_all(parsed);
  if (!settings.problems().empty() && !settings.flag("disable"))
    return settings.problems().front().status;
  PACELINE_ASSIGN(auto found, bootstrap::launch_environment(settings));
  std::string lines;
  for (const auto& [name, value] : found) lines.append(name).append("=").append(value).append("\n");
  return lines;
}

}  // namespace

extern "C" {

paceline_code paceline_launch_environment(const char* face, char* text, size_t capacity) {
  return guarded(nullptr, [&] {
    auto lines = variables(face);
    if (!lines) return report(nullptr, lines.status());
    if (lines->size() >= capacity)
      return invalid(nullptr, "the text that takes the variables is too short");
    copy_text(*lines, text, capacity);
    return report(nullptr, Status::ok());
  });
}
}
