#include "gpu/node.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "drivers/nccl/loader.h"

namespace paceline::gpu {
namespace {

// NCCL connects ranks for an algorithm when it takes it first, and which one depends on the size.
constexpr uint64_t kWarmUpStep = 32;
constexpr int kAbortLooks =
    1000;  // of a millisecond: how long an abort waits for a call that is under way

nc::Type type_of(DType t) {
  return t == DType::kFloat32   ? nc::Type::kFloat32
         : t == DType::kFloat16 ? nc::Type::kFloat16
                                : nc::Type::kBFloat16;
}

#define NCCL_CALL(comm, what, call)                     \
  do {                                                  \
    if (auto nccl_error = (call); nccl_error != 0)      \
      return nc::explain(api_, nccl_error, comm, what); \
  } while (0)

}  // namespace

Result<NodeIds> Node::make_ids(const nc::Api& api) {
  NodeIds ids;
  for (auto* id : {&ids.scatter, &ids.gather}) {
    if (auto error = api.get_unique_id(id); error != 0)
      return nc::explain(api, error, nullptr, "ncclGetUniqueId");
  }
  return ids;
}

Status Node::join(const NodeIds& ids) {
  nc::Config config;
  config.blocking = 1;
  config.min_ctas = 1;
  config.max_ctas = most_ctas_;
  // A thread that its caller has left behind enters no more of NCCL.
  PACELINE_RETURN_IF_ERROR(usable());
  NCCL_CALL(nullptr, "ncclCommInitRankConfig",
            api_.comm_init_rank_config(&scatter_->comm, ranks_, ids.scatter, rank_, &config));
  PACELINE_RETURN_IF_ERROR(usable());
  NCCL_CALL(nullptr, "ncclCommInitRankConfig",
            api_.comm_init_rank_config(&gather_->comm, ranks_, ids.gather, rank_, &config));
  return Status::ok();
}

Status Node::usable() const {
  if (!aborted_) return Status::ok();
  return {Code::kAborted,
          fmt::format("rank {} of the node: its NCCL communicators inside the node were aborted, "
                      "for the job has failed; the first error says why, start it again",
                      rank_)};
}

Status Node::reduce_scatter(const PathPlan& plan, uint64_t data, drivers::cuda::Stream stream) {
  const std::lock_guard lock(scatter_->mutex);
  PACELINE_RETURN_IF_ERROR(usable());
  const auto dtype = plan.request.format.dtype;
  const auto at = [&](uint64_t element) {
    return reinterpret_cast<void*>(data + element * dtype_size(dtype));
  };
  NCCL_CALL(scatter_->comm, "ncclGroupStart", api_.group_start());
  nc::NcclResult error = 0;
  if (plan.shard > 0)
    error = api_.reduce_scatter(at(0), at(plan.shard * static_cast<uint64_t>(rank_)), plan.shard,
                                type_of(dtype), nc::Op::kSum, scatter_->comm, stream);
  if (error == 0 && plan.tail.elements > 0)
    error = api_.all_reduce(at(plan.tail.first), at(plan.tail.first), plan.tail.elements,
                            type_of(dtype), nc::Op::kSum, scatter_->comm, stream);
  const auto end = api_.group_end();
  NCCL_CALL(scatter_->comm, "reduce-scatter", error != 0 ? error : end);
  return Status::ok();
}

Status Node::all_gather(const PathPlan& plan, uint64_t data, drivers::cuda::Stream stream) {
  const std::lock_guard lock(gather_->mutex);
  PACELINE_RETURN_IF_ERROR(usable());
  const auto dtype = plan.request.format.dtype;
  const auto at = [&](uint64_t element) {
    return reinterpret_cast<void*>(data + element * dtype_size(dtype));
  };
  NCCL_CALL(gather_->comm, "ncclGroupStart", api_.group_start());
  nc::NcclResult error = 0;
  if (plan.shard > 0)
    error = api_.all_gather(at(plan.shard * static_cast<uint64_t>(rank_)), at(0), plan.shard,
                            type_of(dtype), gather_->comm, stream);
  if (error == 0 && plan.tail.elements > 0)
    error = api_.broadcast(at(plan.tail.first), at(plan.tail.first), plan.tail.elements,
                           type_of(dtype), ranks_ - 1, gather_->comm, stream);
  const auto end = api_.group_end();
  NCCL_CALL(gather_->comm, "all-gather", error != 0 ? error : end);
  return Status::ok();
}

Status Node::reduce_scatter_blocks(uint64_t input, uint64_t output, uint64_t output_stride,
                                   int blocks, uint64_t count, DType dtype,
                                   drivers::cuda::Stream stream) {
  if (count == 0) return Status::ok();
  const std::lock_guard lock(scatter_->mutex);
  PACELINE_RETURN_IF_ERROR(usable());
  const uint64_t run = count * dtype_size(dtype) * static_cast<uint64_t>(ranks_);
  NCCL_CALL(scatter_->comm, "ncclGroupStart", api_.group_start());
  nc::NcclResult error = 0;
  for (int i = 0; i < blocks && error == 0; ++i) {
    const auto at = static_cast<uint64_t>(i);
    error = api_.reduce_scatter(reinterpret_cast<void*>(input + at * run),
                                reinterpret_cast<void*>(output + at * output_stride), count,
                                type_of(dtype), nc::Op::kSum, scatter_->comm, stream);
  }
  const auto end = api_.group_end();
  NCCL_CALL(scatter_->comm, "reduce-scatter", error != 0 ? error : end);
  return Status::ok();
}

Status Node::all_gather_blocks(uint64_t data, int blocks, uint64_t bytes,
                               drivers::cuda::Stream stream) {
  if (bytes == 0) return Status::ok();
  const std::lock_guard lock(gather_->mutex);
  PACELINE_RETURN_IF_ERROR(usable());
  NCCL_CALL(gather_->comm, "ncclGroupStart", api_.group_start());
  nc::NcclResult error = 0;
  for (int i = 0; i < blocks && error == 0; ++i) {
    const uint64_t run = data + static_cast<uint64_t>(i) * static_cast<uint64_t>(ranks_) * bytes;
    error = api_.all_gather(reinterpret_cast<void*>(run + static_cast<uint64_t>(rank_) * bytes),
                            reinterpret_cast<void*>(run), bytes, nc::Type::kInt8, gather_->comm,
                            stream);
  }
  const auto end = api_.group_end();
  NCCL_CALL(gather_->comm, "all-gather", error != 0 ? error : end);
  return Status::ok();
}

Status Node::broadcast(uint64_t data, uint64_t bytes, int root, drivers::cuda::Stream stream) {
  if (bytes == 0) return Status::ok();
  const std::lock_guard lock(gather_->mutex);
  PACELINE_RETURN_IF_ERROR(usable());
  auto* const memory = reinterpret_cast<void*>(data);
  NCCL_CALL(gather_->comm, "broadcast",
            api_.broadcast(memory, memory, bytes, nc::Type::kInt8, root, gather_->comm, stream));
  return Status::ok();
}

Status Node::warm_up(uint64_t scratch, uint64_t bytes, drivers::cuda::Stream stream) {
  PathPlan plan;
  plan.request.shape.local_size = ranks_;
  const auto ranks = static_cast<uint64_t>(ranks_);
  const uint64_t most = (bytes / sizeof(float) - 1) / ranks;
  for (uint64_t elements = 1;; elements = std::min(elements * kWarmUpStep, most)) {
    plan.shard = elements;
    plan.tail = {elements * ranks, 1};
    PACELINE_RETURN_IF_ERROR(reduce_scatter(plan, scratch, stream));
    PACELINE_RETURN_IF_ERROR(all_gather(plan, scratch, stream));
    if (elements == most) return Status::ok();
  }
}

Status Node::check() const {
  const std::unique_lock scattering(scatter_->mutex, std::try_to_lock);
  const std::unique_lock gathering(gather_->mutex, std::try_to_lock);
  if (!scattering || !gathering || aborted_) return Status::ok();
  for (auto* comm : {scatter_->comm, gather_->comm}) {
    nc::NcclResult error = 0;
    if (comm == nullptr || api_.comm_get_async_error(comm, &error) != 0) continue;
    if (error != 0 && error != nc::kInProgress)
      return nc::explain(api_, error, comm, "a communicator failed");
  }
  return Status::ok();
}

void Node::abort() {
  if (aborted_.exchange(true)) return;
  for (const auto& side : {scatter_, gather_}) {
    std::thread([&api = api_, side] {
      abort(api, side);
      side->has_ended = true;
    }).detach();
  }
}

void Node::abort(const nc::Api& api, const std::shared_ptr<Side>& side) {
  // A thread that hangs inside NCCL holds the mutex; only the abort lets it go on.
  std::unique_lock lock(side->mutex, std::try_to_lock);
  for (int looks = 0; !lock && looks < kAbortLooks; ++looks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)lock.try_lock();
  }
  if (side->comm != nullptr) api.comm_abort(std::exchange(side->comm, nullptr));
}

bool Node::wait_aborted(double seconds) const {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (aborted_ && !(scatter_->has_ended && gather_->has_ended)) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

Status Node::destroy() {
  const std::scoped_lock lock(scatter_->mutex, gather_->mutex);
  if (aborted_) return Status::ok();
  for (const auto& side : {scatter_, gather_}) {
    if (side->comm != nullptr)
      NCCL_CALL(nullptr, "ncclCommDestroy", api_.comm_destroy(std::exchange(side->comm, nullptr)));
  }
  return Status::ok();
}

}  // namespace paceline::gpu
