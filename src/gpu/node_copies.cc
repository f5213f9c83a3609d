#include "gpu/node_copies.h"

#include <fmt/format.h>

#include <algorithm>

#include "drivers/cuda/loader.h"

namespace paceline::gpu {
namespace {

// Smaller memory is part of a page of the device's that holds other things too, and only whole ones can be shared.
constexpr uint64_t kSharedPage = 2U << 20;

/// What the node's rank `rank` brings; the last one has what does not divide, too.
Span shard_of(const PathPlan& plan, int rank) {
  const auto at = static_cast<uint64_t>(rank);
  const bool last = rank + 1 == plan.request.shape.local_size;
  return {at * plan.shard, plan.shard + (last ? plan.tail.elements : 0)};
}

}  // namespace

Status NodeCopies::prepare(uint64_t bytes, bool lands) {
  lands_ = lands;
  slot_bytes_ = (bytes + kHostAlign - 1) / kHostAlign * kHostAlign;
  const uint64_t slots = kSlots * (lands ? seen_.size() : 1);
  const uint64_t all = (slots * slot_bytes_ + kSharedPage - 1) / kSharedPage * kSharedPage;
  PACELINE_ASSIGN(own_, memory_.memory(all, "what the node's GPUs read of each other"));
  PACELINE_CUDA_CALL(api_, ipc_get_mem_handle, &handle_, own_);
  return Status::ok();
}

bool NodeCopies::fits(const PathPlan& plan) const {
  const Span longest = shard_of(plan, plan.request.shape.local_size - 1);
  return longest.elements * dtype_size(plan.request.format.dtype) <= slot_bytes_;
}

Status NodeCopies::open(std::span<const cu::IpcMemHandle> handles) {
  for (size_t r = 0; r < seen_.size(); ++r) {
    if (static_cast<int>(r) == rank_) continue;
    if (auto error = api_.ipc_open_mem_handle(&seen_[r], handles[r], cu::kIpcLazyPeerAccess);
        error != 0) {
      seen_[r] = 0;
      close();
      return {
          Code::kUnsupported,
          cu::explain(api_, error, fmt::format("the memory of local rank {}'s GPU", r)).message()};
    }
  }
  return Status::ok();
}

/// Each begins with its neighbour, so that not all copy from or to one GPU at a time.
template <class Copy>
Status NodeCopies::for_others(const PathPlan& plan, Copy copy) const {
  const auto ranks = static_cast<int>(seen_.size());
  for (int step = 1; step < ranks; ++step) {
    const int r = (rank_ + step) % ranks;
    const Span span = shard_of(plan, r);
    if (span.elements > 0) PACELINE_RETURN_IF_ERROR(copy(r, span));
  }
  return Status::ok();
}

Status NodeCopies::put(const PathPlan& plan, uint64_t data, cu::Stream stream) {
  const uint64_t slot = puts_++ % kSlots;
  const Span span = shard_of(plan, rank_);
  const uint64_t size = dtype_size(plan.request.format.dtype);
  if (span.elements == 0) return Status::ok();
  PACELINE_CUDA_CALL(api_, memcpy_dtod_async, own_ + slot * slot_bytes_, data + span.first * size,
                     span.elements * size, stream);
  return Status::ok();
}

Status NodeCopies::take(const PathPlan& plan, uint64_t data, cu::Stream stream) {
  const uint64_t slot = (puts_ - 1) % kSlots;
  const uint64_t size = dtype_size(plan.request.format.dtype);
  return for_others(plan, [&](int r, Span span) -> Status {
    PACELINE_CUDA_CALL(api_, memcpy_dtod_async, data + span.first * size,
                       seen_[static_cast<size_t>(r)] + slot * slot_bytes_, span.elements * size,
                       stream);
    return Status::ok();
  });
}

/// From the beginning of rank `at`'s memory: where what rank `from` gives it lands, this time.
uint64_t NodeCopies::landing(int from, int at) const {
  const auto index = static_cast<uint64_t>(from < at ? from : from - 1);
  return (kSlots * (1 + index) + gives_ % kSlots) * slot_bytes_;
}

Status NodeCopies::give(const PathPlan& plan, uint64_t data, cu::Stream stream) {
  ++gives_;
  const uint64_t size = dtype_size(plan.request.format.dtype);
  return for_others(plan, [&](int r, Span span) -> Status {
    PACELINE_CUDA_CALL(api_, memcpy_dtod_async, seen_[static_cast<size_t>(r)] + landing(rank_, r),
                       data + span.first * size, span.elements * size, stream);
    return Status::ok();
  });
}

std::vector<cu::DevicePtr> NodeCopies::sources(const PathPlan& plan, uint64_t data) const {
  std::vector<cu::DevicePtr> sources;
  sources.reserve(seen_.size());
  for (int r = 0; r < static_cast<int>(seen_.size()); ++r)
    sources.push_back(r == rank_ ? data + plan.own.first * dtype_size(plan.request.format.dtype)
                                 : own_ + landing(r, rank_));
  return sources;
}

void NodeCopies::leave() {
  memory_.abandon();
  std::fill(seen_.begin(), seen_.end(), 0);
}

void NodeCopies::close() {
  for (auto& memory : seen_) {
    if (memory != 0) api_.ipc_close_mem_handle(memory);
    memory = 0;
  }
}

}  // namespace paceline::gpu
