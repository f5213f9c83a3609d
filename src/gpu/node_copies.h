// The all-gather of an all-reduce inside a node, and the way of gradients to who adds them up, by copy engines: no
// multiprocessor is taken from the model, and nothing of one rank waits on a GPU for another rank.
//
// Every rank has two slots of device memory that the node's other ranks can read (CUDA IPC). An operation's shard is put
// into a slot; once the hosts of the node know that all shards are there (they meet, see pump.h), each rank copies the
// others' out of their slots to where they belong.
//
// Why two slots need no word that a slot has been read. On every rank one stream does, in this order: put(n), tell the host,
// wait until the node has met for n, take(n), put(n + 1), tell, … A rank meets for n + 1 after it was told, and so after
// its take(n). So who is past the meeting for n + 1 knows that all ranks have read the slots of n, and put(n + 2) is.
//
// Gradients are given, not taken: every rank has, for each of the others, two slots more, into which those copy what it adds
// up. Of these, too, two are enough: one stream does give(n), tells the host, waits until the node has met for that,
// reads the slots (sources()), and only then give(n + 1), and tells. Who is past that second meeting knows that all have
// read what was given for n, and gives n + 2.
//
// Like Node's calls, all ranks of a node make these for the same operations in the same order.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "gpu/device.h"
#include "gpu/path_plan.h"

namespace paceline::gpu {

class NodeCopies {
 public:
  static constexpr uint64_t kSlots = 2;

  NodeCopies(const cu::Api& api, int ranks, int rank)
      : api_(api), rank_(rank), memory_(api), seen_(static_cast<size_t>(ranks)) {}
  ~NodeCopies() { close(); }
  NodeCopies(const NodeCopies&) = delete;
  NodeCopies& operator=(const NodeCopies&) = delete;

  /// Takes memory for shards of up to `bytes`; `lands`: for what others give, too.
  Status prepare(uint64_t bytes, bool lands);
  /// Whether this rank has room for what is given; all ranks, once land() was told.
  [[nodiscard]] bool lands() const { return lands_; }
  void land(bool all) { lands_ = all; }
  [[nodiscard]] const cu::IpcMemHandle& handle() const { return handle_; }
  /// Whether a slot holds a shard of the plan; the same on all ranks of the node.
  [[nodiscard]] bool fits(const PathPlan& plan) const;
  /// What the node's ranks have prepared, by local rank. kUnsupported where one of them can't be read from here.
  Status open(std::span<const cu::IpcMemHandle> handles);
  /// This rank's shard of `data`, the plan's buffer, into the next slot.
  Status put(const PathPlan& plan, uint64_t data, cu::Stream stream);
  /// The other ranks' shards of the same operation, from their slots to `data`. After the meeting.
  Status take(const PathPlan& plan, uint64_t data, cu::Stream stream);
  /// The other ranks' shards of `data`, this rank's gradient, to each of them.
  Status give(const PathPlan& plan, uint64_t data, cu::Stream stream);
  /// After the meeting: what there is of this rank's shard, by local rank; its own is in `data`.
  [[nodiscard]] std::vector<cu::DevicePtr> sources(const PathPlan& plan, uint64_t data) const;
  /// Lets go of the others' memory. The context is current, and all that was taken is there.
  void close();
  /// After a fault others may still read this rank's memory, and this GPU theirs: all stays until the process ends.
  void leave();
  [[nodiscard]] uint64_t device_bytes() const { return memory_.device_bytes(); }

 private:
  const cu::Api& api_;
  int rank_;
  DeviceObjects memory_;
  uint64_t slot_bytes_ = 0;
  cu::DevicePtr own_ =
      0;  ///< kSlots slots; then, for each of the other ranks, as many in which what it gives lands
  cu::IpcMemHandle handle_{};
  std::vector<cu::DevicePtr>
      seen_;  ///< by local rank: its slots as this GPU reads them; 0: not open
  uint64_t puts_ = 0;
  [[nodiscard]] uint64_t landing(int from, int at) const;
  /// copy(rank, its shard), for the node's other ranks that have one.
  template <class Copy>
  Status for_others(const PathPlan& plan, Copy copy) const;
  bool lands_ = false;
  uint64_t gives_ = 0;
};

}  // namespace paceline::gpu
