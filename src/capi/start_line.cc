#include "capi/start_line.h"

#include <fmt/format.h>

#include <algorithm>

#include "capi/options.h"

namespace paceline::capi {
namespace {

constexpr uint64_t kAnyParameter = 4 << 20;

std::string plural(int n, const char* what) {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

std::string codec_words(const plan::CodecSpec& c, const Settings& settings) {
  switch (c.codec) {
    case plan::Codec::kNone:
      return "exact";
    case plan::Codec::kTopK:
      return fmt::format("top-k {:g} %{} from {} bytes on", c.ratio * 100,
                         c.fp16_values ? " (fp16 values)" : "", settings.integer("topk_threshold"));
    default:
      return fmt::format("{} {}", plan::codec_name(c.codec),
                         c.inside_node ? "everywhere" : "between nodes");
  }
}

}  // namespace

std::string start_line(const bootstrap::Job& job, const Settings& settings,
                       const engine::EngineOptions& options) {
  const auto& t = job.topology;
  // What a bucket of gradients will take; without fusion it is a parameter, which may have any size.
  auto bucket = static_cast<uint64_t>(settings.integer("fusion_threshold"));
  if (bucket == 0) bucket = kAnyParameter;
  if (settings.text("codec") == "topk")
    bucket = std::max(bucket, static_cast<uint64_t>(settings.integer("topk_threshold")));
  plan::PlanRequest request;
  request.count = std::max<uint64_t>(bucket / sizeof(float), 1);
  request.op = ReduceOp::kAverage;
  request.inner_size = options.inner_size;
  request.lanes = options.lanes;
  request.piece_bytes = options.piece_bytes;
  request.shape.size = t.size();
  for (const auto& m : t.members) request.shape.node_of.push_back(m.node);
  paceline_op_args args{};
  args.codec = -1;
  args.fp16_values = -1;
  args.reduce_op = 1;
  args.count = request.count;
  request.codec = codec_for(settings, args);
  request.algorithm = engine::settled_algorithm(options, request, request.shape);
  std::string why;
  auto algorithm = request.algorithm;
  if (algorithm == plan::Algorithm::kAuto) {
    auto choice = plan::choose(request);
    algorithm = choice.algorithm;
    why = ": " + choice.why;
    if (options.algorithm == plan::Algorithm::kRing)
      why = fmt::format(": the ring that {} asks for would encode at every hop",
                        settings.source("algorithm"));
  } else if (algorithm == options.algorithm) {
    why = fmt::format(": {} asks for it", settings.source("algorithm"));
  } else {
    why = fmt::format(": more than {} bytes ({})", options.hierarchical_threshold,
                      settings.source("hierarchical_threshold"));
  }
  const auto& asks = settings.source("codec");
  const char* elsewhere = settings.text("codec") == "int8" ? "=int8 is for CUDA tensors" : "";
  const auto codec_why = asks.empty() ? std::string() : fmt::format(" ({}{})", asks, elsewhere);
  return fmt::format(
      "{} on {}{} · {} · {}, {}{}{}", plural(t.size(), "rank"), plural(t.node_count, "node"),
      job.launcher.empty() ? "" : fmt::format(" ({})", job.launcher), job.channel->describe(),
      plan::algorithm_name(algorithm), codec_words(request.codec, settings), codec_why, why);
}

}  // namespace paceline::capi
