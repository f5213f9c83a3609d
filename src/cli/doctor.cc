// `paceline doctor`: what this machine offers a job, what is wrong with it, and each fix.
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/settings.h"
#include "bootstrap/identity.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/secret.h"
#include "cli/commands.h"
#include "cli/doctor_checks.h"
#include "cli/standard_output.h"
#include "paceline/comm.h"

namespace paceline::cli {
namespace {

using bootstrap::SecretSource;

constexpr const char* kName = "paceline doctor";

struct Options {
  bool settings = false;
  bool markdown = false;
  bool json = false;
  std::string face;
};

const char* mark(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood:
      return "ok";
    case Verdict::kNote:
      return "note";
    case Verdict::kWarning:
      return "warning";
    case Verdict::kFailure:
      return "FAILURE";
  }
  return "?";
}

int print_settings(const Options& options, Face face) {
  if (options.markdown) return show_or_fail(Settings::to_markdown(), 0, kName);
  const auto settings = Settings::load_all(face);
  const auto page = options.json ? settings.to_json() + "\n" : settings.to_text();
  const int code = show_or_fail(page, settings.problems().empty() ? 0 : 1, kName);
  for (const auto& problem : settings.problems())
    std::cerr << "paceline doctor: " << problem.status.message() << "\n";
  return code;
}

/// Lines after the first begin below it.
std::string indented(std::string text) {
  for (auto at = text.find('\n'); at != std::string::npos; at = text.find('\n', at + 1))
    text.insert(at + 1, 32, ' ');
  return text;
}

int diagnose(const Options& options, Face face) {
  Findings findings;
  check_settings(findings, face);
  check_machine(findings);
  check_shared_memory(findings);
  check_network(findings, face);
  check_libraries(findings);
  check_launchers(findings, face);
  check_meeting_point(findings, face);
  check_lab(findings);
  std::string page;
  if (options.json) {
    auto out = nlohmann::json::array();
    for (const auto& f : findings)
      out.push_back({{"subject", f.subject},
                     {"verdict", mark(f.verdict)},
                     {"found", f.found},
                     {"fix", f.fix}});
    // Variables may hold anything, also no UTF-8.
    page = out.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  } else {
    page = fmt::format("paceline {}\n", paceline_version());
    for (const auto& f : findings) {
      page += fmt::format("{:8} {:22} {}\n", mark(f.verdict), f.subject, indented(f.found));
      if (!f.fix.empty()) page += fmt::format("{:8} {:22} fix: {}\n", "", "", f.fix);
    }
  }
  auto failed = std::count_if(findings.begin(), findings.end(),
                              [](const Finding& f) { return f.verdict == Verdict::kFailure; });
  if (!options.json) {
    const auto count = failed == 0 ? std::string("nothing")
                                   : fmt::format("{} thing{}", failed, failed == 1 ? "" : "s");
    page += fmt::format("{} would stop a job\n", count);
  }
  return show_or_fail(page, failed ? 1 : 0, kName);
}

/// What bench/gpu/convergence.py found: docs/gpu-figures.md, "Convergence".
void check_codec(const Settings& settings, Findings& findings) {
  if (settings.text("codec") != "topk") return;
  findings.push_back(
      {"codec", Verdict::kWarning,
       fmt::format("PACELINE_CODEC=topk sends {:g} % of the entries: a small GPT that "
                   "began with it learnt slower than with exact gradients, with AdamW far slower",
                   100 * settings.number("topk_ratio")),
       "compare the loss of a run with PACELINE_CODEC=fp16, which kept up everywhere; "
       "or raise PACELINE_TOPK_RATIO (docs/gpu-figures.md, Convergence)"});
}

/// The source that the job's ranks would take, asked as they ask; nullopt: that shows only where they meet.
std::optional<SecretSource> secret_source(const std::optional<bootstrap::Secret>& found,
                                          const bootstrap::Identity& identity) {
  using bootstrap::Launcher;
  if (found) return found->source;
  if (identity.launcher != Launcher::kNone && identity.size == 1) return SecretSource::kLocal;
  switch (identity.launcher) {
    case Launcher::kNone:
      return std::nullopt;
    case Launcher::kTorch:
    case Launcher::kOpenMpi:
    case Launcher::kHydra:
      return SecretSource::kLauncherSpace;
    case Launcher::kSlurm:
      if (bootstrap::process_environment("PMIX_NAMESPACE")) return SecretSource::kLauncherSpace;
      break;
    case Launcher::kPaceline:
      break;
  }
  if (identity.local_size == identity.size) return SecretSource::kLocal;
  return std::nullopt;
}

std::string all_secret_sources() {
  std::string text;
  for (auto source : {SecretSource::kSetting, SecretSource::kFile, SecretSource::kOpenMpi,
                      SecretSource::kLauncherSpace, SecretSource::kLocal})
    text += "\n- " + bootstrap::describe_secret(source);
  return text;
}

void check_secret(const Settings& settings, Findings& findings) {
  constexpr const char* kMakeSecret =
      "make it once and copy it to every node: openssl rand -hex 32 > FILE; chmod 600 FILE";
  // What is wrong with the launcher's variables is another finding.
  const auto asked = bootstrap::find_identity({}, {}, settings.flag("use_ddp_launcher"));
  const auto identity = asked.is_ok() ? *asked : bootstrap::Identity{};
  const auto secret = bootstrap::find_secret(settings, identity, bootstrap::process_environment);
  if (!secret.is_ok()) {
    const auto& path = settings.text("secret_file");
    struct stat info {};
    const bool others = stat(path.c_str(), &info) == 0 && (info.st_mode & 077) != 0;
    findings.push_back({"secret", Verdict::kFailure, secret.status().message(),
                        others ? fmt::format("chmod 600 {}", path) : std::string(kMakeSecret)});
  } else if (auto source = secret_source(*secret, identity)) {
    findings.push_back({"secret", Verdict::kGood, bootstrap::describe_secret(*source), ""});
  } else if (identity.launcher == bootstrap::Launcher::kNone) {
    findings.push_back({"secret", Verdict::kGood,
                        "no launcher started this; a job takes the first of" + all_secret_sources(),
                        ""});
  } else {
    findings.push_back(
        {"secret", Verdict::kWarning,
         fmt::format("{} brings none to several nodes; a job takes the first of{}",
                     bootstrap::launcher_name(identity.launcher), all_secret_sources()),
         "set PACELINE_SECRET or PACELINE_SECRET_FILE on all ranks, where none of these holds"});
  }
}

int doctor(const Options& options) {
  auto face = parse_face(options.face);
  if (!face.is_ok()) {
    std::cerr << "paceline doctor: " << face.status().message() << "\n";
    return 2;
  }
  return options.settings || options.markdown ? print_settings(options, *face)
                                              : diagnose(options, *face);
}

}  // namespace

