#include <fmt/format.h>

#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

bool emit_all_reduce(Builder& b, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kRing:
      ring_all_reduce(b);
      return true;
    case Algorithm::kDoubling:
      doubling_all_reduce(b);
      return true;
    case Algorithm::kTree:
      tree_all_reduce(b);
      return true;
    case Algorithm::kDirect:
      direct_all_reduce(b);
      return true;
    case Algorithm::kTwoLevel:
      two_level_all_reduce(b);
      return true;
    case Algorithm::kSparse:
      sparse_all_reduce(b);
      return true;
    default:
      return false;
  }
}

bool emit_all_gather(Builder& b, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kRing:
      ring_all_gather(b);
      return true;
    case Algorithm::kDirect:
      direct_all_gather_blocks(b);
      return true;
    case Algorithm::kTwoLevel:
      two_level_all_gather(b);
      return true;
    default:
      return false;
  }
}

bool emit_reduce_scatter(Builder& b, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kRing:
      ring_reduce_scatter(b);
      return true;
    case Algorithm::kDirect:
      direct_reduce_scatter_blocks(b);
      return true;
    case Algorithm::kTwoLevel:
      two_level_reduce_scatter(b);
      return true;
    default:
      return false;
  }
}

}  // namespace

void alone(Builder& b) {
  const PlanRequest& q = b.request();
  uint64_t count = q.count;
  switch (q.collective) {
    case Collective::kBarrier:
      return;
    case Collective::kAllToAll:
      count = q.send_counts[0];
      break;
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kGather:
    case Collective::kScatter:
      count = q.counts[0];
      break;
    default:
      break;
  }
  b.copy(b.out({0, count}), b.in({0, count}));
}

bool emit(Builder& b, Algorithm algorithm) {
  if (b.size() == 1) {
    alone(b);
    return true;
  }
  bool ring = algorithm == Algorithm::kRing;
  bool tree = algorithm == Algorithm::kTree;
  bool direct = algorithm == Algorithm::kDirect;
  switch (b.request().collective) {
    case Collective::kAllReduce:
      return emit_all_reduce(b, algorithm);
    case Collective::kAllGather:
      return emit_all_gather(b, algorithm);
    case Collective::kReduceScatter:
      return emit_reduce_scatter(b, algorithm);
    case Collective::kBroadcast:
      if (ring) chain_broadcast(b);
      if (tree) tree_broadcast(b);
      return ring || tree;
    case Collective::kReduce:
      if (ring) chain_reduce(b);
      if (tree) tree_reduce(b);
      return ring || tree;
    case Collective::kAllToAll:
      if (direct) all_to_all(b);
      return direct;
    case Collective::kGather:
      if (direct) gather(b);
      return direct;
    case Collective::kScatter:
      if (direct) scatter(b);
      return direct;
    case Collective::kBarrier:
      if (algorithm == Algorithm::kDoubling) barrier(b);
      return algorithm == Algorithm::kDoubling;
  }
  return false;
}

Result<Plan> build(const PlanRequest& request, Rank me) {
  PACELINE_RETURN_IF_ERROR(validate(request, me));
  Algorithm algorithm = choose(request).algorithm;
  Builder b(request, me);
  if (!emit(b, algorithm)) {
    return Status(Code::kUnsupported,
                  fmt::format("{} is not offered by the {} algorithm: leave the choice to auto",
                              collective_name(request.collective), algorithm_name(algorithm)));
  }
  return b.take(algorithm);
}

uint64_t message_bytes(const PlanRequest& request, const Step& step) {
  switch (step.kind) {
    case StepKind::kSend:
      return step.src.bytes;
    case StepKind::kReceive:
    case StepKind::kReceiveReduce:
      return step.dst.bytes;
    case StepKind::kReceiveDecode:
    case StepKind::kReceiveDecodeReduce:
      return coded_bytes(request.codec, request.dtype, step.dst.bytes / dtype_size(request.dtype));
    default:
      return 0;
  }
}

}  // namespace paceline::plan
