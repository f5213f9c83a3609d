// `paceline run`: starts one process a rank, here and over ssh, and tells each who it is.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <random>

#include "cli/commands.h"
#include "cli/run_hosts.h"
#include "cli/run_job.h"

namespace paceline::cli {
namespace {

struct RunOptions {
  int np = 0;
  std::string hosts;
  std::string hostfile;
  std::vector<std::string> exported;
  bool prefix_output = false;
  std::string output_directory;
  double start_timeout = 0;
};

Result<std::vector<Placement>> placements(const RunOptions& options) {
  if (!options.hosts.empty() && !options.hostfile.empty()) {
    return Status(Code::kInvalidArgument, "-H and --hostfile were both given: keep one");
  }
  std::vector<HostSlots> hosts;
  if (!options.hosts.empty()) {
    PACELINE_ASSIGN(hosts, parse_hosts(options.hosts));
  } else if (!options.hostfile.empty()) {
    PACELINE_ASSIGN(hosts, read_hostfile(options.hostfile));
  } else {
    hosts.push_back({"localhost", std::max(1, options.np)});
  }
  return place(hosts, options.np);
}

std::string random_hex(int bytes) {
  std::random_device source;
  std::string text;
  for (int i = 0; i < bytes; ++i) text += fmt::format("{:02x}", source() & 0xff);
  return text;
}

Result<int> run(const RunOptions& options, const std::vector<std::string>& words) {
  PACELINE_ASSIGN(auto places, placements(options));
  std::vector<std::pair<std::string, std::string>> common;
  common.emplace_back("PACELINE_SIZE", std::to_string(places.size()));
  common.emplace_back("PACELINE_JOB_ID", random_hex(8));
  std::vector<JobProcess> processes;
  for (const auto& place : places) {
    JobProcess process;
    process.rank = place.rank;
    process.where = place.host;
    process.command.arguments = words;
    process.command.environment = common;
    process.command.environment.emplace_back("PACELINE_RANK", std::to_string(place.rank));
    process.command.environment.emplace_back("PACELINE_LOCAL_RANK",
                                             std::to_string(place.local_rank));
    process.command.environment.emplace_back("PACELINE_LOCAL_SIZE",
                                             std::to_string(place.local_size));
    processes.push_back(std::move(process));
  }
  JobOptions job;
  job.prefix_output = options.prefix_output;
  job.output_directory = options.output_directory;
  return run_job(processes, job);
}

}  // namespace

std::vector<std::string> normalise_run_arguments(const std::vector<std::string>& arguments) {
  constexpr std::array kWithValue = {"-n",
                                     "--np",
                                     "-H",
                                     "--host",
                                     "--hosts",
                                     "-x",
                                     "--hostfile",
                                     "--machinefile",
                                     "--output-filename",
                                     "--start-timeout"};
  constexpr std::array kOneDash = {"-np", "-host", "-hostfile", "-machinefile", "-output-filename"};
  std::vector<std::string> words{arguments[0]};
  auto rest = arguments.begin() + 1;
  for (; rest != arguments.end() && rest->starts_with("-") && *rest != "--"; ++rest) {
    bool one_dash = std::find(kOneDash.begin(), kOneDash.end(), *rest) != kOneDash.end();
    words.push_back(one_dash ? "-" + *rest : *rest);
    bool with_value =
        std::find(kWithValue.begin(), kWithValue.end(), words.back()) != kWithValue.end();
    if (with_value && std::next(rest) != arguments.end()) words.push_back(*++rest);
  }
  if (rest != arguments.end() && *rest != "--") words.emplace_back("--");
  words.insert(words.end(), rest, arguments.end());
  return words;
}

void add_run(CLI::App& app, Invocation& invocation) {
  auto options = std::make_shared<RunOptions>();
  auto* command = app.add_subcommand("run", "Start a command on every rank of a job");
  command->add_option("-n,--np", options->np, "number of processes (default: all slots)")
      ->check(CLI::PositiveNumber);
  command->add_option("-H,--host,--hosts", options->hosts, "host:slots,… (default: this machine)");
  command->add_option("--hostfile,--machinefile", options->hostfile,
                      "file with one 'host slots=N' a line");
  command->add_option("-x", options->exported, "NAME or NAME=VALUE: pass a variable to all ranks")
      ->allow_extra_args(false);
  command->add_flag("--prefix-output", options->prefix_output, "mark each line with its rank");
  command->add_option("--output-filename", options->output_directory,
                      "also write DIR/rank.N/stdout and stderr");
  command->add_option("--start-timeout", options->start_timeout,
                      "seconds until all ranks must have joined (default: PACELINE_START_TIMEOUT)");
  command->footer("paceline run [OPTIONS] [--] COMMAND [ARGUMENTS…]");
  command->callback([options, &invocation] {
    if (invocation.command.empty()) throw CLI::RequiredError("COMMAND");
    auto code = run(*options, invocation.command);
    if (!code) fmt::print(stderr, "paceline run: {}\n", code.status().message());
    invocation.exit_code = code ? *code : 2;
  });
}

}  // namespace paceline::cli
