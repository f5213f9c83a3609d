// Reduce-scatter, all-gather and broadcast: what they need beside the steps of an all-reduce.
//
//   reduce-scatter  NCCL adds up every node's blocks into scratch; each piece of them is encoded and sent to the node it
//                   belongs to; what comes in is combined into the output, as after the first of two hops
//   all-gather      the block goes to pinned memory as it is, and to all peers; what comes in is copied to its place;
//                   NCCL spreads each node's run of blocks
//   broadcast       from the root to its peers; NCCL broadcasts in each node
//
// What does not fit the pinned memory is cut into several operations; NCCL runs before the first and after the last, for it
// wants blocks that lie side by side.
#include <fmt/format.h>

#include "drivers/cuda/loader.h"
#include "gpu/path.h"

namespace paceline::gpu {
namespace {

constexpr uint64_t kScratchAlign = 256;
constexpr uint64_t kKernelAlign = 16;

uint64_t aligned(uint64_t bytes) {
  return (bytes + kScratchAlign - 1) / kScratchAlign * kScratchAlign;
}

uint64_t block_bytes(const Collective& c) { return c.count * dtype_size(c.dtype); }

/// Whether kernels can't write the output in place.
bool output_in_scratch(const Collective& c) { return c.output % kKernelAlign != 0; }

/// Whether kernels read the blocks from scratch: sums of the node, or copies of what is not aligned.
bool blocks_in_scratch(const Collective& c, int local_size) {
  return local_size > 1 || c.input % kKernelAlign != 0 || block_bytes(c) % kKernelAlign != 0;
}

}  // namespace

uint64_t Path::scratch_bytes(const Collective& c) const {
  if (c.kind != PathKind::kReduceScatter) return 0;
  const uint64_t block = aligned(block_bytes(c));
  const uint64_t blocks =
      blocks_in_scratch(c, shape_.local_size) ? static_cast<uint64_t>(shape_.nodes) : 0;
  return (blocks + (output_in_scratch(c) ? 1 : 0)) * block;
}

Result<uint64_t> Path::collective(const Collective& c) {
  PACELINE_RETURN_IF_ERROR(usable(kind_name(c.kind)));
  auto id = collective_checked(c);
  if (!id) return ended_by(id.status());
  return id;
}

Status Path::check_collective(const Collective& c) const {
  const auto fail = [&](std::string_view what) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} '{}': {}", kind_name(c.kind), c.name, what));
  };
  const bool reduces = c.kind == PathKind::kReduceScatter;
  if (c.kind == PathKind::kAllReduce) return fail("all_reduce() does that");
  if (reduces && dtype_size(c.dtype) != 2 && c.dtype != DType::kFloat32)
    return {Code::kUnsupported,
            fmt::format("reduce-scatter '{}': {} is not reduced here; float32, float16 and "
                        "bfloat16 are",
                        c.name, dtype_name(c.dtype))};
  if (reduces && (c.codec < 0 || c.codec > static_cast<int>(device::cuda::WireCodec::kBf16)))
    return fail("codecs of a reduce-scatter are 0 none, 1 fp16, 2 bf16: others keep residuals");
  if (c.count > 0 && (c.output == 0 || (c.kind != PathKind::kBroadcast && c.input == 0)))
    return fail("a buffer is null");
  if (c.kind == PathKind::kBroadcast && (c.root < 0 || c.root >= me_.size))
    return fail(fmt::format("there is no rank {} among {}", c.root, me_.size));
  if (c.kind != PathKind::kBroadcast && !in_node_order_)
    return {Code::kUnsupported,
            fmt::format("{} '{}': the group's ranks are not in the order of their nodes",
                        kind_name(c.kind), c.name)};
  if (const uint64_t wanted = scratch_bytes(c); c.count > 0 && wanted > 0) {
    if (c.scratch_bytes < wanted || c.scratch % kScratchAlign != 0)
      return fail(fmt::format("its scratch has {} bytes, {} are needed, aligned to {}",
                              c.scratch_bytes, wanted, kScratchAlign));
  }
  return Status::ok();
}

