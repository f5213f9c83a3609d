// Memory for a piece on its way through a channel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace paceline::wire {

/// One buffer that waits for whichever connection reads a piece next: there are many of them, and few are in the middle
/// of a piece at a time.
class Spare {
 public:
  /// At least so many bytes, contents arbitrary.
  std::vector<std::byte> take(std::size_t bytes) {
    std::vector<std::byte> taken = std::exchange(memory_, {});
    if (taken.size() < bytes) taken = std::vector<std::byte>(bytes);
    return taken;
  }
  /// What take() has given, of which `used` bytes were needed. It is kept, unless twice the most that was needed of late
  /// would do.
  void give_back(std::vector<std::byte> memory, std::size_t used) {
    if (++uses_ > kRemembered) {
      uses_ = 1;
      most_before_ = std::exchange(most_, 0);
    }
    most_ = std::max(most_, used);
    const bool fits = memory.size() <= 2 * std::max(most_, most_before_);
    if (fits && memory.size() > memory_.size()) memory_ = std::move(memory);
  }

 private:
  static constexpr uint32_t kRemembered = 64;  ///< uses, at least; and twice as many at most
  std::vector<std::byte> memory_;
  uint32_t uses_ = 0;
  std::size_t most_ = 0, most_before_ = 0;  ///< of this stretch of uses, and of the one before
};

}  // namespace paceline::wire
