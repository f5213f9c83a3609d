#include "gpu/path_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "device/cuda/layout.h"

namespace paceline::gpu {
namespace {

using device::cuda::WireCodec;

// Up to so many bytes the second round trip costs more than what one hop sends in excess.
constexpr uint64_t kShort = 64 * 1024;
// Of 1,500 bytes of a packet TCP carries 1,448; with preamble, checksum and gap it takes 1,538 on the line.
constexpr double kEthernet = 1538.0 / 1448.0;
// What an encoding of rows takes beside them: its head, and its list rounded up.
constexpr uint64_t kRowSpare = 32;
constexpr int kRatiosLookedAt = 684;  // from 1 to a millionth

uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

Status check(const PathRequest& q) {
  const auto& s = q.shape;
  if (s.nodes == 1)
    return {
        Code::kUnsupported,
        "all ranks share one node: NCCL alone is the best path there, and Paceline leaves it to "
        "NCCL"};
  if (s.nodes < 1 || s.nodes > static_cast<int>(device::cuda::kMaxSources))
    return {Code::kUnsupported, fmt::format("{} nodes; the path for CUDA tensors joins 2 to {}",
                                            s.nodes, device::cuda::kMaxSources)};
  if (s.local_size < 1 || s.local_rank < 0 || s.local_rank >= s.local_size || s.node < 0 ||
      s.node >= s.nodes)
    return {Code::kInvalidArgument, "a rank outside of its node"};
  const auto dtype = q.format.dtype;
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16)
    return {Code::kUnsupported, fmt::format("CUDA tensors of {} are not reduced here: float32, "
                                            "float16 and bfloat16 are; use torch's NCCL for others",
                                            dtype_name(dtype))};
  if (q.lanes < 1 || q.lanes > 64)
    return {Code::kInvalidArgument, fmt::format("{} lanes; 1 to 64 can be", q.lanes)};
  if (q.row_elements > 0 && !takes_rows(q))
    return {Code::kInvalidArgument,
            fmt::format("{} elements of {} do not travel as {} by rows of {}", q.count,
                        dtype_name(dtype), codec_name(q.format.codec), q.row_elements)};
  if (q.piece_bytes < 4096 || q.piece_bytes > (1ULL << 30))
    return {Code::kInvalidArgument,
            fmt::format("pieces of {} bytes; 4096 to 1073741824 can be", q.piece_bytes)};
  return Status::ok();
}

/// The least number of rows after which the next one is aligned as kernels ask.
uint64_t row_granule(const PathRequest& q) {
  constexpr uint64_t kKernelAlign = 16;
  return kKernelAlign / std::gcd(q.row_elements * dtype_size(q.format.dtype), kKernelAlign);
}

device::cuda::RowFormat format_of_rows(const PathRequest& q, uint64_t rows) {
  return {q.format.dtype, device::cuda::dense_wire_dtype(q.format), rows, q.row_elements, rows};
}

/// Rows of a whole piece.
uint64_t piece_rows(const PathRequest& q) {
  const auto format = format_of_rows(q, 1);
  constexpr uint64_t kMany = 64;
  const uint64_t each =
      (device::cuda::used_row_bytes(format, kMany) - device::cuda::used_row_bytes(format, 0)) /
      kMany;
  return q.piece_bytes / each / row_granule(q) * row_granule(q);
}

int hops_of(const PathRequest& q, uint64_t own) {
  if (q.kind != PathKind::kAllReduce || q.row_elements > 0) return 1;
  if (q.shape.nodes == 2 || q.format.codec == WireCodec::kTopK) return 1;
  const uint64_t one = device::cuda::encoded_bytes(q.format, std::max<uint64_t>(own, 1));
  return one * static_cast<uint64_t>(q.shape.nodes - 1) <= kShort ? 1 : 2;
}

/// Spans of `local_rank`.
void divide(const PathRequest& q, int local_rank, PathPlan& plan) {
  if (q.kind != PathKind::kAllReduce) {
    const bool none = q.kind == PathKind::kBroadcast && local_rank != q.root_local_rank;
    plan.own = {0, none ? 0 : q.count};
    return;
  }
  const auto size = static_cast<uint64_t>(q.shape.local_size);
  const uint64_t granule = size == 1            ? 1
                           : q.row_elements > 0 ? cut_granule(q)
                                                : 16 / dtype_size(q.format.dtype);
  plan.shard = q.count / (size * granule) * granule;
  plan.tail = {plan.shard * size, q.count - plan.shard * size};
  plan.own = {plan.shard * static_cast<uint64_t>(local_rank), plan.shard};
  if (local_rank == q.shape.local_size - 1) plan.own.elements += plan.tail.elements;
}

uint64_t sent_bytes(const PathPlan& plan) {
  uint64_t sum = 0;
  const auto others = static_cast<uint64_t>(plan.request.shape.nodes - 1);
  const int me = plan.request.shape.node;
  for (const auto& p : plan.pieces) {
    if (!plan.sends(me)) continue;
    sum += others * plan.part_bytes(p, me);  // two hops: the sum of the own part, to all
    if (plan.hops == 1) continue;
    for (int n = 0; n < plan.request.shape.nodes; ++n) sum += n == me ? 0 : plan.part_bytes(p, n);
  }
  return sum;
}

/// What rows may cost before the dense plan is better. By numbers that are the same on all ranks.
void weigh(PathPlan& plan) {
  auto q = plan.request;
  plan.own_rows = plan.own.elements / q.row_elements;
  q.shape.node = 0;
  q.shape.local_rank = q.shape.local_size - 1;  // has most
  PathPlan last;
  divide(q, q.shape.local_rank, last);
  const uint64_t pieces = last.own.elements / piece_elements(q) + 1;
  const uint64_t shards = static_cast<uint64_t>(q.shape.local_size);
  const auto format = format_of_rows(q, 1);
  const uint64_t others = static_cast<uint64_t>(q.shape.nodes - 1);
  q.row_elements = 0;
  // It was checked with rows.
  if (auto dense = build_path(q)) plan.dense_bytes = dense->node_bytes;
  const uint64_t each = plan.dense_bytes / (shards * others);  // that a rank may send to each
  const auto sent = [&](uint64_t rows) {
    return device::cuda::used_row_bytes(format, rows) + (pieces - 1) * kRowSpare;
  };
  uint64_t low = 0, high = plan.request.count / plan.request.row_elements + 1;
  while (high - low > 1) {  // sent(low) < each ≤ sent(high), if rows pay at all
    const uint64_t middle = (low + high) / 2;
    (sent(middle) < each ? low : high) = middle;
  }
  plan.paying_rows = low;
}

void cut(PathPlan& plan) {
  const auto& q = plan.request;
  const uint64_t most = piece_elements(q);
  const auto nodes = static_cast<uint64_t>(q.shape.nodes);
  uint64_t at = kHostAlign;  // the report word
  int lane = 0;
  for (uint64_t first = 0; first < plan.own.elements; first += most) {
    PathPiece p;
    p.span = {plan.own.first + first, std::min(most, plan.own.elements - first)};
    p.lane = lane;
    lane = (lane + 1) % q.lanes;
    p.slot_bytes = round_up(plan.part_bytes(p, 0), kHostAlign);
    const auto take = [&] {
      const uint64_t offset = at;
      at += (q.kind == PathKind::kBroadcast ? 1 : nodes) * p.slot_bytes;
      return offset;
    };
    p.in_offset = take();
    if (plan.scatters()) p.out_offset = take();
    if (plan.hops == 2) p.back_offset = take();
    plan.pieces.push_back(p);
  }
  // One piece has nothing to overtake, and needs no stream beside the one that gathers.
  if (plan.pieces.size() == 1 && plan.hops == 1) plan.pieces[0].lane = q.lanes;
  plan.host_bytes = at;
}

}  // namespace

