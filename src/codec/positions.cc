#include "codec/positions.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <vector>

namespace paceline::codec::topk {

void BitWriter::put(uint64_t bits, int count) {
  word_ |= bits << filled_;
  filled_ += count;
  std::memcpy(out_, &word_, sizeof(word_));
  const int bytes = filled_ >> 3;
  out_ += bytes;
  // Shifting by 64 is undefined; filled_ is at most 63 here (7 left over and 56 new).
  word_ >>= bytes * 8;
  filled_ &= 7;
}

void BitWriter::put_unary(uint64_t count) {
  for (; count >= 56; count -= 56) put(0, 56);
  put(uint64_t{1} << count, static_cast<int>(count) + 1);
}

uint64_t BitWriter::finish() {
  if (filled_ > 0) {
    std::memcpy(out_, &word_, 1);
    ++out_;
  }
  return static_cast<uint64_t>(out_ - begin_);
}

namespace {

/// The best of three parameters around the mean gap's logarithm, and of `fallback`, which bounds the whole encoding.
int choose_rice(std::span<const uint32_t> gaps, int fallback) {
  if (gaps.empty()) return 0;
  uint32_t sum = 0;  // of a block's gaps: below 65,536
  for (const uint32_t gap : gaps) sum += gap;
  const auto mean = sum / static_cast<uint32_t>(gaps.size());
  const int middle = std::clamp(static_cast<int>(std::bit_width(mean)) - 1, 1, kMaxRice - 1);
  const int rice[4] = {fallback, middle - 1, middle, middle + 1};
  int best = 0;
  uint64_t least = UINT64_MAX;
  for (int i = 0; i < 4; ++i) {
    uint32_t quotients = 0;
    for (const uint32_t gap : gaps) quotients += gap >> rice[i];
    const uint64_t cost = quotients + gaps.size() * static_cast<uint64_t>(rice[i] + 1);
    if (cost < least) {
      least = cost;
      best = i;
    }
  }
  return rice[best];
}

}  // namespace

uint64_t encode_positions(std::span<const uint32_t> positions, uint64_t elements, std::byte* out) {
  const int fallback = best_rice(elements, positions.size());
  BitWriter writer(out);
  std::vector<uint32_t> gap_memory;
  std::size_t at = 0;
  for (uint64_t start = 0; start < elements; start += kBlockElements) {
    const uint64_t end = std::min(start + kBlockElements, elements);
    std::size_t stop = at;
    while (stop < positions.size() && positions[stop] < end) ++stop;
    gap_memory.resize(stop - at);
    auto next = static_cast<uint32_t>(start);
    for (uint32_t& gap : gap_memory) {
      gap = positions[at] - next;
      next = positions[at++] + 1;
    }
    const std::span<const uint32_t> gaps = gap_memory;
    const int rice = choose_rice(gaps, fallback);
    writer.put(static_cast<uint64_t>(rice) | static_cast<uint64_t>(gaps.size()) << kRiceBits,
               kRiceBits + kCountBits);
    const uint32_t low_mask = (1U << rice) - 1;
    for (const uint32_t gap : gaps) {
      const uint32_t quotient = gap >> rice;
      if (quotient + 1 + static_cast<uint32_t>(rice) <= 56) {
        writer.put((uint64_t{gap & low_mask} << 1 | 1) << quotient,
                   static_cast<int>(quotient) + 1 + rice);
      } else {
        writer.put_unary(quotient);
        writer.put(gap & low_mask, rice);
      }
    }
  }
  return writer.finish();
}

void PositionReader::refill() {
  if (end_ - at_ >= 8) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, at_, sizeof(bytes));
    word_ |= bytes << available_;
    const int taken = (63 - available_) >> 3;
    at_ += taken;
    available_ += taken * 8;
    // Bits above available_ belong to bytes that will be read again: they are the same bits.
    return;
  }
  while (available_ <= 56 && at_ != end_) {
    word_ &= available_ == 0 ? 0 : ~uint64_t{0} >> (64 - available_);
    word_ |= static_cast<uint64_t>(*at_++) << available_;
    available_ += 8;
  }
}

