// Which ranks run where: `-H host:slots,…`, host files, and their assignment.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace paceline::cli {

struct HostSlots {
  std::string host;
  int slots = 1;
};

/// "a:4,b,[fd00::1]:2,user@c:8" (slots default to 1). kInvalidArgument quotes the entry that is
/// wrong.
Result<std::vector<HostSlots>> parse_hosts(std::string_view text);
/// One host a line: "host slots=4" (Open MPI), "host:4" (MPICH, Horovod) or "host"; '#' begins a
/// comment.
Result<std::vector<HostSlots>> read_hostfile(const std::string& path);

/// One process of the job.
struct Placement {
  int rank = 0;
  int local_rank = 0;
  int local_size = 1;
  std::string host;
  bool local = true;  ///< on this machine: no ssh
};

/// Fills hosts in order, slots first. kInvalidArgument when np exceeds the slots (with how many
/// there are). np 0: one process a slot.
Result<std::vector<Placement>> place(const std::vector<HostSlots>& hosts, int np);

/// "localhost", an address of one of this machine's interfaces, or its own name, whole or short.
bool is_this_host(const std::string& host);

}  // namespace paceline::cli
