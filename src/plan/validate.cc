#include <fmt/format.h>

#include "plan/plan.h"

namespace paceline::plan {
namespace {

constexpr uint64_t kMostSelected = UINT32_MAX;  // positions of entries are 32-bit

Status bad(std::string text) { return {Code::kInvalidArgument, std::move(text)}; }
Status unsupported(std::string text) { return {Code::kUnsupported, std::move(text)}; }

Status check_shape(const PlanRequest& q, Rank me) {
  if (q.shape.size < 1)
    return bad(fmt::format("shape.size is {}: a group has at least one rank", q.shape.size));
  auto n = static_cast<std::size_t>(q.shape.size);
  if (q.shape.node_of.size() != n && !(n == 1 && q.shape.node_of.empty())) {
    return bad(fmt::format("shape.node_of has {} entries for {} ranks", q.shape.node_of.size(), n));
  }
  if (me < 0 || me >= q.shape.size)
    return bad(fmt::format("rank {} is not in a group of {}", me, n));
  if (q.root < 0 || q.root >= q.shape.size) {
    return bad(fmt::format("root is {}: the group has ranks 0 to {}", q.root, q.shape.size - 1));
  }
  if (q.inner_size < 0)
    return bad(fmt::format("inner_size is {}: 0 or more is wanted", q.inner_size));
  if (q.lanes < 1 || q.lanes > 255)
    return bad(fmt::format("lanes is {}: 1 to 255 are possible", q.lanes));
  if (q.piece_bytes < 64)
    return bad(fmt::format("piece_bytes is {}: at least 64 are needed", q.piece_bytes));
  return Status::ok();
}

bool reduces(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduceScatter || c == Collective::kReduce;
}

Status check_type(const PlanRequest& q) {
  if (dtype_size(q.dtype) == 0)
    return bad(fmt::format("dtype {} is unknown", static_cast<int>(q.dtype)));
  if (static_cast<int>(q.op) > 4)
    return bad(fmt::format("op {} is unknown", static_cast<int>(q.op)));
  if (reduces(q.collective) && q.op == ReduceOp::kAverage && !dtype_is_float(q.dtype)) {
    return bad(
        fmt::format("average of {}: only floating types can be averaged; sum and divide instead",
                    dtype_name(q.dtype)));
  }
  return Status::ok();
}

Status check_total(const char* field, const std::vector<uint64_t>& counts, uint64_t element) {
  uint64_t total = 0;
  for (uint64_t c : counts) {
    if (c > (UINT64_MAX / 2 - total) / element)
      return bad(fmt::format("{} add up to more than 2^63 bytes", field));
    total += c * element;
  }
  return Status::ok();
}

Status check_counts(const PlanRequest& q) {
  auto n = static_cast<std::size_t>(q.shape.size);
  uint64_t element = dtype_size(q.dtype);
  switch (q.collective) {
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kGather:
    case Collective::kScatter:
      if (q.counts.size() != n) {
        return bad(fmt::format("counts has {} entries for {} ranks", q.counts.size(), n));
      }
      return check_total("counts", q.counts, element);
    case Collective::kAllToAll:
      if (q.send_counts.size() == n * n && (q.receive_counts.empty())) {
        return check_total("send_counts", q.send_counts, element);
      }
      if (q.send_counts.size() != n || q.receive_counts.size() != n) {
        return bad(fmt::format("send_counts has {} and receive_counts {} entries for {} ranks",
                               q.send_counts.size(), q.receive_counts.size(), n));
      }
      PACELINE_RETURN_IF_ERROR(check_total("send_counts", q.send_counts, element));
      return check_total("receive_counts", q.receive_counts, element);
    default:
      return check_total("count", {q.count}, element);
  }
}

Status check_codec(const PlanRequest& q) {
  const CodecSpec& c = q.codec;
  if (c.codec == Codec::kNone) return Status::ok();
  if (static_cast<int>(c.codec) > 3)
    return bad(fmt::format("codec {} is unknown", static_cast<int>(c.codec)));
  bool dense = c.codec != Codec::kTopK;
  bool offered = q.collective == Collective::kAllReduce ||
                 (dense && q.collective == Collective::kReduceScatter);
  if (!offered) {
    return unsupported(fmt::format("{} carries elements as they are: codec {} is not offered there",
                                   collective_name(q.collective), codec_name(c.codec)));
  }
  if (q.dtype != DType::kFloat32) {
    return unsupported(
        fmt::format("codec {} takes float32, not {}", codec_name(c.codec), dtype_name(q.dtype)));
  }
  if (q.algorithm == Algorithm::kRing && (!dense || q.collective != Collective::kAllReduce)) {
    return unsupported(fmt::format("{} with codec {} does not travel in a ring: leave it to auto",
                                   collective_name(q.collective), codec_name(c.codec)));
  }
  if (q.algorithm == Algorithm::kRing && !c.inside_node && q.shape.node_count() < q.shape.size) {
    return unsupported(fmt::format(
        "a ring with codec {} encodes every hop: take two-level where nodes have several ranks",
        codec_name(c.codec)));
  }
  if (dense) {
    if (!(c.scale > 0) || c.scale > 1e30)
      return bad(fmt::format("codec.scale is {}: a positive number is wanted", c.scale));
    return Status::ok();
  }
  if (q.count > kMostSelected) {
    return unsupported(
        fmt::format("top-k of {} elements: at most {} in one buffer", q.count, kMostSelected));
  }
  if (!(c.ratio > 0 && c.ratio <= 1))
    return bad(fmt::format("codec.ratio is {}: more than 0 and at most 1 is wanted", c.ratio));
  if (q.op != ReduceOp::kSum && q.op != ReduceOp::kAverage) {
    return unsupported(fmt::format("top-k keeps sums and averages, not {}", reduce_op_name(q.op)));
  }
  if (q.algorithm == Algorithm::kDirect || q.algorithm == Algorithm::kTwoLevel) {
    return unsupported(
        fmt::format("top-k travels by the sparse plan, not by {}", algorithm_name(q.algorithm)));
  }
  return Status::ok();
}

}  // namespace

Status validate(const PlanRequest& q, Rank me) {
  PACELINE_RETURN_IF_ERROR(check_shape(q, me));
  if (static_cast<int>(q.collective) > 8)
    return bad(fmt::format("collective {} is unknown", static_cast<int>(q.collective)));
  if (static_cast<int>(q.algorithm) > 6)
    return bad(fmt::format("algorithm {} is unknown", static_cast<int>(q.algorithm)));
  PACELINE_RETURN_IF_ERROR(check_type(q));
  PACELINE_RETURN_IF_ERROR(check_counts(q));
  PACELINE_RETURN_IF_ERROR(check_codec(q));
  bool blocks_differ = q.collective == Collective::kAllToAll ||
                       q.collective == Collective::kGather || q.collective == Collective::kScatter;
  if (q.in_place && blocks_differ) {
    return unsupported(fmt::format("{} in place is not offered: give it an output of its own",
                                   collective_name(q.collective)));
  }
  if (q.algorithm == Algorithm::kSparse && q.codec.codec != Codec::kTopK) {
    return bad("algorithm sparse needs codec top-k");
  }
  return Status::ok();
}

}  // namespace paceline::plan