bool PositionReader::take(int count, uint64_t& bits) {
  if (available_ < count) refill();
  if (available_ < count) {
    error_ = "its positions end too early";
    return false;
  }
  bits = word_ & ((uint64_t{1} << count) - 1);
  word_ >>= count;
  available_ -= count;
  return true;
}

bool PositionReader::take_unary(uint64_t limit, uint64_t& count) {
  count = 0;
  for (;;) {
    if (available_ == 0) refill();
    if (available_ == 0) {
      error_ = "its positions end too early";
      return false;
    }
    const int zeros = std::min(std::countr_zero(word_), available_);
    count += static_cast<uint64_t>(zeros);
    if (count > limit) {
      error_ = "a position lies outside of its block";
      return false;
    }
    if (zeros < available_) {
      word_ >>= zeros;
      word_ >>= 1;
      available_ -= zeros + 1;
      return true;
    }
    word_ = 0;
    available_ = 0;
  }
}

bool PositionReader::next_block() {
  if (error_ != nullptr || block_ * kBlockElements >= elements_) return false;
  block_start_ = block_ * kBlockElements;
  block_length_ = std::min(kBlockElements, elements_ - block_start_);
  ++block_;
  cursor_ = 0;
  uint64_t bits = 0;
  if (!take(kRiceBits + kCountBits, bits)) return false;
  rice_ = static_cast<int>(bits & ((1 << kRiceBits) - 1));
  entries_ = static_cast<uint32_t>(bits >> kRiceBits);
  if (rice_ > kMaxRice) error_ = "a block's Rice parameter is out of range";
  if (entries_ > block_length_) error_ = "a block has more entries than elements";
  return error_ == nullptr;
}

bool PositionReader::next(uint64_t& position) {
  if (error_ != nullptr) return false;
  uint64_t quotient = 0;
  uint64_t low = 0;
  if (available_ < 32) refill();
  if (!take_unary((block_length_ - cursor_) >> rice_, quotient) || !take(rice_, low)) return false;
  cursor_ += quotient << rice_ | low;
  if (cursor_ >= block_length_) {
    error_ = "a position lies outside of its block";
    return false;
  }
  position = block_start_ + cursor_;
  ++cursor_;
  return true;
}

bool PositionReader::next(uint32_t count, uint64_t* positions) {
  if (error_ != nullptr) return false;
  uint32_t done = 0;
  while (done < count) {
    // Many entries on variables of its own, as long as whole words can be read and an entry fits into one.
    const std::byte* at = at_;
    uint64_t word = word_;
    uint64_t cursor = cursor_;
    int available = available_;
    const uint64_t low_mask = (uint64_t{1} << rice_) - 1;
    while (done < count && end_ - at >= 8) {
      uint64_t bytes = 0;
      std::memcpy(&bytes, at, sizeof(bytes));
      word |= bytes << available;  // as in refill()
      at += (63 - available) >> 3;
      available |= 56;
      if (word == 0) break;
      const int quotient = std::countr_zero(word);
      const int bits = quotient + 1 + rice_;
      if (bits > available) break;
      cursor += static_cast<uint64_t>(quotient) << rice_ | (word >> quotient >> 1 & low_mask);
      if (cursor >= block_length_) {
        error_ = "a position lies outside of its block";
        return false;
      }
      word = word >> quotient >> 1 >> rice_;
      available -= bits;
      positions[done++] = block_start_ + cursor++;
    }
    at_ = at;
    word_ = word;
    cursor_ = cursor;
    available_ = available;
    if (done < count && !next(positions[done++])) return false;
  }
  return true;
}

const char* PositionReader::finish() {
  if (error_ != nullptr) return error_;
  while (at_ != end_ && available_ < 56) {
    word_ &= available_ == 0 ? 0 : ~uint64_t{0} >> (64 - available_);
    word_ |= static_cast<uint64_t>(*at_++) << available_;
    available_ += 8;
  }
  if (at_ != end_ || available_ >= 8) return "bytes follow its last position";
  if (available_ > 0 && (word_ & ((uint64_t{1} << available_) - 1)) != 0)
    return "its padding is not zero";
  return "";
}

}  // namespace paceline::codec::topk
