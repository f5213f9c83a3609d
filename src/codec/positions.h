// The bit stream of a top-k encoding's positions (drawn in topk_format.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "codec/topk_format.h"

namespace paceline::codec::topk {

/// Writes bits, least significant first, whole words at a time: up to kSlackBytes beyond the end
/// are overwritten.
class BitWriter {
 public:
  explicit BitWriter(std::byte* out) : begin_(out), out_(out) {}
  /// `count` <= 56; `bits` has no bits above.
  void put(uint64_t bits, int count);
  /// `count` zeros and a one.
  void put_unary(uint64_t count);
  /// Pads to a byte; returns the bytes written.
  uint64_t finish();

 private:
  std::byte* begin_;
  std::byte* out_;
  uint64_t word_ = 0;
  int filled_ = 0;  ///< bits of word_ in use, below 8 between calls
};

/// Encodes ascending positions below `elements`; `out` has room for position_bits() bits and
/// kSlackBytes. Returns the bytes.
uint64_t encode_positions(std::span<const uint32_t> positions, uint64_t elements, std::byte* out);

/// Walks an encoded stream. next_block(), then its entries by next(); an error makes both return
/// false for good.
class PositionReader {
 public:
  PositionReader(std::span<const std::byte> bytes, uint64_t elements)
      : at_(bytes.data()), end_(bytes.data() + bytes.size()), elements_(elements) {}
  /// Begins the next block; false after the last one or on error.
  bool next_block();
  [[nodiscard]] uint32_t entries() const { return entries_; }
  /// The next `count` positions of the block, counted from the start of the encoding; not more than are left of it.
  bool next(uint32_t count, uint64_t* positions);
  /// "" or what is wrong. After the last block: also checks that nothing but zero padding is left.
  const char* finish();

 private:
  bool next(uint64_t& position);
  void refill();
  bool take(int count, uint64_t& bits);
  bool take_unary(uint64_t limit, uint64_t& count);

  const std::byte* at_;
  const std::byte* end_;
  uint64_t elements_;
  uint64_t block_ = 0;  ///< blocks begun
  uint64_t block_start_ = 0;
  uint64_t block_length_ = 0;
  uint64_t cursor_ = 0;  ///< next position within the block
  uint32_t entries_ = 0;
  int rice_ = 0;
  uint64_t word_ = 0;
  int available_ = 0;
  const char* error_ = nullptr;
};

}  // namespace paceline::codec::topk