bool same(const PathRequest& a, const PathRequest& b) {
  return a.shape == b.shape && a.format.codec == b.format.codec &&
         a.format.dtype == b.format.dtype && a.format.ratio == b.format.ratio &&
         a.format.fp16_values == b.format.fp16_values && a.count == b.count &&
         a.piece_bytes == b.piece_bytes && a.lanes == b.lanes && a.kind == b.kind &&
         a.root_node == b.root_node && a.root_local_rank == b.root_local_rank &&
         a.row_elements == b.row_elements;
}

std::string PathPlan::describe_data() const {
  const auto& q = request;
  auto text = reports() ? fmt::format("{} of [{}] of {} as {}", kind_name(q.kind), q.count,
                                      dtype_name(q.format.dtype), codec_name(q.format.codec))
                        : fmt::format("{} of {} bytes", kind_name(q.kind), q.count);
  if (by_rows()) text += fmt::format(" by rows of {}", q.row_elements);
  return text;
}

const char* kind_name(PathKind kind) {
  switch (kind) {
    case PathKind::kAllReduce:
      return "all-reduce";
    case PathKind::kReduceScatter:
      return "reduce-scatter";
    case PathKind::kAllGather:
      return "all-gather";
    case PathKind::kBroadcast:
      return "broadcast";
  }
  return "unknown";
}

