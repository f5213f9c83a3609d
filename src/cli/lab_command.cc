// `paceline lab` and `paceline lab-bytes`: the flags' way into cli/lab/.
#include <memory>

#include "cli/commands.h"
#include "cli/lab/lab.h"

namespace paceline::cli {

void add_lab(CLI::App& app, Invocation& invocation) {
  auto* command = app.add_subcommand(
      "lab", "Runs a command on a small cluster of network namespaces with shaped links");
  command->footer(
      "Ranks are told who they are as torchrun tells them; PACELINE_LAB_BYTES names a socket with "
      "the links' byte counters.\nExample: paceline lab --nodes 4 --rate 1gbit -- python train.py");
  auto flags = std::make_shared<lab::Flags>();
  flags->declare(*command);
  command->callback(
      [flags, &invocation] { invocation.exit_code = lab::lab_main(*flags, invocation.command); });
}

void add_lab_bytes(CLI::App& app, Invocation& invocation) {
  app.add_subcommand("lab-bytes", "Inside a lab: prints what the links have carried, as JSON")
      ->callback([&invocation] { invocation.exit_code = lab::lab_bytes_main(); });
}

}  // namespace paceline::cli
