// Who this process is, from whatever started it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/settings.h"
#include "base/status.h"
#include "base/types.h"

namespace paceline::bootstrap {

enum class Launcher {
  kNone,      ///< a process on its own, or rank and size handed in by the caller
  kPaceline,  ///< `paceline run`
  kTorch,     ///< torchrun, torch.distributed.launch, or a script that sets torch's variables
  kOpenMpi,   ///< mpirun of Open MPI (PMIx)
  kHydra,     ///< mpirun of MPICH and its relatives (PMI-1)
  kSlurm,     ///< srun
};
const char* launcher_name(Launcher launcher);

struct Identity {
  Launcher launcher = Launcher::kNone;
  Rank rank = 0;
  Rank size = 1;
  Rank local_rank = 0;  ///< as the launcher counts; the table of members decides what nodes are
  Rank local_size = 1;  ///< 0: the launcher does not tell
  /// Where rank 0 can be reached: MASTER_ADDR, the first host of Slurm's list; empty: not told.
  std::string master_host;
  /// The same on all ranks of one start of the job; may be empty. Different after a restart where the launcher tells all
  /// ranks alike of it.
  std::string job;
};

/// Explicit rank and size (both or none) win over the launcher's. kInvalidArgument names the
/// variables that are missing, malformed or contradict each other. `torch_first`: torch's variables
/// win over mpirun's where both are there (the setting use_ddp_launcher); srun's come last, for
/// srun often starts another launcher.
Result<Identity> find_identity(std::optional<Rank> rank, std::optional<Rank> size, bool torch_first,
                               const Environment& get);
Result<Identity> find_identity(std::optional<Rank> rank, std::optional<Rank> size,
                               bool torch_first);

/// "n[1-3,07],login" → n1 n2 n3 n07 login; several brackets a name. At most `limit` names are made.
Result<std::vector<std::string>> expand_nodelist(std::string_view list, std::size_t limit = 65536);

/// "2(x3),1" → 2 for the nodes 0 to 2, 1 for node 3: Slurm's tasks per node.
Result<Rank> tasks_on_node(std::string_view text, std::size_t node);

/// This machine's name, for messages.
std::string host_name();
/// Equal for processes that run under one kernel.
std::string machine_identity();
/// Equal for processes that share a node: boot id and network namespace, so that containers and
/// namespaces with links of their own count as nodes of their own.
std::string node_identity();

}  // namespace paceline::bootstrap
