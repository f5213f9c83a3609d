#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iostream>
#include <sstream>

#include "cli/commands.h"
#include "cli/standard_output.h"
#include "paceline/comm.h"

namespace {

constexpr paceline::cli::AddCommand kCommands[] = {
    paceline::cli::add_run,       paceline::cli::add_doctor, paceline::cli::add_lab,
    paceline::cli::add_lab_bytes, paceline::cli::add_bench,
};

/// A socket or a pipe that is opened later must not become standard input or output because the caller has closed that
/// one: ranks' lines would be written into it, and the job would wait for it forever.
void fill_standard_descriptors() {
  for (int descriptor = 0; descriptor < 3; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    [[maybe_unused]] int null = ::open("/dev/null", descriptor == 0 ? O_RDONLY : O_WRONLY);
  }
}

/// The parser alone would only say that a command is missing.
bool is_no_command(const CLI::App& app, const std::vector<std::string>& words) {
  if (words.empty() || words[0].starts_with("-")) return false;
  std::string known;
  for (const auto* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == words[0]) return false;
    known += (known.empty() ? "" : ", ") + command->get_name();
  }
  std::fprintf(stderr, "paceline: '%s' is no command; there are %s (paceline COMMAND --help)\n",
               words[0].c_str(), known.c_str());
  return true;
}

int run_main(int argc, char** argv) {
  CLI::App app("Paceline: distributed training, fast on plain Ethernet", "paceline");
  app.set_version_flag("--version", std::string("paceline ") + paceline_version());
  app.require_subcommand(1);
  paceline::cli::Invocation invocation;
  for (auto add : kCommands) add(app, invocation);

  std::vector<std::string> words(argv + 1, argv + argc);
  if (is_no_command(app, words)) return 2;
  if (!words.empty() && words[0] == "run") words = paceline::cli::normalise_run_arguments(words);
  auto mark = std::find(words.begin(), words.end(), "--");
  if (mark != words.end()) invocation.command.assign(mark + 1, words.end());
  words.erase(mark, words.end());
  std::reverse(words.begin(), words.end());  // the order CLI11 takes
  try {
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    std::ostringstream page;
    const int code = app.exit(error, page, std::cerr) == 0 ? 0 : 2;
    return paceline::cli::show_or_fail(page.str(), code, "paceline");
  }
  return invocation.exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    fill_standard_descriptors();
    return run_main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "paceline: %s\n", error.what());
    return 1;
  }
}
