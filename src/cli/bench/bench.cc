#include "cli/bench/bench.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>

#include "bootstrap/identity.h"
#include "cli/bench/links.h"
#include "cli/bench/measure.h"
#include "cli/bench/ranks.h"
#include "cli/bench/report.h"
#include "cli/bench/show_plan.h"

namespace paceline::bench {
namespace {

int fail(const Status& status) {
  std::fprintf(stderr, "paceline bench: %s\n", status.to_string().c_str());
  return 1;
}

/// As the communicator will find out.
Result<bootstrap::Identity> who_started() {
  PACELINE_ASSIGN(auto settings, Settings::load(Face::kPaceline));
  return bootstrap::find_identity({}, {}, settings.flag("use_ddp_launcher"));
}

// The same words under `paceline run`, without --np.
int start_ranks(int np) {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string all((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::string> words;
  for (std::size_t at = 0; at < all.size(); at = all.find('\0', at) + 1)
    words.emplace_back(all.c_str() + at);
  std::string self = "/proc/self/exe";
  char resolved[4096];
  if (ssize_t n = readlink(self.c_str(), resolved, sizeof resolved - 1); n > 0)
    self.assign(resolved, static_cast<std::size_t>(n));
  std::vector<std::string> command = {self, "run", "-np", std::to_string(np), "--", self};
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (words[i] == "--np") {
      ++i;
    } else if (words[i].rfind("--np=", 0) != 0) {
      command.push_back(words[i]);
    }
  }
  std::vector<char*> argv;
  argv.reserve(command.size() + 1);
  for (auto& w : command) argv.push_back(w.data());
  argv.push_back(nullptr);
  execv(self.c_str(), argv.data());
  return fail(
      {Code::kUnavailable, fmt::format("{} can't be started: {}", self, std::strerror(errno))});
}

std::vector<uint64_t> ladder() {
  std::vector<uint64_t> out = {4};
  for (uint64_t b = 1024; b <= 64 << 20; b *= 4) out.push_back(b);
  return out;
}

Status bench_on(paceline_comm* comm, const Options& options) {
  paceline_identity who{};
  who.struct_size = sizeof who;
  if (paceline_code code = paceline_comm_identity(comm, &who); code != PACELINE_OK) {
    return {static_cast<Code>(code), paceline_error(comm)};
  }
  PACELINE_ASSIGN(double link, link_rate(options.link));
  const auto sizes = options.bytes.empty() ? ladder() : options.bytes;
  if (options.plan) return show_plans(comm, who, options, sizes, link);
  std::optional<Report> report;
  Status opened;
  if (who.rank == 0) {
    auto made = Report::open(options, who, paceline_comm_describe(comm), link);
    opened = made.status();
    if (made) report = std::move(*made);
  }
  PACELINE_RETURN_IF_ERROR(all_ok(comm, who.rank, opened, "rank 0 can't report"));
  PACELINE_ASSIGN(auto seed, share(comm, who.rank, std::to_string(std::random_device{}())));
  std::mt19937_64 random(std::stoull(seed));
  std::unique_ptr<GlooPeer> peer;
  if (!options.versus.empty()) {
    auto started = GlooPeer::start(
        options, who, [&](std::string text) { return share(comm, who.rank, std::move(text)); });
    PACELINE_RETURN_IF_ERROR(
        all_ok(comm, who.rank, started.status(), "the peer did not start on every rank"));
    peer = std::move(*started);
  }
  for (uint64_t bytes : sizes) {
    PACELINE_ASSIGN(auto row, measure(comm, who, options, bytes, peer.get(), random));
    if (report) PACELINE_RETURN_IF_ERROR(report->add(row));
  }
  return Status::ok();
}

}  // namespace

int bench_main(const Options& options) {
  const auto identity = who_started();
  if (!identity) return fail(identity.status());
  if (identity->launcher == bootstrap::Launcher::kNone) {
    if (options.np > 0) return start_ranks(options.np);
    return fail({Code::kInvalidArgument,
                 "no launcher told this process its rank: give --np N, or start it by `paceline "
                 "run -np N -- paceline bench …`, mpirun, torchrun or `paceline lab`"});
  }
  if (options.np > 0 && options.np != identity->size) {
    return fail(
        {Code::kInvalidArgument,
         fmt::format("--np {0} starts {0} ranks, but {1} says that this is one of {2}: leave "
                     "--np out, or have {1} start {0}",
                     options.np, bootstrap::launcher_name(identity->launcher), identity->size)});
  }
  signal(SIGPIPE, SIG_IGN);
  paceline_comm_options create{};
  create.struct_size = sizeof create;
  create.rank = create.size = -1;
  create.store_prefix = "bench";
  paceline_comm* comm = nullptr;
  if (paceline_code code = paceline_comm_create(&create, &comm); code != PACELINE_OK) {
    return fail({static_cast<Code>(code), paceline_error(nullptr)});
  }
  Status status = bench_on(comm, options);
  if (!status) {
    paceline_comm_abort(comm, status.message().c_str());
    paceline_comm_destroy(comm);
    return fail(status);
  }
  paceline_comm_destroy(comm);
  return 0;
}

}  // namespace paceline::bench
