// `paceline run`: starts one process a rank, here and over ssh, and tells each who it is.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "base/clock.h"
#include "base/settings.h"
#include "bootstrap/host_address.h"
#include "bootstrap/kv_server.h"
#include "bootstrap/launch.h"
#include "bootstrap/secret.h"
#include "cli/commands.h"
#include "cli/run_job.h"
#include "cli/run_remote.h"
#include "cli/text/hosts.h"

namespace paceline::cli {
namespace {

using Variables = std::vector<std::pair<std::string, std::string>>;

constexpr int kMostRanks = 1 << 20;  // what a rank's number may be (bootstrap/identity.cc)

struct RunOptions {
  int np = 0;
  std::string hosts;
  std::string hostfile;
  std::vector<std::string> exported;
  bool prefix_output = false;
  std::string output_directory;
  double start_timeout = 0;
  std::string ssh = "ssh";
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

std::string bare_host(const std::string& host) { return host.substr(host.find('@') + 1); }

/// This machine's address as the ranks see it: loopback when all are here, else the one of the route to the first
/// other host, or what the setting `interface` says, by whichever of its names: the ranks go by the same.
Result<bootstrap::HostAddress> launcher_address(const std::vector<Placement>& places) {
  auto remote =
      std::find_if(places.begin(), places.end(), [](auto& place) { return !place.local; });
  if (remote == places.end()) return bootstrap::numeric_address("127.0.0.1", 0);
  PACELINE_ASSIGN(auto addresses, bootstrap::resolve(bare_host(remote->host), 0));
  // What is wrong with the other settings the ranks say.
  const auto settings = Settings::load_all(Face::kPaceline);
  for (const auto& problem : settings.problems())
    if (problem.name == "interface") return problem.status;
  if (const auto& pattern = settings.text("interface"); !pattern.empty()) {
    return bootstrap::choose_interface(pattern, bootstrap::interfaces(),
                                       addresses.front().family() == AF_INET6,
                                       settings.source("interface"));
  }
  return bootstrap::route_source(addresses.front());
}

std::string host_port(const std::string& host, int port) {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

/// -x NAME=VALUE, or NAME with this process's value.
Result<Variables> exported_variables(const RunOptions& options) {
  Variables variables;
  for (const auto& entry : options.exported) {
    auto name = entry.substr(0, entry.find('='));
    auto is_name = !name.empty() &&
                   (std::isalpha(static_cast<unsigned char>(name[0])) || name[0] == '_') &&
                   std::all_of(name.begin(), name.end(),
                               [](unsigned char c) { return std::isalnum(c) || c == '_'; });
    if (!is_name) {
      return Status(Code::kInvalidArgument,
                    fmt::format("-x {}: '{}' is no variable's name", entry, name));
    }
    if (name.size() < entry.size()) {
      variables.emplace_back(name, entry.substr(name.size() + 1));
    } else if (const char* value = std::getenv(name.c_str())) {
      variables.emplace_back(name, value);
    } else {
      return Status(
          Code::kInvalidArgument,
          fmt::format("-x {}: the variable is not set here; give -x {}=VALUE", name, name));
    }
  }
  return variables;
}

/// The parser's own check takes NaN, and names a bound of 300 digits.
std::string is_positive(const std::string& text) {
  double number = 0;
  const bool is_good =
      CLI::detail::lexical_cast(text, number) && std::isfinite(number) && number > 0;
  return is_good ? "" : fmt::format("'{}' is no number above 0", text);
}

bool starts_with_any(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](auto prefix) { return name.starts_with(prefix); });
}

/// What would make a rank think that another launcher started it, or contradict what this one says.
std::vector<std::string> foreign_variables() {
  return {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE",
          "GROUP_RANK", "PACELINE_SECRET_FILE"};
}

/// What a remote rank needs to find programs and to see the same settings; -x adds to it.
Variables forwarded_variables() {
  Variables variables;
  const auto foreign = foreign_variables();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string_view text = *entry;
    auto name = text.substr(0, text.find('='));
    if (std::find(foreign.begin(), foreign.end(), name) != foreign.end()) continue;
    bool ours = starts_with_any(
        name, {"PACELINE_", "PERSEUS_", "LIGHT_", "TIACC_TRAINING_", "HOROVOD_", "NCCL_"});
    if (ours || name == "PATH" || name == "LD_LIBRARY_PATH" || name == "PYTHONPATH" ||
        name == "VIRTUAL_ENV") {
      variables.emplace_back(name, text.substr(std::min(text.size(), name.size() + 1)));
    }
  }
  return variables;
}

Variables rank_variables(const Placement& place, std::size_t size) {
  auto rank = std::to_string(place.rank);
  auto local = std::to_string(place.local_rank);
  auto local_size = std::to_string(place.local_size);
  return {{"PACELINE_RANK", rank},
          {"PACELINE_SIZE", std::to_string(size)},
          {"PACELINE_LOCAL_RANK", local},
          {"PACELINE_LOCAL_SIZE", local_size},
          {"RANK", rank},
          {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", local},
          {"LOCAL_WORLD_SIZE", local_size}};
}

struct Launch {
  std::unique_ptr<bootstrap::KvServer> server;
  std::vector<JobProcess> processes;
};

Result<Launch> prepare(const RunOptions& options, const std::vector<std::string>& words) {
  if (options.ssh.find_first_not_of(" \t\n") == std::string::npos)
    return Status(Code::kInvalidArgument, "--ssh names no program; give one, as 'ssh -p 2222'");
  PACELINE_ASSIGN(auto places, placements(options));
  PACELINE_ASSIGN(auto exported, exported_variables(options));
  PACELINE_ASSIGN(auto own, launcher_address(places));
  const char* given = std::getenv("PACELINE_SECRET");
  std::string secret = given != nullptr && *given != '\0' ? given : bootstrap::make_secret();

  Launch launch;
  PACELINE_ASSIGN(launch.server,
                  bootstrap::KvServer::start(
                      {.address = own.host(), .secret = bootstrap::secret_from_text(secret)}));
  Variables common;
  common.emplace_back("PACELINE_RENDEZVOUS", host_port(own.host(), launch.server->port()));
  common.emplace_back("PACELINE_SECRET", secret);
  common.emplace_back("PACELINE_JOB_ID", bootstrap::make_secret().substr(0, 16));
  bool first_is_here = places.front().local;
  common.emplace_back("MASTER_ADDR", first_is_here ? own.host() : bare_host(places.front().host));
  PACELINE_ASSIGN(auto port, bootstrap::free_port(own.host()));
  common.emplace_back("MASTER_PORT", std::to_string(port));
  if (options.start_timeout > 0) {
    common.emplace_back("PACELINE_START_TIMEOUT", fmt::format("{:g}", options.start_timeout));
  }
  std::error_code no_directory;
  auto directory = std::filesystem::current_path(no_directory).string();
  for (const auto& place : places) {
    JobProcess process;
    process.rank = place.rank;
    process.where = place.host;
    Variables variables = place.local ? Variables() : forwarded_variables();
    for (const auto* more : {&common, &exported})
      variables.insert(variables.end(), more->begin(), more->end());
    for (auto& entry : rank_variables(place, places.size())) variables.push_back(std::move(entry));
    if (place.local) {
      process.command = {
          .arguments = words, .environment = variables, .unset = foreign_variables()};
    } else {
      process.remote = true;
      process.first_input = remote_script(variables, foreign_variables(), directory, words);
      process.command.arguments =
          ssh_arguments(options.ssh, place.host, process.first_input.size());
    }
    launch.processes.push_back(std::move(process));
  }
  if (places.front().local && ::isatty(0) == 0) launch.processes.front().command.input = 0;
  return launch;
}

Result<int> run(const RunOptions& options, const std::vector<std::string>& words) {
  PACELINE_ASSIGN(auto launch, prepare(options, words));
  JobOptions job;
  job.prefix_output = options.prefix_output;
  job.output_directory = options.output_directory;
  SteadyClock clock;
  job.service_fd = launch.server->poll_fd();
  job.service = [&] { launch.server->serve(clock.now()); };
  return run_job(launch.processes, job);
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
                                     "--start-timeout",
                                     "--ssh"};
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
      ->check(CLI::Range(1, kMostRanks));
  command->add_option("-H,--host,--hosts", options->hosts, "host:slots,… (default: this machine)");
  command->add_option("--hostfile,--machinefile", options->hostfile,
                      "file with one 'host slots=N' a line");
  command->add_option("-x", options->exported, "NAME or NAME=VALUE: pass a variable to all ranks")
      ->allow_extra_args(false);
  command->add_flag("--prefix-output", options->prefix_output, "mark each line with its rank");
  command->add_option("--output-filename", options->output_directory,
                      "also write DIR/rank.N/stdout and stderr");
  command
      ->add_option("--start-timeout", options->start_timeout,
                   "seconds until all ranks must have joined (default: PACELINE_START_TIMEOUT)")
      ->check(is_positive);
  command->add_option("--ssh", options->ssh, "the ssh program with its options: 'ssh -p 2222'");
  command->footer(
      "paceline run [OPTIONS] [--] COMMAND [ARGUMENTS…]\n"
      "One dash is enough for -np, -host, -hostfile, -machinefile and -output-filename, as "
      "mpirun's.\n"
      "Hosts other than this one are reached by ssh without passwords.");
  command->callback([options, &invocation] {
    if (invocation.command.empty()) throw CLI::RequiredError("COMMAND");
    auto code = run(*options, invocation.command);
    if (!code) fmt::print(stderr, "paceline run: {}\n", code.status().message());
    invocation.exit_code = code ? *code : 2;
  });
}

}  // namespace paceline::cli
