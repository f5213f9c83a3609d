// Communicators beside another one: the same ranks over more connections, with a thread more.
//
// The first one is how they meet. What a rank publishes to be found (its address, rank 0's secret) goes round in an
// all-gather of the primary, so no store of the caller's has to outlive its creation, and nobody takes part who has not
// proved the job's secret there.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/crc32c.h"
#include "bootstrap/key_rows.h"
#include "bootstrap/members.h"
#include "capi/handle.h"
#include "capi/options.h"
#include "capi/start_line.h"

namespace paceline::capi {
namespace {

/// A key-value space whose fence() is an all-gather of what was put since the last one.
class PrimarySpace final : public bootstrap::KeyValue {
 public:
  PrimarySpace(paceline_comm& primary, Time timeout) : primary_(primary), timeout_(timeout) {}

  Status put(const std::string& key, const std::string& value) override {
    unsent_.emplace_back(key, value);
    return Status::ok();
  }

  Status fence() override {
    const auto mine = bootstrap::encode_row(std::exchange(unsent_, {}));
    const auto ranks = static_cast<size_t>(primary_.job->topology.size());
    const uint64_t bytes = mine.size();
    std::vector<uint64_t> counts(ranks);
    PACELINE_RETURN_IF_ERROR(gather(DType::kInt64, &bytes, 1, counts.data(), {}));
    uint64_t all = 0;
    for (auto& n : counts) all += n = std::min<uint64_t>(n, kLongestRow);
    std::vector<std::byte> rows(all);
    PACELINE_RETURN_IF_ERROR(gather(DType::kUInt8, mine.data(), bytes, rows.data(), counts));
    PACELINE_ASSIGN(auto pairs, bootstrap::parse_rows(rows));
    for (auto& [key, value] : pairs) values_[std::move(key)] = std::move(value);
    return Status::ok();
  }

  Result<std::optional<std::string>> get(const std::string& key) override {
    auto found = values_.find(key);
    if (found != values_.end()) return std::optional(found->second);
    // Who waits for ranks that will not come looks here for why.
    auto health = primary_.runner->health();
    if (health || !key.ends_with("failed")) return std::optional<std::string>();
    auto note = bootstrap::encode_note(
        {.kind = bootstrap::NoteKind::kFailed, .code = health.code(), .text = health.message()});
    return std::optional<std::string>({reinterpret_cast<const char*>(note.data()), note.size()});
  }

  Status poll(Time) override { return primary_.runner->health(); }
  [[nodiscard]] std::string describe() const override { return "the communicator beside it"; }
  [[nodiscard]] bool is_private() const override { return true; }

 private:
  static constexpr uint64_t kLongestRow = 4 * (bootstrap::kKeyLimit + bootstrap::kValueLimit);

  Status gather(DType dtype, const void* input, uint64_t count, void* output,
                const std::vector<uint64_t>& counts) {
    engine::Operation o;
    o.collective = plan::Collective::kAllGather;
    o.dtype = dtype;
    o.input = input;
    o.output = output;
    o.count = count;
    o.counts = counts;
    o.name = "addresses of a companion";
    o.timeout = timeout_;
    PACELINE_ASSIGN(auto outcome, primary_.runner->run(o));
    return outcome.status;
  }

