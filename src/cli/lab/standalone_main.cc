#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "cli/lab/lab.h"

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  auto mark = std::find(words.begin(), words.end(), "--");
  std::vector<std::string> command;
  if (mark != words.end()) command.assign(mark + 1, words.end());
  words.erase(mark, words.end());
  CLI::App app("paceline", "paceline");
  app.require_subcommand(1);
  paceline::lab::Flags flags;
  auto* lab = app.add_subcommand("lab", "runs a command on a small cluster with shaped links");
  flags.declare(*lab);
  auto* bytes = app.add_subcommand("lab-bytes", "inside a lab: bytes on the links, as JSON");
  std::reverse(words.begin(), words.end());
  try {
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (bytes->parsed()) return paceline::lab::lab_bytes_main();
  return paceline::lab::lab_main(flags, command);
}