void check_settings(Findings& findings, Face face) {
  const auto settings = Settings::load_all(face);
  for (const auto& problem : settings.problems())
    findings.push_back({"settings", Verdict::kFailure, problem.status.message(),
                        "paceline doctor --settings lists all that there are"});
  if (!settings.problems().empty()) return;
  findings.push_back(
      {"settings", Verdict::kGood,
       fmt::format("no contradiction{}", face == Face::kPaceline
                                             ? ""
                                             : fmt::format(" under the face {}", face_name(face))),
       ""});
  if (settings.flag("disable"))
    findings.push_back({"settings", Verdict::kNote,
                        "PACELINE_DISABLE is set: a torch script runs as if Paceline were not "
                        "there, and what asks for it by name may be an error",
                        "unset PACELINE_DISABLE to use Paceline"});
  for (const auto& warning : settings.warnings())
    findings.push_back({"settings", Verdict::kNote, warning, "unset it to silence this"});
  check_codec(settings, findings);
  check_secret(settings, findings);
}

void add_doctor(CLI::App& app, Invocation& invocation) {
  auto* command =
      app.add_subcommand("doctor", "what this machine offers and what is wrong, each with its fix");
  auto options = std::make_shared<Options>();
  command->add_flag("--settings", options->settings,
                    "every setting, its value and where it came from");
  command->add_flag("--markdown", options->markdown, "with --settings: the manual page");
  command->add_flag("--json", options->json, "for programs");
  command->add_option(
      "--face", options->face,
      "whose defaults and variables hold: paceline, perseus, tiacc_training, light, horovod");
  command->callback([options, &invocation] { invocation.exit_code = doctor(*options); });
}

}  // namespace paceline::cli