PathRequest Path::request_of(const Collective& c) const {
  PathRequest q;
  q.shape = shape_;
  q.kind = c.kind;
  q.piece_bytes = options_.piece_bytes;
  q.lanes = options_.lanes;
  q.count = c.kind == PathKind::kReduceScatter ? c.count : block_bytes(c);
  if (c.kind == PathKind::kReduceScatter) {
    q.format.dtype = c.dtype;
    q.format.codec = static_cast<device::cuda::WireCodec>(c.codec);
    if (c.dtype != DType::kFloat32) q.format.codec = device::cuda::WireCodec::kExact;
  }
  if (c.kind == PathKind::kBroadcast)
    std::tie(q.root_node, q.root_local_rank) = places_[static_cast<size_t>(c.root)];
  return q;
}

Result<uint64_t> Path::collective_checked(const Collective& c) {
  PACELINE_RETURN_IF_ERROR(check_collective(c));
  const CurrentContext current(api_, context_);
  PACELINE_RETURN_IF_ERROR(current.status());
  PACELINE_RETURN_IF_ERROR(refuse_capture(c.stream, c.kind, c.name));
  if (ring_.size() == 0) PACELINE_RETURN_IF_ERROR(reserve_memory(0, 0));
  const PathRequest all = request_of(c);
  PACELINE_ASSIGN(const uint64_t most, count_that_fits(all));
  uint64_t last = 0;
  for (uint64_t first = 0; first < std::max<uint64_t>(all.count, 1); first += most) {
    PathRequest part = all;
    part.count = std::min(most, all.count - first);
    PACELINE_ASSIGN(last, submit_part(c, part, first));
    if (most == 0) break;
  }
  return last;
}

/// The elements (bytes of what only moves) from `first` on of every block.
Result<uint64_t> Path::submit_part(const Collective& c, PathRequest part, uint64_t first) {
  PACELINE_ASSIGN(auto plan, plan_for(part));
  Job job = make_job(plan, c.name);
  const bool reduces = c.kind == PathKind::kReduceScatter;
  const uint64_t offset = first * (reduces ? dtype_size(c.dtype) : 1);
  const uint64_t block = block_bytes(c);
  const bool copied = reduces && blocks_in_scratch(c, shape_.local_size);
  job.collective = &c;
  job.first = first == 0;
  job.last = offset + part.count * (reduces ? dtype_size(c.dtype) : 1) >= block;
  job.source = (c.kind == PathKind::kBroadcast ? c.output : copied ? c.scratch : c.input) + offset;
  job.source_stride = copied ? aligned(block) : block;
  job.target = c.output + offset;
  if (reduces && output_in_scratch(c))
    job.target =
        c.scratch + (copied ? static_cast<uint64_t>(shape_.nodes) * aligned(block) : 0) + offset;
  const double extra = part.format.codec == device::cuda::WireCodec::kFp16 ? gradient_scale_ : 1.0;
  job.scale_in = static_cast<float>((c.average ? 1.0 / me_.size : 1.0) * c.factor * extra);
  job.scale_out = static_cast<float>(1.0 / extra);
  job.operation->meets = shape_.local_size > 1 && !reduces && job.last && block > 0;
  return launch(job, c.stream);
}

/// On the out stream, after the caller's: what comes before the wire.
Status Path::enqueue_begin(Job& job) {
  const auto& c = *job.collective;
  const uint64_t block = block_bytes(c);
  if (c.kind != PathKind::kReduceScatter)
    PACELINE_CUDA_CALL(api_, stream_wait_event, copy_, caller_, 0);
  // What was copied on the out stream has its flag first.
  if (c.kind != PathKind::kReduceScatter && beside_ != nullptr && copy_ != out_ &&
      !reached(Flags::load(flags_.out()), beside_flag_))
    PACELINE_CUDA_CALL(api_, stream_wait_event, copy_, beside_, 0);
  if (!job.first || block == 0) return Status::ok();
  if (c.kind == PathKind::kAllGather) {
    const uint64_t own = c.output + static_cast<uint64_t>(me_.rank) * block;
    if (own != c.input) PACELINE_CUDA_CALL(api_, memcpy_dtod_async, own, c.input, block, out_);
  } else if (c.kind == PathKind::kReduceScatter && shape_.local_size > 1) {
    return node_->reduce_scatter_blocks(c.input, c.scratch, aligned(block), shape_.nodes, c.count,
                                        c.dtype, out_);
  } else if (c.kind == PathKind::kReduceScatter && blocks_in_scratch(c, 1)) {
    for (uint64_t n = 0; n < static_cast<uint64_t>(shape_.nodes); ++n)
      PACELINE_CUDA_CALL(api_, memcpy_dtod_async, c.scratch + n * aligned(block),
                         c.input + n * block, block, out_);
  }
  return Status::ok();
}

