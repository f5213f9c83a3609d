// The communicator's life: create, describe, abort, destroy.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "bootstrap/identity.h"
#include "bootstrap/kv_store.h"
#include "capi/handle.h"
#include "capi/options.h"
#include "capi/start_line.h"

namespace paceline::capi {
namespace {

Status check(const paceline_comm_options& o) {
  if ((o.rank < 0) != (o.size < 0))
    return {Code::kInvalidArgument, "give both rank and size, or -1 for both"};
  if (o.rank >= 0 && o.rank >= o.size) {
    return {Code::kInvalidArgument,
            fmt::format("rank {} is outside of a job of {} (0 to {})", o.rank, o.size, o.size - 1)};
  }
  if (o.store != nullptr && (o.store->put == nullptr || o.store->get == nullptr))
    return {Code::kInvalidArgument, "the store lacks put or get"};
  if (o.job_rank != nullptr && *o.job_rank < 0)
    return {Code::kInvalidArgument,
            fmt::format("job_rank points to {}; it must be 0 or more, or NULL", *o.job_rank)};
  for (const auto& [name, seconds] : {std::pair("timeout_s", o.timeout_s),
                                      std::pair("operation_timeout_s", o.operation_timeout_s)}) {
    if (seconds < 0 || seconds != seconds)
      return {Code::kInvalidArgument,
              fmt::format("{} is {:g}; it must be positive, or 0", name, seconds)};
  }
  return Status::ok();
}

bool is_failure(paceline_code code) { return code > PACELINE_OK && code <= PACELINE_INTERNAL; }

paceline_code no_failure(const paceline_comm* comm, paceline_code code) {
  return invalid(comm, fmt::format("{} is not the code of a failure", code));
}

/// A communicator of some of the job's ranks has a rank 0 of its own, which is not who speaks for the job. What a
/// launcher says of a smaller job (variables that an image sets, srun around a script that spawns) is of another.
Rank job_rank_of(const paceline_comm_options& o, const Result<bootstrap::Identity>& launched) {
  if (o.job_rank != nullptr) return *o.job_rank;
  const bool told = launched && launched->launcher != bootstrap::Launcher::kNone;
  return told && launched->size >= o.size ? launched->rank : std::max(o.rank, 0);
}

/// Of each rank how it joined, and on rank 0, where asked for more, who else did.
void log_the_job(const paceline_comm& comm, double seconds) {
  const auto& topology = comm.job->topology;
  const auto& self = topology.self();
  log::info("joined as rank {} of {} in {:.2f} s, on node {} of {} (host {}), at {}; {}", self.rank,
            topology.size(), seconds, self.node, topology.node_count, self.host, self.address,
            comm.job->channel->describe());
  if (self.rank != 0) return;
  for (const auto& m : topology.members) {
    log::debug("rank {} is process {} on node {} (host {}), at {}", m.rank, m.pid, m.node, m.host,
               m.address);
  }
}

Status create(const paceline_comm_options& o, paceline_comm** out) {
  PACELINE_RETURN_IF_ERROR(check(o));
  PACELINE_ASSIGN(auto face, parse_face(o.face == nullptr ? "" : o.face));
  PACELINE_ASSIGN(auto settings, Settings::load(face));
  log::set_level(log::level_named(settings.text("log_level")));

  auto comm = std::make_unique<paceline_comm>();
  comm->fork_generation = fork_generation();
  comm->settings = std::move(settings);
  bootstrap::JoinOptions join;
  if (o.rank >= 0) {
    join.rank = o.rank;
    join.size = o.size;
  }
  join.prefix = o.store_prefix == nullptr ? "" : o.store_prefix;
  if (o.store != nullptr) join.store = std::make_shared<bootstrap::StoreKeyValue>(*o.store);
  join.settings = &comm->settings;
  join.timeout_s = o.timeout_s;
  auto launched =
      bootstrap::find_identity(std::nullopt, std::nullopt, comm->settings.flag("use_ddp_launcher"));
  const Rank job_rank = job_rank_of(o, launched);
  log::set_rank(job_rank);
  const SteadyClock clock;
  const Time began = clock.now();
  PACELINE_ASSIGN(comm->job, bootstrap::join(join));

  const auto& topology = comm->job->topology;
  log_the_job(*comm, static_cast<double>(clock.now() - began) / kSecond);
  comm->speaks = speaks(comm->settings, job_rank);
  if (comm->speaks) warn_once(comm->settings.warnings());
  comm->options = engine_options(comm->settings,
                                 o.operation_timeout_s > 0 ? o.operation_timeout_s : o.timeout_s);
  comm->timeout_s = static_cast<double>(comm->options.default_timeout) / kSecond;
  if (launched) comm->job_local_size = launched->local_size;
  comm->engine = engine::make_engine(comm->options, topology, *comm->job->channel);
  comm->workers =
      std::make_unique<Workers>(codec_threads(comm->settings, topology, comm->job_local_size));
  comm->engine->set_workers(comm->workers.get());
  comm->description = start_line(*comm->job, comm->settings,
                                 comm->options);  // before another thread drives the channel
  auto local = std::count_if(topology.members.begin(), topology.members.end(),
                             [&](const auto& m) { return m.node == topology.self().node; });
  comm->runner = std::make_unique<engine::Runner>(
      *comm->engine, *comm->job->channel,
      engine::runner_options_for(static_cast<int>(local),
                                 sharing_ranks(topology, comm->job_local_size)));
  share_link(*comm);
  *out = comm.release();
  return Status::ok();
}

}  // namespace
}  // namespace paceline::capi

