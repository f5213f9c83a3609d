// The ranks of one node, joined by NCCL: a reduce-scatter before the wire and an all-gather after it.
//
// Two communicators. The reduce-scatter of one operation and the all-gather of an earlier one are on two streams, and a
// GPU may run them in either order: on one communicator that would be a deadlock between GPUs.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"
#include "drivers/nccl/api.h"
#include "gpu/path_plan.h"

namespace paceline::gpu {

namespace nc = drivers::nccl;

/// What the ranks of a node must share to meet.
struct NodeIds {
  nc::UniqueId scatter{}, gather{};
};

/// Thread blocks (CTAs) of NCCL's collectives inside a node. Each takes a multiprocessor from the model, whose kernels that
/// fill the GPU once take twice as long then; with more of them that is over sooner (H200: VGG-16 with top-k 40.1 ms with
/// 4, 39.7 with 8, 39.6 with 16 and with 32; exact ResNet-50 63.7 with 4, 62.9 with 16).
inline constexpr int kNodeCtas = 16;

class Node {
 public:
  /// most_ctas: thread blocks that NCCL may take for a collective; the same on all ranks.
  Node(const nc::Api& api, int ranks, int rank, int most_ctas = kNodeCtas)
      : api_(api), ranks_(ranks), rank_(rank), most_ctas_(most_ctas) {}
  ~Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  static Result<NodeIds> make_ids(const nc::Api& api);
  /// Blocks until the node's ranks have met. The device's context is current.
  Status join(const NodeIds& ids);
  /// In place: this rank's own span of `data` holds the node's sums.
  Status reduce_scatter(const PathPlan& plan, uint64_t data, drivers::cuda::Stream stream);
  /// In place: every rank's own span, to all.
  Status all_gather(const PathPlan& plan, uint64_t data, drivers::cuda::Stream stream);
  /// `blocks` times the node's sum of a run of blocks, one per rank, `count` elements each: this rank's of run i goes
  /// to output + i × output_stride (bytes).
  Status reduce_scatter_blocks(uint64_t input, uint64_t output, uint64_t output_stride, int blocks,
                               uint64_t count, DType dtype, drivers::cuda::Stream stream);
  /// In place: `blocks` runs of blocks of `bytes`, one per rank, of which this rank has its own.
  Status all_gather_blocks(uint64_t data, int blocks, uint64_t bytes, drivers::cuda::Stream stream);
  Status broadcast(uint64_t data, uint64_t bytes, int root, drivers::cuda::Stream stream);
  /// Collectives of sizes up to what `bytes` of `scratch` hold, on each communicator. All ranks of the node call it.
  Status warm_up(uint64_t scratch, uint64_t bytes, drivers::cuda::Stream stream);
  Status check() const;
  /// Kernels that wait for other ranks end. From any thread; returns at once, since an abort frees memory, for which CUDA
  /// waits until the whole device is idle, and that may take another communicator's abort: each has a thread of its own.
  void abort();
  /// Whether the aborts, if there were any, have ended within `seconds`.
  [[nodiscard]] bool wait_aborted(double seconds) const;
  /// The orderly end: all ranks of the node call it.
  Status destroy();

 private:
  /// A communicator, and what its calls and its abort take turns by. A thread may have to wait inside NCCL until the other
  /// ranks have made the same call (it connects them for an algorithm that is new to it), and theirs may be the other
  /// communicator's turn: so one each.
  struct Side {
    std::mutex mutex;
    nc::Comm comm = nullptr;
    std::atomic<bool> has_ended{false};  ///< its abort
  };
  static void abort(const nc::Api& api, const std::shared_ptr<Side>& side);
  Status usable() const;
  const nc::Api& api_;
  int ranks_, rank_, most_ctas_;
  std::shared_ptr<Side> scatter_ = std::make_shared<Side>();  ///< the aborts' threads', too
  std::shared_ptr<Side> gather_ = std::make_shared<Side>();
  std::atomic<bool> aborted_{false};
};

}  // namespace paceline::gpu
