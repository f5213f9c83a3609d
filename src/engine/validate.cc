#include "engine/validate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace paceline::engine {
namespace {

using plan::Collective;

constexpr uint64_t kMostBytes = UINT64_MAX / 16;

// No buffer is longer, mapped files too; the plan of a count that is none (a pointer, say) would take all memory.
uint64_t most_bytes_here() {
  static const uint64_t memory = static_cast<uint64_t>(std::max(sysconf(_SC_PHYS_PAGES), 1L)) *
                                 static_cast<uint64_t>(std::max(sysconf(_SC_PAGESIZE), 1L));
  return std::min(16 * memory, kMostBytes);
}

std::string title(const Operation& o) {
  std::string kind = plan::collective_name(o.collective);
  return o.name.empty() ? kind : fmt::format("{} '{}'", kind, o.name);
}

Status invalid(const Operation& o, std::string_view what) {
  return {Code::kInvalidArgument, fmt::format("{}: {}", title(o), what)};
}

bool reduces(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduceScatter || c == Collective::kReduce;
}
bool has_root(Collective c) {
  return c == Collective::kBroadcast || c == Collective::kReduce || c == Collective::kGather ||
         c == Collective::kScatter;
}

Status check_sum(const Operation& o, const std::vector<uint64_t>& counts, Rank size,
                 std::string_view what) {
  if (counts.size() != static_cast<std::size_t>(size)) {
    return invalid(o, fmt::format("{} has {} entries; it needs one per rank of the group, {}", what,
                                  counts.size(), size));
  }
  uint64_t sum = 0;
  for (auto c : counts) {
    if (c > kMostBytes / 8 || sum + c > kMostBytes / 8)
      return invalid(o, fmt::format("{} adds up to more elements than memory can hold", what));
    sum += c;
  }
  return Status::ok();
}

Status check_codec(const Operation& o) {
  if (o.codec.codec == plan::Codec::kNone) return Status::ok();
  bool fits = o.collective == Collective::kAllReduce && o.dtype == DType::kFloat32 &&
              (o.op == ReduceOp::kSum || o.op == ReduceOp::kAverage);
  if (!fits) {
    return {Code::kUnsupported, fmt::format("{}: codec {} carries all-reduce of float32 by sum or "
                                            "average only, not {} of {} by {}; "
                                            "ask for no codec",
                                            title(o), plan::codec_name(o.codec.codec),
                                            plan::collective_name(o.collective),
                                            dtype_name(o.dtype), reduce_op_name(o.op))};
  }
  if (o.codec.codec == plan::Codec::kTopK && !(o.codec.ratio > 0 && o.codec.ratio <= 1))
    return invalid(o, fmt::format("top-k ratio {:g} is not above 0 and at most 1", o.codec.ratio));
  if (!(o.codec.scale > 0) || o.codec.scale > 3e38)
    return invalid(o,
                   fmt::format("codec scale {:g} is not a positive finite number", o.codec.scale));
  return Status::ok();
}

// Also without a codec: what is owed to the parameters then goes into the buffer. It may hold more than they do.
Status check_segments(const Operation& o) {
  if (o.collective != Collective::kAllReduce || o.segments.empty()) return Status::ok();
  uint64_t sum = 0;
  for (const auto& s : o.segments) {
    if (s.offset > kMostBytes || s.elements > kMostBytes) {
      return invalid(o, fmt::format("a segment has elements {} to {} + {} of parameter {}: more "
                                    "than memory can hold",
                                    s.offset, s.offset, s.elements, s.key));
    }
    sum = std::min(sum + s.elements, kMostBytes);
  }
  const bool covers = o.codec.codec == plan::Codec::kNone ? sum <= o.count : sum == o.count;
  if (covers) return Status::ok();
  return invalid(
      o, fmt::format("its segments hold {} elements, the buffer {}; segments must cover it", sum,
                     o.count));
}

Status check_overlap(const Operation& o, BufferBytes bytes) {
  auto in = reinterpret_cast<uintptr_t>(o.input);
  auto out = reinterpret_cast<uintptr_t>(o.output);
  if (bytes.input == 0 || bytes.output == 0 || in == out) return Status::ok();
  bool apart = in + bytes.input <= out || out + bytes.output <= in;
  if (apart || per_rank(o.collective)) return Status::ok();  // views of each other are usual there
  return invalid(
      o, "input and output overlap in part; pass the same pointer, or buffers that lie apart");
}

}  // namespace

bool per_rank(Collective c) {
  return c == Collective::kAllGather || c == Collective::kReduceScatter ||
         c == Collective::kGather || c == Collective::kScatter;
}