const char* codec_name(WireCodec codec) {
  switch (codec) {
    case WireCodec::kExact:
      return "exact";
    case WireCodec::kFp16:
      return "fp16";
    case WireCodec::kBf16:
      return "bf16";
    case WireCodec::kTopK:
      return "top-k";
    case WireCodec::kInt8:
      return "int8";
  }
  return "unknown";
}

namespace {

/// Bytes of the encoding per element, of large pieces.
double density(const device::cuda::WireFormat& format) {
  constexpr uint64_t kMany = 1U << 22;
  return static_cast<double>(device::cuda::encoded_bytes(format, kMany)) / kMany;
}

}  // namespace

// Pieces are alike in what they cost on the wire, not in gradient: every piece takes some twenty calls of the driver, which
// small encodings do not repay. Never more than kMostGradient times as much gradient: it all has to be ready and encoded
// before the piece can leave.
uint64_t piece_elements(const PathRequest& q) {
  const auto nodes = static_cast<uint64_t>(q.shape.nodes);
  const auto whole = [](uint64_t n, uint64_t granule) {
    return std::max(n / granule, uint64_t{1}) * granule;
  };
  if (q.row_elements > 0) return piece_rows(q) * q.row_elements;
  if (q.kind == PathKind::kBroadcast) return whole(q.piece_bytes, kPieceGranule);
  if (q.kind == PathKind::kAllGather) return whole(2 * q.piece_bytes / nodes, kPieceGranule);
  const double least = static_cast<double>(dtype_size(q.format.dtype)) / kMostGradient;
  const double each = std::max(density(q.format), least);
  const uint64_t n =
      whole(static_cast<uint64_t>(static_cast<double>(q.piece_bytes) / each), kPieceGranule);
  return q.kind == PathKind::kReduceScatter ? whole(n / nodes, kPartGranule) : n;
}

bool has_residual(WireCodec codec) {
  return codec == WireCodec::kTopK || codec == WireCodec::kInt8;
}

uint64_t prompt_piece_bytes(const PathRequest& q) {
  if (has_residual(q.format.codec) || q.piece_bytes <= kLeastPrompt) return q.piece_bytes;
  constexpr uint64_t kPieces = 8;
  const uint64_t shard = q.count / static_cast<uint64_t>(q.shape.local_size);
  const uint64_t bytes = device::cuda::encoded_bytes(q.format, std::max<uint64_t>(shard, 1));
  return std::clamp(bytes / kPieces, kLeastPrompt, q.piece_bytes);
}

uint64_t most_selection_bytes(PathRequest q) {
  uint64_t most = 0;
  q.kind = PathKind::kAllReduce;
  q.format.codec = WireCodec::kTopK;
  for (const auto dtype : {DType::kFloat32, DType::kFloat16}) {
    for (const bool fp16_values : {false, true}) {
      q.format.dtype = dtype;
      q.format.fp16_values = fp16_values;
      q.format.ratio = 1;
      for (int step = 0; step < kRatiosLookedAt; ++step, q.format.ratio *= 0.98) {
        most = std::max(most, device::cuda::state_bytes(q.format, piece_elements(q)));
      }
    }
  }
  return most + most / 8;  // ratios between those that were looked at
}

uint64_t cut_granule(const PathRequest& q) {
  return q.row_elements > 0 ? row_granule(q) * q.row_elements : kPieceGranule;
}

bool takes_rows(const PathRequest& q) {
  const bool plain = q.format.codec == WireCodec::kExact || q.format.codec == WireCodec::kFp16 ||
                     q.format.codec == WireCodec::kBf16;
  // The longest row has room in a piece, and numbers do not overflow.
  return q.kind == PathKind::kAllReduce && plain && q.row_elements > 0 &&
         q.row_elements <= q.piece_bytes && q.count % q.row_elements == 0 && piece_rows(q) > 0;
}