using namespace paceline;  // NOLINT: the functions below are the C ABI's
using namespace paceline::capi;

extern "C" {

paceline_code paceline_comm_create(const paceline_comm_options* options, paceline_comm** comm) {
  return guarded(nullptr, [&] {
    if (comm == nullptr) return invalid(nullptr, "the pointer that takes the communicator is null");
    *comm = nullptr;
    paceline_comm_options o{};
    o.rank = o.size = -1;
    if (!take_struct(options, o))
      return invalid(nullptr, "the options are null or lack their struct_size");
    const auto status = create(o, comm);
    return report(*comm, status);
  });
}

paceline_code paceline_comm_destroy(paceline_comm* comm) {
  return guarded(nullptr, [&] {
    if (comm == nullptr) return report(nullptr, Status::ok());
    if (comm->fork_generation != fork_generation())
      return report(comm, usable(comm));  // leaked: its threads are the parent's
    auto status = comm->runner->close(comm->options.default_timeout);
    leave_companions(*comm);
    forget_errors(comm);
    delete comm;
    return report(nullptr, status);
  });
}

paceline_code paceline_comm_abort(paceline_comm* comm, const char* reason) {
  return paceline_comm_abort_as(comm, PACELINE_ABORTED, reason);
}

paceline_code paceline_comm_abort_as(paceline_comm* comm, paceline_code code, const char* reason) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    if (!is_failure(code)) return no_failure(comm, code);
    comm->runner->abort({static_cast<Code>(code),
                         reason == nullptr || *reason == '\0' ? "no reason given" : reason});
    return report(comm, Status::ok());
  });
}

paceline_code paceline_comm_fail(paceline_comm* comm, paceline_code code, const char* sentence) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    if (!is_failure(code)) return no_failure(comm, code);
    comm->runner->adopt({static_cast<Code>(code), sentence == nullptr || *sentence == '\0'
                                                      ? paceline_code_name(code)
                                                      : sentence});
    return report(comm, Status::ok());
  });
}

paceline_code paceline_comm_health(paceline_comm* comm) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    return report(comm, comm->runner->health());
  });
}

paceline_code paceline_comm_hold(paceline_comm* comm, const char* why) {
  if (auto status = usable(comm); !status) return report(comm, status);
  comm->engine->hold(why);
  return PACELINE_OK;
}

paceline_code paceline_comm_identity(const paceline_comm* comm, paceline_identity* identity) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    const auto& t = comm->job->topology;
    paceline_identity out{};
    out.rank = t.rank;
    out.size = t.size();
    out.local_rank = t.self().local_rank;
    out.node = t.self().node;
    out.node_count = t.node_count;
    for (const auto& m : t.members) out.local_size += m.node == t.self().node;
    out.job_local_size = std::max(out.local_size, comm->job_local_size);
    if (!give_struct(out, identity))
      return invalid(comm, "the identity is null or lacks its struct_size");
    return report(comm, Status::ok());
  });
}

const char* paceline_comm_describe(const paceline_comm* comm) {
  if (auto status = usable(comm); !status) {
    report(comm, status);
    return "";
  }
  return comm->description.c_str();
}

paceline_code paceline_comm_stats(const paceline_comm* comm, paceline_stats* stats) {
  return guarded(comm, [&] {
    PACELINE_USABLE(comm);
    auto s = comm->runner->statistics();
    const auto c = counters_with_companions(*comm);
    paceline_stats out{};
    out.operations = s.operations;
    out.payload_sent = c.payload_sent;
    out.payload_received = c.payload_received;
    out.wire_sent = c.wire_sent;
    out.wire_received = c.wire_received;
    out.predicted_link_bytes = s.predicted_link_bytes;
    out.plans_built = s.plans_built;
    out.plans_reused = s.plans_reused;
    out.scratch_bytes = s.scratch_bytes;
    out.residual_bytes = s.residual_bytes;
    if (!give_struct(out, stats))
      return invalid(comm, "the stats are null or lack their struct_size");
    return report(comm, Status::ok());
  });
}

void* paceline_alloc(paceline_comm* comm, size_t bytes) {
  if (auto status = usable(comm); !status) {
    report(comm, status);
    return nullptr;
  }
  void* memory = allocate_shared_memory(*comm, bytes);
  if (memory == nullptr) {
    report(comm, {Code::kResourceExhausted, fmt::format("no memory for {} bytes", bytes)});
  } else {
    report(comm, Status::ok());
  }
  return memory;
}

void paceline_free(paceline_comm* comm, void* memory) {
  if (memory != nullptr && usable(comm)) free_shared_memory(*comm, memory);
}

paceline_code paceline_share(paceline_comm* comm, void* data, size_t bytes) {
  if (auto status = usable(comm); !status) return report(comm, status);
  return report(comm, share_memory(*comm, data, bytes));
}

paceline_code paceline_unshare(paceline_comm* comm, void* data) {
  if (auto status = usable(comm); !status) return report(comm, status);
  return report(comm, unshare_memory(*comm, data));
}
}