BufferBytes buffer_bytes(const Operation& o, Rank size, Rank me) {
  const uint64_t item = dtype_size(o.dtype);
  uint64_t all = 0;
  uint64_t mine = o.count;
  if (per_rank(o.collective)) {
    if (o.counts.empty()) {
      all = o.count * static_cast<uint64_t>(size);
    } else {
      for (auto c : o.counts) all += c;
      mine = o.counts[static_cast<std::size_t>(me)];
    }
  }
  const bool root = me == o.root;
  switch (o.collective) {
    case Collective::kAllReduce:
      return {mine * item, mine * item};
    case Collective::kBroadcast:
      return {root ? mine * item : 0, mine * item};
    case Collective::kReduce:
      return {mine * item, root ? mine * item : 0};
    case Collective::kAllGather:
      return {mine * item, all * item};
    case Collective::kReduceScatter:
      return {all * item, mine * item};
    case Collective::kGather:
      return {mine * item, root ? all * item : 0};
    case Collective::kScatter:
      return {root ? all * item : 0, mine * item};
    case Collective::kAllToAll: {
      BufferBytes out;
      for (auto c : o.send_counts) out.input += c * item;
      for (auto c : o.receive_counts) out.output += c * item;
      if (o.send_counts.empty()) out.input = o.count * static_cast<uint64_t>(size) * item;
      if (o.receive_counts.empty()) out.output = o.count * static_cast<uint64_t>(size) * item;
      return out;
    }
    case Collective::kBarrier:
      return {};
  }
  return {};
}

Status validate(const Operation& o, Rank size, Rank me) {
  if (static_cast<uint8_t>(o.collective) > static_cast<uint8_t>(Collective::kScatter)) {
    return {Code::kInvalidArgument,
            fmt::format("there is no collective {}", static_cast<int>(o.collective))};
  }
  if (dtype_size(o.dtype) == 0)
    return invalid(o, fmt::format("there is no dtype {}", static_cast<int>(o.dtype)));
  if (static_cast<uint8_t>(o.op) > static_cast<uint8_t>(ReduceOp::kProduct))
    return invalid(o, fmt::format("there is no reduce op {}", static_cast<int>(o.op)));
  if (static_cast<uint8_t>(o.algorithm) > static_cast<uint8_t>(plan::Algorithm::kSparse))
    return invalid(o, fmt::format("there is no algorithm {}", static_cast<int>(o.algorithm)));
  if (static_cast<uint8_t>(o.codec.codec) > static_cast<uint8_t>(plan::Codec::kTopK))
    return invalid(o, fmt::format("there is no codec {}", static_cast<int>(o.codec.codec)));
  if (has_root(o.collective) && (o.root < 0 || o.root >= size))
    return invalid(o,
                   fmt::format("root {} is not a rank of the group (0 to {})", o.root, size - 1));
  if (reduces(o.collective) && o.op == ReduceOp::kAverage && !dtype_is_float(o.dtype)) {
    return {
        Code::kUnsupported,
        fmt::format(
            "{}: the average of {} is not built (it would have to round); sum and divide, or use a "
            "floating type",
            title(o), dtype_name(o.dtype))};
  }
  if (o.count > kMostBytes / 8 / static_cast<uint64_t>(size))
    return invalid(o, fmt::format("{} elements are more than memory can hold", o.count));
  // They would stand in for `count` in what ranks compare, and be compared in pairs.
  if ((!per_rank(o.collective) && !o.counts.empty()) ||
      (o.collective != Collective::kAllToAll &&
       !(o.send_counts.empty() && o.receive_counts.empty())))
    return invalid(o, "it has no use for counts per rank");
  if (per_rank(o.collective) && !o.counts.empty())
    PACELINE_RETURN_IF_ERROR(check_sum(o, o.counts, size, "counts"));
  if (o.collective == Collective::kAllToAll) {
    if (o.send_counts.empty() != o.receive_counts.empty())
      return invalid(
          o, "give both send_counts and receive_counts, or neither (then `count` for every pair)");
    if (!o.send_counts.empty()) {
      PACELINE_RETURN_IF_ERROR(check_sum(o, o.send_counts, size, "send_counts"));
      PACELINE_RETURN_IF_ERROR(check_sum(o, o.receive_counts, size, "receive_counts"));
      const auto out = o.send_counts[static_cast<std::size_t>(me)];
      const auto in = o.receive_counts[static_cast<std::size_t>(me)];
      if (out != in) {
        return invalid(o,
                       fmt::format("this rank sends itself {} elements and expects {} of itself; "
                                   "send_counts[{}] and receive_counts[{}] must be the same",
                                   out, in, me, me));
      }
    }
  }
  PACELINE_RETURN_IF_ERROR(check_codec(o));
  PACELINE_RETURN_IF_ERROR(check_segments(o));
  auto bytes = buffer_bytes(o, size, me);
  if (auto longest = std::max(bytes.input, bytes.output); longest > most_bytes_here())
    return invalid(o, fmt::format("a buffer of {} bytes is more than memory can hold", longest));
  if (bytes.input > 0 && o.input == nullptr) return invalid(o, "the input buffer is null");
  if (bytes.output > 0 && o.output == nullptr) return invalid(o, "the output buffer is null");
  auto item = dtype_size(o.dtype);
  if (reinterpret_cast<uintptr_t>(o.input) % item != 0 ||
      reinterpret_cast<uintptr_t>(o.output) % item != 0)
    return invalid(o, fmt::format("a buffer is not aligned to its element, {} bytes", item));
  return check_overlap(o, bytes);
}

}  // namespace paceline::engine
