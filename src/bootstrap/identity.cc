#include "bootstrap/identity.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <fstream>

namespace paceline::bootstrap {
namespace {

constexpr Rank kMaxSize = 1 << 20;

Status invalid(std::string text) { return {Code::kInvalidArgument, std::move(text)}; }

/// The variables by which one launcher tells a process who it is. Optional ones may be empty.
struct Variables {
  Launcher launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* job;
};

constexpr Variables kPacelineVariables{Launcher::kPaceline,   "PACELINE_RANK",
                                       "PACELINE_SIZE",       "PACELINE_LOCAL_RANK",
                                       "PACELINE_LOCAL_SIZE", "PACELINE_JOB_ID"};
constexpr Variables kTorchVariables{Launcher::kTorch,   "RANK",
                                    "WORLD_SIZE",       "LOCAL_RANK",
                                    "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"};
constexpr Variables kOpenMpiVariables{Launcher::kOpenMpi,           "OMPI_COMM_WORLD_RANK",
                                      "OMPI_COMM_WORLD_SIZE",       "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"};
constexpr Variables kHydraVariables{Launcher::kHydra,  "PMI_RANK",        "PMI_SIZE",
                                    "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"};
// SLURM_NTASKS is the allocation's, SLURM_STEP_NUM_TASKS the running step's.
constexpr Variables kSlurmVariables{
    Launcher::kSlurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID"};
constexpr Variables kSlurmOldVariables{
    Launcher::kSlurm, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID"};

std::optional<std::string> read(const Environment& get, const char* name) {
  if (*name == '\0') return std::nullopt;
  auto value = get(name);
  if (value && value->empty()) return std::nullopt;
  return value;
}

Result<Rank> number(const char* name, const std::string& text, Rank low, Rank high) {
  Rank value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    return invalid(fmt::format("{}='{}': expected a number from {} to {}", name, text, low, high));
  }
  return value;
}

Status check_rank(const std::string& rank_name, Rank rank, const std::string& size_name,
                  Rank size) {
  if (rank < size) return {};
  return invalid(fmt::format("{}={} but {}={}: ranks run from 0 to {}", rank_name, rank, size_name,
                             size, size - 1));
}

/// nullopt: this launcher did not start us.
Result<std::optional<Identity>> from(const Variables& names, const Environment& get) {
  auto rank = read(get, names.rank);
  auto size = read(get, names.size);
  if (!rank && !size) return std::optional<Identity>();
  if (!rank || !size) {
    return invalid(fmt::format("{}={} is set but {} is not: {} sets both",
                               rank ? names.rank : names.size, rank ? *rank : *size,
                               rank ? names.size : names.rank, launcher_name(names.launcher)));
  }
  Identity identity;
  identity.launcher = names.launcher;
  PACELINE_ASSIGN(identity.rank, number(names.rank, *rank, 0, kMaxSize));
  PACELINE_ASSIGN(identity.size, number(names.size, *size, 1, kMaxSize));
  PACELINE_RETURN_IF_ERROR(check_rank(names.rank, identity.rank, names.size, identity.size));
  if (auto text = read(get, names.local_rank)) {
    PACELINE_ASSIGN(identity.local_rank, number(names.local_rank, *text, 0, kMaxSize));
  }
  identity.local_size = 0;
  if (auto text = read(get, names.local_size)) {
    PACELINE_ASSIGN(identity.local_size, number(names.local_size, *text, 1, kMaxSize));
    PACELINE_RETURN_IF_ERROR(
        check_rank(names.local_rank, identity.local_rank, names.local_size, identity.local_size));
  }
  identity.job = read(get, names.job).value_or("");
  return std::optional<Identity>(identity);
}

/// `paceline run` exports -1 nowhere, but the settings' default may be spelt out by a user.
Result<std::optional<Identity>> from_paceline(const Environment& get) {
  if (get("PACELINE_RANK") == "-1" && get("PACELINE_SIZE").value_or("-1") == "-1") {
    return std::optional<Identity>();
  }
  return from(kPacelineVariables, get);
}

Result<std::optional<Identity>> from_torch(const Environment& get) {
  PACELINE_ASSIGN(auto identity, from(kTorchVariables, get));
  if (identity) {
    // Not TORCHELASTIC_RESTART_COUNT: every agent counts the failures of its own workers, others' not (starts.h).
    identity->master_host = read(get, "MASTER_ADDR").value_or("");
  }
  return identity;
}

/// Which of the tasks of its node this one is, and how many there are.
Status read_slurm_place(const Environment& get, Identity& identity) {
  if (auto text = read(get, kSlurmVariables.local_rank)) {
    PACELINE_ASSIGN(identity.local_rank, number(kSlurmVariables.local_rank, *text, 0, kMaxSize));
  }
  const char* name = "SLURM_STEP_TASKS_PER_NODE";
  auto tasks = read(get, name);
  if (!tasks) tasks = read(get, name = "SLURM_TASKS_PER_NODE");
  auto node = read(get, "SLURM_NODEID");
  if (!tasks || !node) return {};
  PACELINE_ASSIGN(auto index, number("SLURM_NODEID", *node, 0, kMaxSize));
  auto here = tasks_on_node(*tasks, static_cast<std::size_t>(index));
  if (!here) return invalid(fmt::format("{}='{}': {}", name, *tasks, here.status().message()));
  // An allocation's variable may describe more than this step.
  if (*here > identity.local_rank && *here <= identity.size) identity.local_size = *here;
  return {};
}

/// Hydra starts a single process with PMI_FD alone when it is not told a rank.
Result<std::optional<Identity>> from_hydra(const Environment& get) {
  if (!read(get, "PMI_FD") && !read(get, "PMI_PORT")) return std::optional<Identity>();
  PACELINE_ASSIGN(auto identity, from(kHydraVariables, get));
  // srun --mpi=pmi2 speaks the same language, and says where a task is in its own words.
  if (identity && !read(get, kHydraVariables.local_rank) &&
      read(get, kSlurmVariables.rank) == read(get, kHydraVariables.rank))
    PACELINE_RETURN_IF_ERROR(read_slurm_place(get, *identity));
  return identity;
}

Result<std::optional<Identity>> from_slurm(const Environment& get) {
  // A batch script has SLURM_PROCID=0 too, without being started by srun: then it is a process on
  // its own.
  if (!read(get, "SLURM_PROCID") || !read(get, "SLURM_STEP_ID")) return std::optional<Identity>();
  bool step = read(get, "SLURM_STEP_NUM_TASKS").has_value();
  PACELINE_ASSIGN(auto identity, from(step ? kSlurmVariables : kSlurmOldVariables, get));
  if (!identity) return identity;
  PACELINE_RETURN_IF_ERROR(read_slurm_place(get, *identity));
  auto list = read(get, "SLURM_STEP_NODELIST");
  if (!list) list = read(get, "SLURM_JOB_NODELIST");
  if (!list) list = read(get, "SLURM_NODELIST");
  if (list) {
    // Tasks are placed in the list's order, so that rank 0 runs on the first host.
    PACELINE_ASSIGN(auto hosts, expand_nodelist(*list));
    // Where all of them are here, they need not go by a name that may lead to the network.
    identity->master_host = identity->local_size == identity->size ? "127.0.0.1" : hosts.front();
  }
  identity->job += "." + read(get, "SLURM_STEP_ID").value_or("0") + "." +
                   read(get, "SLURM_RESTART_COUNT").value_or("0");
  return identity;
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

const char* launcher_name(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone:
      return "none";
    case Launcher::kPaceline:
      return "paceline run";
    case Launcher::kTorch:
      return "torch's launcher";
    case Launcher::kOpenMpi:
      return "Open MPI";
    case Launcher::kHydra:
      return "MPICH";
    case Launcher::kSlurm:
      return "Slurm";
  }
  return "unknown";
}

Result<Identity> find_identity(std::optional<Rank> rank, std::optional<Rank> size, bool torch_first,
                               const Environment& get) {
  if (rank.has_value() != size.has_value()) {
    return invalid(fmt::format("{} was given but {} was not: give both or none",
                               rank ? "rank" : "size", rank ? "size" : "rank"));
  }
  if (size && (*size < 1 || *size > kMaxSize || *rank < 0)) {
    return invalid(fmt::format("rank {} of size {}: size must be from 1 to {}, rank from 0", *rank,
                               *size, kMaxSize));
  }
  if (rank) PACELINE_RETURN_IF_ERROR(check_rank("rank", *rank, "size", *size));

  using Source = Result<std::optional<Identity>> (*)(const Environment&);
  Source mpi = [](const Environment& env) { return from(kOpenMpiVariables, env); };
  const Source torch_then_mpi[] = {from_paceline, from_torch, mpi, from_hydra, from_slurm};
  const Source mpi_then_torch[] = {from_paceline, mpi, from_hydra, from_torch, from_slurm};
  for (auto source : torch_first ? torch_then_mpi : mpi_then_torch) {
    auto found = source(get);
    if (!found && rank) continue;  // the caller knows better than a broken environment
    if (!found) return found.status();
    if (!*found) continue;
    Identity identity = **found;
    bool same = !rank || (identity.rank == *rank && identity.size == *size);
    if (same) return identity;
  }
  Identity identity;
  if (rank) {
    identity.rank = *rank;
    identity.size = *size;
    identity.master_host = read(get, "MASTER_ADDR").value_or("");
  }
  return identity;
}

Result<Identity> find_identity(std::optional<Rank> rank, std::optional<Rank> size,
                               bool torch_first) {
  return find_identity(rank, size, torch_first, [](const std::string& name) {
    const char* value = std::getenv(name.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
}

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  return name;
}

std::string machine_identity() {
  auto boot = first_line("/proc/sys/kernel/random/boot_id");
  return boot.empty() ? host_name() : boot;  // /proc may be hidden in a container
}

std::string node_identity() {
  struct stat space {};
  auto inode = ::stat("/proc/thread-self/ns/net", &space) == 0 ? space.st_ino : 0;
  return fmt::format("{}/{}", machine_identity(), inode);
}

}  // namespace paceline::bootstrap
