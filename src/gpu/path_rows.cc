// All-reduces by rows: when they are, and what is put on the streams in place of the dense codecs' steps.
//
// Nothing here is a promise of the caller's: an encoding has room for every row of its piece. How many rows there are is
// known on the host once the encoding is in pinned memory; messages are as long as that, and each operation's report brings
// all ranks the largest number, by which they decide, alike, whether the next one goes dense.
#include <fmt/format.h>

#include <cstring>

#include "drivers/cuda/loader.h"
#include "gpu/path.h"

namespace paceline::gpu {
namespace {

// Where rows have cost more than all of the buffer, so many operations go dense before they are tried again.
constexpr int kDenseTurns = 64;
constexpr size_t kMetKept = 1024;

}  // namespace

Path::RowsMet& Path::rows_met(const AllReduce& r, const PathRequest& q) {
  if (rows_met_.size() >= kMetKept) rows_met_.clear();
  return rows_met_[fmt::format("{} {} {} {} {}", q.count, q.row_elements,
                               static_cast<int>(q.format.codec), static_cast<int>(q.format.dtype),
                               r.name)];
}

/// By what is the same on all ranks alone.
Result<bool> Path::goes_by_rows(RowsMet& met, PathRequest q) {
  if (q.count == 0 || !takes_rows(q)) return false;
  if (met.dense > 0) {
    --met.dense;
    return false;
  }
  uint64_t rows = 0;
  for (const auto& operation : met.last) {
    PACELINE_ASSIGN(const uint64_t more, pump_->most_rows(*operation));
    rows += more;
  }
  PACELINE_ASSIGN(const auto plan, plan_for(q));
  if (rows <= plan->paying_rows) return true;
  met.dense = kDenseTurns - 1;
  return false;
}

Status Path::encode_rows(const Job& job, const PathPiece& piece, cu::DevicePtr to) {
  const auto& plan = *job.operation->plan;
  device::cuda::EncodeRowsArguments e;
  e.gradient = job.source + piece.span.first * dtype_size(plan.request.format.dtype);
  e.scale = job.scale_in;
  e.encoded = to;
  e.state = out_state_;
  e.report = job.report;
  const auto format = plan.row_format(piece);
  if (device::cuda::row_state_bytes(format) > out_state_bytes_)
    return {Code::kInternal, fmt::format("{} rows have no room for their flags", format.rows)};
  return kernels_->encode_rows(format, e, out_);
}

/// After the piece has come, or the stream's wait for it: only what was sent is copied where the host sees how much that is.
Status Path::enqueue_rows_in(const Job& job, size_t index, const Lane& lane) {
  const auto& o = *job.operation;
  const auto& piece = o.plan->pieces[index];
  const auto format = o.plan->row_format(piece);
  const bool there = launches_later() && has_come(job, index);
  const auto bytes_of = [&](const std::byte* encoding) {
    uint32_t count = 0;
    std::memcpy(&count, encoding, sizeof count);
    return device::cuda::used_row_bytes(format, std::min<uint64_t>(count, format.capacity));
  };
  std::vector<cu::DevicePtr> encodings;
  for (uint64_t n = 0; n < static_cast<uint64_t>(shape_.nodes); ++n) {
    const std::byte* from = o.host + piece.in_offset + n * piece.slot_bytes;
    encodings.push_back(lane.in_slots + n * piece.slot_bytes);
    const uint64_t bytes = there ? bytes_of(from) : device::cuda::encoded_row_bytes(format);
    PACELINE_CUDA_CALL(api_, memcpy_htod_async, encodings.back(), from, bytes, lane.in);
  }
  device::cuda::CombineRowsArguments c;
  c.encoded = encodings;
  c.scale = job.scale_out;
  c.output = job.target + piece.span.first * dtype_size(format.dtype);
  return kernels_->combine_rows(format, c, lane.in);
}

Status Path::warm_up_rows() {
  constexpr uint64_t kRows = 64;
  const auto& slot = out_slots_[0];
  const auto data = lanes_[0].in_slots;
  for (const auto& [dtype, values] :
       {std::pair{DType::kFloat32, DType::kFloat32}, std::pair{DType::kFloat32, DType::kFloat16},
        std::pair{DType::kFloat32, DType::kBFloat16}, std::pair{DType::kFloat16, DType::kFloat16},
        std::pair{DType::kBFloat16, DType::kFloat16},
        std::pair{DType::kBFloat16, DType::kBFloat16}}) {
    const device::cuda::RowFormat format{dtype, values, kRows, kRows / 2, kRows};
    device::cuda::EncodeRowsArguments e;
    e.gradient = data;
    e.encoded = slot.memory;
    e.state = out_state_;
    PACELINE_RETURN_IF_ERROR(kernels_->encode_rows(format, e, out_));
    device::cuda::CombineRowsArguments c;
    c.encoded = {&slot.memory, 1};
    c.output = data;
    PACELINE_RETURN_IF_ERROR(kernels_->combine_rows(format, c, out_));
  }
  return Status::ok();
}

}  // namespace paceline::gpu
