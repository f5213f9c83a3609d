#include "cli/bench/show_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <iterator>
#include <string>
#include <utility>

#include "capi/handle.h"
#include "cli/bench/links.h"
#include "cli/bench/ranks.h"
#include "cli/bench/workload.h"
#include "cli/standard_output.h"
#include "cli/text/units.h"

namespace paceline::bench {
namespace {

constexpr std::size_t kMostLinks = 16;
constexpr uint64_t kMostPieces = uint64_t{1} << 20;  ///< each is some steps of a plan

/// What a prediction needs of the network.
struct Terms {
  double bits_per_second = 0;  ///< 0: not known
  double latency_s = 0;        ///< 0: not known
  Packets packets;
};

/// Its channel is for the thread that drives the communicator alone, which is where an operation's end is told. The
/// barrier has the ranks connected, which tells most.
Result<Packets> packets_of(paceline_comm* comm) {
  struct Question {
    paceline_comm* comm;
    std::promise<std::pair<paceline_code, Packets>> answer;
  } question{comm, {}};
  auto answer = question.answer.get_future();
  paceline_op_args barrier{};
  barrier.struct_size = sizeof barrier;
  barrier.collective = 5;
  barrier.name = "bench's own";
  barrier.context = &question;
  barrier.notify = [](void* context, paceline_op, paceline_code code) {
    auto& asked = *static_cast<Question*>(context);
    asked.answer.set_value({code, asked.comm->job->channel->packets()});
  };
  paceline_op op = 0;
  if (const auto code = paceline_submit(comm, &barrier, &op); code != PACELINE_OK)
    return Status(static_cast<Code>(code), paceline_error(comm));
  const auto [code, packets] = answer.get();
  if (code == PACELINE_OK) return packets;
  char why[1024] = {};
  paceline_op_error(comm, op, why, sizeof why);
  return Status(static_cast<Code>(code), why);
}

std::string bytes_text(uint64_t bytes) {
  return bytes < 1'000'000 ? fmt::format("{} B", bytes)
                           : fmt::format("{:.3f} MB", static_cast<double>(bytes) / 1e6);
}

std::string links_text(const plan::Prediction& p) {
  std::string text;
  for (std::size_t node = 0; node < std::min(p.links.size(), kMostLinks); ++node) {
    text += fmt::format("  link of node {}: {} out, {} in\n", node, bytes_text(p.links[node].sent),
                        bytes_text(p.links[node].received));
  }
  if (p.links.size() > kMostLinks)
    text += fmt::format("  and {} links more\n", p.links.size() - kMostLinks);
  return text;
}

std::string time_text(const plan::Prediction& p, const Terms& terms) {
  if (terms.bits_per_second == 0) return "  time: not known without the links' rate (--link)\n";
  auto text = fmt::format("  time: {:.6g} ms: {} at {}", p.seconds * 1e3, bytes_text(p.link_bytes),
                          cli::format_rate(terms.bits_per_second));
  if (terms.latency_s == 0) return text + ", without the latency of hops (--latency)\n";
  return text + fmt::format(", {} hop{} of {:.6g} us\n", p.hops, p.hops == 1 ? "" : "s",
                            terms.latency_s * 1e6);
}

Result<std::string> page(const Workload& work, int rank, const Terms& terms, std::size_t most) {
  PACELINE_ASSIGN(auto request, work.request());
  if (work.bytes() / request.piece_bytes >= kMostPieces) {
    return Status(Code::kUnsupported,
                  fmt::format("{} are too many pieces of {} for a plan: ask for fewer --bytes or "
                              "raise PACELINE_PIECE_BYTES",
                              plan::size_text(work.bytes()), plan::size_text(request.piece_bytes)));
  }
  PACELINE_ASSIGN(auto plan, plan::build(request, rank));
  const double rate = terms.bits_per_second > 0 ? terms.bits_per_second : 1;
  PACELINE_ASSIGN(auto prediction,
                  plan::predict(request, rate, terms.packets, rank, terms.latency_s));
  auto text =
      fmt::format("\n{}\n  why: {}\n", plan::size_text(work.bytes()), plan::choose(request).why);
  text += request.shape.node_count() == 1 ? "  nothing leaves the node\n"
                                          : links_text(prediction) + time_text(prediction, terms);
  text += fmt::format("  steps: {} ({}), {} of scratch memory\n", plan.steps.size(), plan.kinds(),
                      plan::size_text(plan.scratch_bytes));
  return text + plan.to_string(most);
}

Status print(paceline_comm* comm, const paceline_identity& who, const Options& options,
             const std::vector<uint64_t>& sizes, const Terms& terms) {
  auto text = fmt::format("# {}\n# {} of {}, planned\n", paceline_comm_describe(comm),
                          options.operation, options.dtype);
  for (const uint64_t bytes : sizes) {
    PACELINE_ASSIGN(auto one, page(Workload::outline(comm, who, options, bytes), who.rank, terms,
                                   static_cast<std::size_t>(options.plan_steps)));
    text += one;
  }
  return cli::show(text);
}

}  // namespace

Status show_plans(paceline_comm* comm, const paceline_identity& who, const Options& options,
                  const std::vector<uint64_t>& sizes, double link) {
  if (options.plan_rank >= who.size) {
    return {Code::kInvalidArgument,
            fmt::format("--rank {}: there are ranks 0 to {}", options.plan_rank, who.size - 1)};
  }
  Terms terms{link, 0, {}};
  PACELINE_ASSIGN(terms.latency_s, link_latency(options.latency));
  PACELINE_ASSIGN(terms.packets, packets_of(comm));
  const bool is_mine = options.plan_rank == who.rank;
  const auto shown = is_mine ? print(comm, who, options, sizes, terms) : Status::ok();
  return all_ok(comm, who.rank, shown,
                fmt::format("rank {} can't show its plans", options.plan_rank));
}

}  // namespace paceline::bench
