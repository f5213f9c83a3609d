#include "capi/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/cores.h"
#include "base/log.h"
#include "bootstrap/agreement.h"
#include "bootstrap/identity.h"
#include "capi/handle.h"

namespace paceline::capi {
namespace {

plan::Algorithm parse_algorithm(const std::string& name) {
  using plan::Algorithm;
  if (name == "ring") return Algorithm::kRing;
  if (name == "doubling") return Algorithm::kDoubling;
  if (name == "tree") return Algorithm::kTree;
  if (name == "direct") return Algorithm::kDirect;
  if (name == "two_level") return Algorithm::kTwoLevel;
  if (name == "sparse") return Algorithm::kSparse;
  return Algorithm::kAuto;
}

plan::Codec parse_codec(const std::string& name) {
  if (name == "fp16") return plan::Codec::kFp16;
  if (name == "bf16") return plan::Codec::kBf16;
  if (name == "topk") return plan::Codec::kTopK;
  return plan::Codec::kNone;
}

}  // namespace

engine::EngineOptions engine_options(const Settings& settings, double timeout_s) {
  engine::EngineOptions o;
  o.default_timeout = to_time(timeout_s > 0 ? timeout_s : settings.number("timeout"));
  o.lanes = static_cast<int>(settings.integer("lanes"));
  o.piece_bytes = static_cast<uint64_t>(settings.integer("piece_bytes")) / 64 * 64;
  o.inner_size = static_cast<int>(settings.integer("inner_size"));
  o.algorithm = parse_algorithm(settings.text("algorithm"));
  // Its default is for who asks for two levels; auto knows better unless somebody says otherwise.
  if (o.algorithm == plan::Algorithm::kTwoLevel || settings.is_set("hierarchical_threshold"))
    o.hierarchical_threshold = static_cast<uint64_t>(settings.integer("hierarchical_threshold"));
  return o;
}

plan::CodecSpec codec_for(const Settings& settings, const paceline_op_args& args) {
  plan::CodecSpec spec;
  const bool asked = args.codec >= 0;
  spec.codec = asked ? static_cast<plan::Codec>(args.codec) : parse_codec(settings.text("codec"));
  const bool fits =
      args.collective == 0 && args.dtype == 0 && (args.reduce_op == 0 || args.reduce_op == 1);
  if (!asked && !fits) spec.codec = plan::Codec::kNone;
  if (!asked && spec.codec == plan::Codec::kTopK &&
      args.count * sizeof(float) < static_cast<uint64_t>(settings.integer("topk_threshold")))
    spec.codec = plan::Codec::kNone;
  spec.inside_node = settings.text("codec_scope") == "everywhere";
  if (spec.codec == plan::Codec::kTopK) {
    spec.ratio = args.ratio > 0 ? args.ratio : settings.number("topk_ratio");
    spec.fp16_values = args.fp16_values >= 0 ? args.fp16_values != 0 : settings.flag("topk_fp16");
    spec.inside_node = bootstrap::every_rank_selects(settings);
  }
  if (spec.codec == plan::Codec::kFp16) spec.scale = settings.number("gradient_scale");
  if (spec.codec == plan::Codec::kNone) spec = {};
  return spec;
}

bool speaks(const Settings& settings, Rank job_rank) {
  return job_rank == 0 && !settings.flag("quiet");
}

void warn_once(const std::vector<std::string>& warnings) {
  for (const auto& w : warnings) {
    if (log::first(w)) log::warning("{}", w);
  }
}

std::vector<std::string> lost_on_the_cpu(const Settings& settings) {
  std::vector<std::string> lost;
  const auto say = [&](const char* name, const char* what_happens) {
    lost.push_back(fmt::format("{}={} is built for CUDA tensors; {}", settings.source(name),
                               settings.text(name), what_happens));
  };
  if (settings.text("codec") == "int8")
    say("codec", "those of the CPU travel exactly: use fp16 or topk for them");
  if (settings.number("topk_momentum") > 0)
    say("topk_momentum",
        "those of the CPU travel by top-k without a momentum: leave it to the optimizer");
  if (settings.integer("lanes") > 1)
    say("lanes",
        "it changes nothing for those of the CPU, whose pieces overtake each other anyway");
  return lost;
}

int sharing_ranks(const bootstrap::Topology& topology, int job_local_size) {
  // A node is a machine, or a container on one, unless PACELINE_NODE_ID says otherwise: containers share the cores.
  const std::string machine = bootstrap::machine_identity() + "/";
  const auto& mine = topology.self();
  const bool named = mine.node_id.rfind(machine, 0) != 0;
  const auto here =
      std::count_if(topology.members.begin(), topology.members.end(), [&](const auto& m) {
        return named ? m.node == mine.node : m.node_id.rfind(machine, 0) == 0;
      });
  return std::max(static_cast<int>(here), job_local_size);
}

int codec_threads(const Settings& settings, const bootstrap::Topology& topology,
                  int job_local_size) {
  const std::string& asked = settings.text("codec_threads");
  if (asked != "auto") return std::atoi(asked.c_str());
  return fitting_codec_threads(sharing_ranks(topology, job_local_size), usable_cores(),
                               machine_cores());
}

}  // namespace paceline::capi