device::cuda::RowFormat PathPlan::row_format(const PathPiece& piece) const {
  return format_of_rows(request, piece.span.elements / request.row_elements);
}

Span PathPlan::part(const PathPiece& piece, int node) const {
  if (hops == 1) return piece.span;
  const auto nodes = static_cast<uint64_t>(request.shape.nodes);
  const uint64_t each = round_up((piece.span.elements + nodes - 1) / nodes, kPartGranule);
  const uint64_t first = std::min(each * static_cast<uint64_t>(node), piece.span.elements);
  return {piece.span.first + first, std::min(each, piece.span.elements - first)};
}

uint64_t PathPlan::part_bytes(const PathPiece& piece, int node) const {
  const Span s = part(piece, node);
  if (!reports()) return s.elements;
  if (s.elements == 0) return 0;
  if (by_rows()) return device::cuda::encoded_row_bytes(row_format(piece));
  return device::cuda::encoded_bytes(request.format, s.elements);
}

Result<PathPlan> build_path(const PathRequest& request) {
  PACELINE_RETURN_IF_ERROR(check(request));
  PathPlan plan;
  plan.request = request;
  // Hops are chosen by the shard that all ranks of the node share, so that a node's ranks agree.
  divide(request, 0, plan);
  plan.hops = hops_of(request, plan.shard);
  for (int r = 0; r < request.shape.local_size; ++r) {
    PathPlan other;
    other.request = request;
    other.hops = plan.hops;
    divide(request, r, other);
    cut(other);
    plan.node_bytes += sent_bytes(other);
  }
  divide(request, request.shape.local_rank, plan);
  cut(plan);
  plan.wire_bytes = sent_bytes(plan);
  if (plan.by_rows()) weigh(plan);
  return plan;
}

double PathPlan::seconds(double bits_per_second) const {
  return static_cast<double>(node_bytes) * 8 * kEthernet / bits_per_second;
}

std::string PathPlan::summary() const {
  const auto& s = request.shape;
  const bool exact = request.format.codec == WireCodec::kExact;
  const std::string travels = !reports() ? "bytes"
                              : exact    ? std::string(dtype_name(request.format.dtype))
                                         : codec_name(request.format.codec);
  std::string rows;
  if (by_rows())
    rows = fmt::format(
        " at most, for rows of {} that are not zero: at most {} of {} a rank; up to {} take less "
        "than the {:.2f} MB of all",
        request.row_elements, own_rows, request.count / request.row_elements, paying_rows,
        static_cast<double>(dense_bytes) / 1e6);
  return fmt::format(
      "{}{} nodes × {}: {}{} in {} between nodes, {} piece{} over {} lane{}; {:.2f} MB out of each "
      "node{}",
      request.kind == PathKind::kAllReduce ? "" : fmt::format("{}, ", kind_name(request.kind)),
      s.nodes, s.local_size, s.local_size > 1 ? "NCCL in the node, " : "", travels,
      hops == 1 ? "one hop" : "two hops", pieces.size(), pieces.size() == 1 ? "" : "s",
      request.lanes, request.lanes == 1 ? "" : "s", static_cast<double>(node_bytes) / 1e6, rows);
}

std::string PathPlan::to_string() const {
  std::string text = summary() + "\n";
  const bool shards = request.shape.local_size > 1 && request.kind == PathKind::kAllReduce;
  if (shards)
    text += fmt::format("reduce-scatter {} elements a rank, tail {}\n", shard, tail.elements);
  for (const auto& p : pieces) {
    text += fmt::format("lane {}: elements {} to {}", p.lane, p.span.first,
                        p.span.first + p.span.elements);
    for (int n = 0; n < request.shape.nodes && hops == 2; ++n)
      text += fmt::format("{} node {}: {} B", n == 0 ? ";" : ",", n, part_bytes(p, n));
    if (hops == 1) text += fmt::format("; {} B to each other node", part_bytes(p, 0));
    text += "\n";
  }
  if (shards) text += fmt::format("all-gather {} elements a rank\n", shard);
  return text;
}

}  // namespace paceline::gpu
