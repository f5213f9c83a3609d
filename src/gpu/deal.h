// How messages are dealt over several wires between the nodes.
//
// A message that is long enough is cut, a slice a wire, so that a piece alone uses all of them; a short one goes whole,
// over the wire that the piece and the two nodes stand for. Both ends work it out from what both know, and no slice says where it belongs: on every
// wire the slices of one stream come in the order of their pieces.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace paceline::gpu {

inline constexpr int kMostWires = 8;
/// A slice has at least so many bytes: what a thread copies in the time that a message more costs (two to three
/// round trips, a tenth of a millisecond).
inline constexpr uint64_t kLeastSlice = 256U << 10;
/// Slices begin at multiples of this.
inline constexpr uint64_t kSliceAlign = 256;

/// Where nobody asked for a number, with so many ranks of the job and cores on the node. One thread copies some 16 Gb/s
/// each way while nothing else happens, and about half of that beside a training step: more of them, if there are cores.
inline int fitting_wires(int ranks, int cores) {
  if (cores < 4 * ranks) return 1;
  return ranks == 1 && cores >= 8 ? 4 : 2;
}

struct Slice {
  int wire = 0;
  uint64_t first = 0, bytes = 0;  ///< of the message
};

class Deal {
 public:
  /// number: of the message, counted alike at both ends. least: at least kMostWires × kSliceAlign.
  Deal(uint64_t bytes, uint64_t number, int wires, uint64_t least = kLeastSlice) {
    if (bytes == 0) return;
    const auto all = static_cast<uint64_t>(wires);
    const uint64_t slices = std::clamp<uint64_t>(bytes / least, 1, all);
    const uint64_t each =
        slices == 1 ? bytes : ((bytes - 1) / slices / kSliceAlign + 1) * kSliceAlign;
    for (uint64_t first = 0; first < bytes; first += each) {
      const auto wire = static_cast<int>((number + static_cast<uint64_t>(count_)) % all);
      slices_[static_cast<size_t>(count_++)] = {wire, first, std::min(each, bytes - first)};
    }
  }
  [[nodiscard]] int count() const { return count_; }
  [[nodiscard]] auto begin() const { return slices_.begin(); }
  [[nodiscard]] auto end() const { return slices_.begin() + count_; }

 private:
  std::array<Slice, kMostWires> slices_;
  int count_ = 0;
};

}  // namespace paceline::gpu
