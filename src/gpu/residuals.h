// The memory of error feedback on the device: what a rank has not sent yet of its shards, by parameter and element.
//
// Two planes of float32. Between two calls of commit() or rollback() lies one step: it reads one plane and writes the
// other, and commit() turns them around, so neither copies anything. Where a step's buckets cut the parameters as the
// step before did, an encoding reads and writes in place; after a change (DDP rebuilds its buckets once) the values are
// gathered by copies on the stream, once. With `velocity`, momentum correction's velocities lie beside them in planes of
// their own.
//
// commit(), read() and write() enqueue on the store's own stream, which must be ordered after whatever uses places of the
// step before; place() on the stream that will encode.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "drivers/cuda/api.h"

namespace paceline::gpu {

/// Elements [offset, offset + elements) of the parameter `key`.
struct ResidualRange {
  uint64_t key = 0;
  uint64_t offset = 0;
  uint64_t elements = 0;
};

class Residuals {
 public:
  struct Memory {
    std::array<drivers::cuda::DevicePtr, 2> residual{};  ///< planes of `elements` floats
    std::array<drivers::cuda::DevicePtr, 2> velocity{};  ///< 0: none
    uint64_t elements = 0;
  };
  struct Place {
    drivers::cuda::DevicePtr before = 0, after = 0;  ///< may be equal
    drivers::cuda::DevicePtr velocity_before = 0, velocity_after = 0;
  };

  Residuals(const drivers::cuda::Api& api, drivers::cuda::Stream stream)
      : api_(api), stream_(stream) {}

  /// Takes over values that are kept in the memory so far. Nothing is under way.
  Status use(const Memory& memory);
  [[nodiscard]] bool ready() const { return memory_.elements > 0; }
  [[nodiscard]] bool has_velocity() const { return memory_.velocity[0] != 0; }

  /// Where the residuals of `ranges`, one after the other, are read and written. What was never used is 0.
  /// kResourceExhausted: the planes are full.
  Result<Place> place(std::span<const ResidualRange> ranges, drivers::cuda::Stream stream);
  /// Committed values that this rank gives away.
  struct Parting {
    uint64_t at = 0;  ///< element of the concatenated ranges
    uint64_t elements = 0;
    drivers::cuda::DevicePtr values =
        0;  ///< aligned to 4 bytes; for what is enqueued before the next call
  };
  /// Appends what is kept of `ranges`, which belong to another rank from now on. With the step's commit they are gone,
  /// a rollback brings them back. Velocities go without being handed out.
  void release(std::span<const ResidualRange> ranges, std::vector<Parting>& out);
  Status commit();
  Status rollback();
  /// The step of these parameters alone. What others have written stays to be settled, so the planes can't turn around:
  /// a commit copies the parameters' values.
  Status commit(std::span<const uint64_t> keys);
  Status rollback(std::span<const uint64_t> keys);

  enum class Kind { kResidual, kVelocity };
  /// Adds [0, data.size()) of a parameter, as of the last commit; what is another rank's, or was never used, is 0.
  /// Velocities only where has_velocity().
  Status add_to(uint64_t key, std::span<float> data, Kind kind = Kind::kResidual);
  /// No elements: forget(). What is kept beside it, of the other kind, stays as it is.
  Status write(uint64_t key, std::span<const float> data, Kind kind = Kind::kResidual);
  /// Its committed values are 0 from now on; from the next call on others may have their memory.
  void forget(uint64_t key);
  /// f(address, elements) for the committed values as they lie in memory, gaps between parameters included: for a
  /// kernel that multiplies them. Addresses are aligned as the planes are.
  template <class F>
  Status for_committed_planes(F f) const {
    return for_stretch(0, used(now_), f);
  }
  /// The same for what is kept of these parameters alone: a parameter may begin at any element of a plane.
  template <class F>
  Status for_committed(std::span<const uint64_t> keys, F f) const {
    for (const auto& [position, elements] : committed_runs(keys))
      PACELINE_RETURN_IF_ERROR(for_stretch(position, elements, f));
    return Status::ok();
  }

 private:
  static constexpr uint64_t kStretch = uint64_t{1} << 30;  // what one launch takes
  struct Entry {
    uint64_t elements = 0;
    uint64_t position = 0;  ///< in its plane
  };
  using Entries = std::map<uint64_t, Entry>;  ///< by first element; they don't overlap
  using Layout = std::unordered_map<uint64_t, Entries>;
  /// A stretch of a range: where it is kept.
  struct Found {
    uint64_t elements = 0;
    int plane = -1;  ///< -1: nowhere, it is 0
    uint64_t position = 0;
  };

  /// f for elements of the plane of committed values.
  template <class F>
  Status for_stretch(uint64_t first, uint64_t elements, F f) const {
    const auto plane = static_cast<size_t>(now_);
    for (const auto begin : {memory_.residual[plane], memory_.velocity[plane]}) {
      if (begin == 0) continue;
      for (uint64_t at = 0; at < elements; at += kStretch)
        PACELINE_RETURN_IF_ERROR(f(address(begin, first + at), std::min(kStretch, elements - at)));
    }
    return Status::ok();
  }

  static drivers::cuda::DevicePtr address(drivers::cuda::DevicePtr plane, uint64_t position) {
    return plane + position * sizeof(float);
  }
  static void find(const Layout& layout, int plane, const ResidualRange& range,
                   std::vector<Found>& out, std::vector<ResidualRange>& missing);
  void look_up(std::span<const ResidualRange> ranges, std::vector<Found>& out) const;
  /// (position, elements), in the order of the plane.
  [[nodiscard]] std::vector<std::pair<uint64_t, uint64_t>> committed_runs(
      std::span<const uint64_t> keys) const;
  [[nodiscard]] drivers::cuda::DevicePtr plane_of(Kind kind) const {
    return (kind == Kind::kResidual ? memory_.residual
                                    : memory_.velocity)[static_cast<size_t>(now_)];
  }
  static void remove(Layout& layout, const ResidualRange& range);
  Status copy(uint64_t to, const Found& from, int to_plane, drivers::cuda::Stream stream);
  Result<uint64_t> take(int plane, uint64_t elements);
  Result<uint64_t> take_tidily(int plane, uint64_t elements, drivers::cuda::Stream stream);
  struct Written {
    ResidualRange range;
    uint64_t position = 0;  ///< in the plane that is not the committed values'
  };
  [[nodiscard]] std::vector<Written> written(std::span<const uint64_t> keys) const;
  Status make_room(std::span<const Written> ranges);
  void forget_written(std::span<const uint64_t> keys);
  void take_back(uint64_t key, const Entries& released);
  template <class F>
  void for_entries_in(int plane, F f);
  void collect(int plane);
  Status compact(int plane, drivers::cuda::Stream stream);
  /// Elements up to the end of what was handed out.
  [[nodiscard]] uint64_t used(int plane) const {
    const auto& runs = runs_[static_cast<size_t>(plane)];
    return runs.empty() ? 0 : runs.rbegin()->second;
  }
  void insert(Layout& layout, std::span<const ResidualRange> ranges, uint64_t position);

  const drivers::cuda::Api& api_;
  drivers::cuda::Stream stream_;
  Memory memory_;
  int now_ = 0;  ///< the plane of committed values
  /// What was handed out, by plane: begin, end.
  std::array<std::map<uint64_t, uint64_t>, 2> runs_;
  Layout committed_, latest_;  ///< in plane now_, in the other
  Layout released_;            ///< in plane now_: given away in this step
};

}  // namespace paceline::gpu