  paceline_comm& primary_;
  Time timeout_;
  bootstrap::KeyValues unsent_;
  std::map<std::string, std::string> values_;
};

Result<std::unique_ptr<paceline_comm>> make_companion(paceline_comm& primary) {
  const auto& topology = primary.job->topology;
  auto comm = std::make_unique<paceline_comm>();
  comm->fork_generation = primary.fork_generation;
  comm->settings = primary.settings;
  comm->options = primary.options;
  comm->timeout_s = primary.timeout_s;
  comm->job_local_size = primary.job_local_size;
  bootstrap::JoinOptions join;
  join.rank = topology.rank;
  join.size = topology.size();
  // Another than the primary's, for peers that connect to the wrong port of this job.
  join.prefix = fmt::format("beside {:08x}", crc32c(std::as_bytes(std::span(primary.job->id))));
  join.settings = &comm->settings;
  join.store =
      std::make_shared<PrimarySpace>(primary, to_time(comm->settings.number("start_timeout")));
  PACELINE_ASSIGN(comm->job, bootstrap::join_as(join, primary.companions_made++));
  const auto& t = comm->job->topology;
  if (t.self().node != topology.self().node || t.node_count != topology.node_count)
    return Status(Code::kInternal, "the ranks stand elsewhere than in the communicator beside it");
  comm->engine = engine::make_engine(comm->options, t, *comm->job->channel);
  comm->description = start_line(*comm->job, comm->settings, comm->options);
  const auto local = std::count_if(t.members.begin(), t.members.end(),
                                   [&](const auto& m) { return m.node == t.self().node; });
  // Each companion adds a thread a rank to the node's.
  const auto threads = static_cast<int>(local) * (primary.companions_made + 1);
  const int sharing = sharing_ranks(t, comm->job_local_size) * (primary.companions_made + 1);
  comm->runner = std::make_unique<engine::Runner>(*comm->engine, *comm->job->channel,
                                                  engine::runner_options_for(threads, sharing));
  return comm;
}

Status create_companion(paceline_comm& primary, paceline_comm** out) {
  if (primary.primary != nullptr)
    return {Code::kInvalidArgument, "a companion has no companions: ask the first communicator"};
  auto made = make_companion(primary);
  if (!made) {
    // Others may wait for this rank, in the primary or on their way to it.
    primary.runner->abort({made.status().code(),
                           fmt::format("a companion can't be made: {}", made.status().message())});
    return made.status();
  }
  (*made)->primary = &primary;
  {
    std::lock_guard lock(primary.companions_mutex);
    primary.companions.push_back(made->get());
  }
  *out = made->release();
  share_link(primary);
  return Status::ok();
}

void add(wire::Counters& to, const wire::Counters& c) {
  to.payload_sent += c.payload_sent;
  to.payload_received += c.payload_received;
  to.wire_sent += c.wire_sent;
  to.wire_received += c.wire_received;
  to.repeats += c.repeats;
}

}  // namespace

wire::Counters counters_with_companions(const paceline_comm& comm) {
  auto sum = comm.runner->counters();
  std::lock_guard lock(comm.companions_mutex);
  add(sum, comm.companions_past);
  for (auto* c : comm.companions) add(sum, c->runner->counters());
  return sum;
}

void share_link(paceline_comm& primary) {
  const double bits = primary.settings.number("link_rate") * 1e9;
  const auto& topology = primary.job->topology;
  if (bits <= 0 || topology.node_count == 1) return;
  const auto here = std::count_if(topology.members.begin(), topology.members.end(),
                                  [&](const auto& m) { return m.node == topology.self().node; });
  const auto ranks = static_cast<double>(std::max<int64_t>(here, primary.job_local_size));
  std::lock_guard lock(primary.companions_mutex);
  const auto each =
      static_cast<uint64_t>(bits / 8 / ranks / static_cast<double>(primary.companions.size() + 1));
  const auto give = [each](paceline_comm& comm) {
    comm.even_rate = each;
    comm.job->channel->limit_rate(each);
  };
  give(primary);
  for (auto* c : primary.companions) give(*c);
}

void leave_companions(paceline_comm& comm) {
  if (comm.primary != nullptr) {
    {
      const auto mine = comm.runner->counters();
      std::lock_guard lock(comm.primary->companions_mutex);
      add(comm.primary->companions_past, mine);
      std::erase(comm.primary->companions, &comm);
    }
    share_link(*comm.primary);
  }
  for (auto* c : comm.companions) c->primary = nullptr;
}

}  // namespace paceline::capi

using namespace paceline;        // NOLINT: the functions below are the C ABI's
using namespace paceline::capi;  // NOLINT

extern "C" {

paceline_code paceline_comm_weigh(paceline_comm* comm, double parts) {
  if (auto status = usable(comm); !status) return report(comm, status);
  if (!(parts > 0) || !std::isfinite(parts))
    return invalid(
        comm, fmt::format("a communicator takes {} parts of the link; give more than 0", parts));
  const auto even = static_cast<double>(comm->even_rate.load(std::memory_order_relaxed));
  if (even > 0) comm->job->channel->limit_rate(static_cast<uint64_t>(std::max(1.0, even * parts)));
  return PACELINE_OK;
}

paceline_code paceline_comm_companion(paceline_comm* comm, paceline_comm** companion) {
  return guarded(comm, [&] {
    if (companion == nullptr)
      return invalid(comm, "the pointer that takes the communicator is null");
    *companion = nullptr;
    PACELINE_USABLE(comm);
    return report(comm, create_companion(*comm, companion));
  });
}
}
