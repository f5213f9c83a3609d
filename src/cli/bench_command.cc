// `paceline bench`: the flags' way into cli/bench/.
#include <memory>

#include "cli/bench/bench.h"
#include "cli/commands.h"

namespace paceline::cli {

void add_bench(CLI::App& app, Invocation& invocation) {
  auto* command = app.add_subcommand("bench", "Measures collectives, beside Gloo if asked");
  command->footer("Example: paceline bench allreduce --np 2 --bytes 4,64MiB --vs gloo");
  auto options = std::make_shared<bench::Options>();
  bench::declare(*command, *options);
  command->callback([options, &invocation] { invocation.exit_code = bench::bench_main(*options); });
}

}  // namespace paceline::cli
