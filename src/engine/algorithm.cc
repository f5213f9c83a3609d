// Which plan an all-reduce takes when its caller leaves that to the settings.
#include "engine/engine.h"

namespace paceline::engine {

plan::Algorithm settled_algorithm(const EngineOptions& options, const plan::PlanRequest& request,
                                  const plan::GroupShape& shape) {
  using enum plan::Algorithm;
  const auto& codec = request.codec;
  if (codec.codec == plan::Codec::kTopK) return kAuto;
  auto algorithm = options.algorithm == kSparse ? kAuto : options.algorithm;
  auto has_shared_nodes = [&] { return shape.node_count() < shape.size; };
  const bool encodes = codec.codec != plan::Codec::kNone;
  // A ring would encode at every hop, also at those within a node.
  if (algorithm == kRing && encodes && !codec.inside_node && has_shared_nodes()) return kAuto;
  if (request.count * dtype_size(request.dtype) <= options.hierarchical_threshold) return algorithm;
  if (algorithm == kAuto) {
    plan::PlanRequest whole = request;
    whole.shape = shape;
    whole.algorithm = kAuto;
    algorithm = plan::choose(whole).algorithm;
  }
  if (algorithm != kTwoLevel) return algorithm;
  return encodes && has_shared_nodes() ? kDirect : kRing;
}

}  // namespace paceline::engine