Status Path::enqueue_moved_out(Job& job, size_t index) {
  const auto& o = *job.operation;
  const auto& plan = *o.plan;
  const auto& piece = plan.pieces[index];
  if (!plan.sends(shape_.node)) {
    // By the time at which a launcher looks, the event may stand for a later operation's caller.
    if (!launches_later()) job.copied[index] = caller_;
    return Status::ok();
  }
  job.copied[index] = copied_[++next_copied_ % copied_.size()];
  PACELINE_CUDA_CALL(api_, memcpy_dtoh_async,
                     o.host + piece.in_offset + plan.slot(piece, shape_.node),
                     job.source + piece.span.first, piece.span.elements, copy_);
  PACELINE_CUDA_CALL(api_, stream_write_value32, copy_, Flags::address(flags_.out()), ++out_issued_,
                     0);
  job.out_flags[index] = out_issued_;
  if (copy_ != out_) PACELINE_CUDA_CALL(api_, event_record, job.copied[index], copy_);
  return Status::ok();
}

Status Path::enqueue_moved_in(Job& job, size_t index) {
  const auto& o = *job.operation;
  const auto& plan = *o.plan;
  const auto& piece = plan.pieces[index];
  auto& lane = lanes_[static_cast<size_t>(piece.lane)];
  const bool gathers = plan.request.kind == PathKind::kAllGather;
  if (!gathers && plan.sends(shape_.node)) {
    if (!launches_later())
      PACELINE_CUDA_CALL(api_, stream_wait_event, lane.in, job.copied[index], 0);
    return Status::ok();
  }
  // Who sends nothing has no flag that says how far its caller's stream is; what comes may have been here before it.
  if (launches_later() && !plan.sends(shape_.node))
    PACELINE_CUDA_CALL(api_, stream_wait_event, lane.in, job.all_out, 0);
  PACELINE_RETURN_IF_ERROR(await_piece(job, index, lane));
  const uint64_t block = block_bytes(*job.collective);
  for (int n = 0; n < shape_.nodes; ++n) {
    if (n == shape_.node || !plan.sends(n)) continue;
    const auto rank = static_cast<uint64_t>(n) * static_cast<uint64_t>(shape_.local_size) +
                      static_cast<uint64_t>(shape_.local_rank);
    PACELINE_CUDA_CALL(
        api_, memcpy_htod_async, job.target + (gathers ? rank * block : 0) + piece.span.first,
        o.host + piece.in_offset + plan.slot(piece, n), piece.span.elements, lane.in);
  }
  return Status::ok();
}

/// On the gather stream, after all lanes: what comes after the wire.
Status Path::enqueue_spread(Job& job) {
  const auto& c = *job.collective;
  const uint64_t block = block_bytes(c);
  if (!job.last || block == 0) return Status::ok();
  if (c.kind == PathKind::kReduceScatter) {
    if (output_in_scratch(c)) {
      const uint64_t blocks =
          blocks_in_scratch(c, shape_.local_size) ? static_cast<uint64_t>(shape_.nodes) : 0;
      PACELINE_CUDA_CALL(api_, memcpy_dtod_async, c.output, c.scratch + blocks * aligned(block),
                         block, gather_);
    }
    return Status::ok();
  }
  if (shape_.local_size == 1) return Status::ok();
  if (c.kind == PathKind::kAllGather)
    return node_->all_gather_blocks(c.output, shape_.nodes, block, gather_);
  return node_->broadcast(c.output, block, job.operation->plan->request.root_local_rank, gather_);
}

}  // namespace paceline::gpu
