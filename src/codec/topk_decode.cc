// Top-k, the decoding side: bytes from the wire, none of them trusted.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/bytes.h"
#include "codec/codec.h"
#include "codec/positions.h"
#include "codec/topk_format.h"
#include "device/cpu/casts.h"
#include "device/cpu/float_mode.h"
#include "device/cpu/kernels.h"

namespace paceline::codec {
namespace {

Status corrupted(std::string_view what) {
  return {Code::kCorrupted, fmt::format("a top-k message can't be decoded: {}", what)};
}

struct Encoding {
  uint8_t flags = 0;
  int exponent = 0;
  uint64_t elements = 0;
  uint64_t entries = 0;
  std::span<const std::byte> values;
  std::span<const std::byte> positions;
  [[nodiscard]] bool fp16() const { return (flags & topk::kFlagFp16) != 0; }
  [[nodiscard]] bool finite() const { return (flags & topk::kFlagNonFinite) == 0; }
};

Status check_header(const Encoding& e, uint8_t zero, uint64_t elements) {
  if ((e.flags & ~(topk::kFlagNonFinite | topk::kFlagFp16)) != 0 || zero != 0)
    return corrupted(
        fmt::format("flags {:#x} and {:#x} are unknown to this version", e.flags, zero));
  if (e.elements != elements)
    return corrupted(
        fmt::format("it encodes {} elements, the buffer has {}", e.elements, elements));
  if (e.entries > e.elements)
    return corrupted(fmt::format("{} entries in {} elements", e.entries, e.elements));
  if (!e.finite() && e.entries != 0) return corrupted("it is flagged non-finite but has entries");
  if (e.exponent < topk::kMinExponent || e.exponent > topk::kMaxExponent ||
      (!e.fp16() && e.exponent != 0))
    return corrupted(fmt::format("exponent {} is out of range", e.exponent));
  return Status::ok();
}

Result<Encoding> parse(std::span<const std::byte> bytes, uint64_t elements) {
  ByteReader reader(bytes);
  Encoding e;
  const auto magic = reader.get<uint32_t>();
  e.flags = reader.get<uint8_t>();
  const auto zero = reader.get<uint8_t>();
  e.exponent = reader.get<int16_t>();
  e.elements = reader.get<uint64_t>();
  e.entries = reader.get<uint64_t>();
  if (!reader.ok())
    return corrupted(
        fmt::format("it has {} bytes, its header alone {}", bytes.size(), topk::kHeaderBytes));
  if (magic != topk::kMagic)
    return corrupted(fmt::format("it begins with {:#010x}, not \"PTK1\"", magic));
  PACELINE_RETURN_IF_ERROR(check_header(e, zero, elements));
  e.values = reader.get_bytes(e.entries * (e.fp16() ? 2 : 4));
  if (!reader.ok())
    return corrupted(fmt::format("{} entries don't fit into {} bytes", e.entries, bytes.size()));
  e.positions = reader.get_bytes(reader.remaining());
  if (e.entries == 0 && !e.positions.empty())
    return corrupted("bytes follow an encoding without entries");
  return e;
}

/// The values, widened in groups that stay in the first cache.
class ValueReader {
 public:
  explicit ValueReader(const Encoding& e)
      : at_byte_(e.values.data()),
        left_(e.entries),
        scale_(std::ldexp(1.0f, e.exponent)),
        fp16_(e.fp16()) {}

  /// The next values, at least one and at most `most`; the caller reads no more than `entries`. A value that isn't
  /// finite makes finite() false.
  std::span<const float> next(std::size_t most) {
    if (at_ == filled_) fill();
    const std::span<const float> values(group_ + at_, std::min(most, filled_ - at_));
    at_ += values.size();
    return values;
  }
  [[nodiscard]] bool finite() const { return finite_; }

 private:
  void fill() {
    filled_ = static_cast<std::size_t>(std::min<uint64_t>(left_, kGroup));
    at_ = 0;
    if (fp16_)
      cpu::widen(DType::kFloat16, group_, at_byte_, scale_, filled_);
    else
      std::memcpy(group_, at_byte_, filled_ * sizeof(float));
    uint32_t largest = 0;
    for (std::size_t i = 0; i < filled_; ++i)
      largest = std::max(largest, std::bit_cast<uint32_t>(group_[i]) & 0x7FFFFFFFU);
    if (largest >= 0x7F800000U) finite_ = false;
    left_ -= filled_;
    at_byte_ += filled_ * (fp16_ ? 2 : 4);
  }

  static constexpr std::size_t kGroup = 256;
  const std::byte* at_byte_;
  uint64_t left_;
  float scale_;
  bool fp16_;
  bool finite_ = true;
  std::size_t at_ = 0, filled_ = 0;
  float group_[kGroup];
};

/// One encoding on its way into the sum, block by block.
class Summand {
 public:
  explicit Summand(const Encoding& e)
      : entries_(e.entries), positions_(e.positions, e.elements), values_(e) {}

  /// Adds the next block's entries times `factor`; false: wrong() tells why. `dst` is where the encoding begins.
  bool add_block(float* dst, float factor) {
    if (entries_ == 0) return true;
    if (!positions_.next_block()) return refuse(positions_.finish());
    const uint32_t here = positions_.entries();
    if (here > entries_ - seen_) return refuse("its blocks have more entries than its header says");
    seen_ += here;
    for (uint32_t i = 0; i < here; i += kTogether) {
      const uint32_t group = std::min<uint32_t>(kTogether, here - i);
      uint64_t at[kTogether];
      if (!positions_.next(group, at)) return refuse(positions_.finish());
      for (uint32_t j = 0; j < group;) {
        const auto some = values_.next(group - j);
        if (!values_.finite()) return refuse("a value is not finite");
        for (const float value : some) dst[at[j++]] += value * factor;
      }
    }
    return true;
  }
  /// After the last block.
  bool finish() {
    if (entries_ == 0) return true;
    if (const char* wrong = positions_.finish(); *wrong != '\0') return refuse(wrong);
    return seen_ == entries_ || refuse("its blocks have fewer entries than its header says");
  }
  [[nodiscard]] const char* wrong() const { return wrong_; }

 private:
  bool refuse(const char* why) {
    wrong_ = why;
    return false;
  }

  static constexpr uint32_t kTogether = 32;
  uint64_t entries_;
  uint64_t seen_ = 0;
  const char* wrong_ = "";
  topk::PositionReader positions_;
  ValueReader values_;
};

// A block, 256 KiB of memory, is cleared, gets every encoding's entries and is divided while it lies in the cache: memory
// is written once, whatever the number of encodings. An encoding by itself would fetch a line of memory for nearly every
// entry.
[[gnu::noinline]] Status add_up(std::span<Summand> summands, std::span<float> dst, double divisor) {
  // Divided by a power of two, each summand keeps its bits (denormals apart), so the quotient is that of the sum; by
  // another number the sum itself has to be.
  int exponent = 0;
  const bool divides_entries = std::frexp(divisor, &exponent) == 0.5;
  const float factor = divides_entries ? static_cast<float>(1.0 / divisor) : 1.0F;
  for (uint64_t begin = 0; begin < dst.size(); begin += topk::kBlockElements) {
    const auto block =
        dst.subspan(begin, std::min<uint64_t>(topk::kBlockElements, dst.size() - begin));
    std::memset(block.data(), 0, block.size_bytes());
    for (Summand& s : summands)
      if (!s.add_block(dst.data(), factor)) return corrupted(s.wrong());
    if (!divides_entries)
      cpu::divide(DType::kFloat32, reinterpret_cast<std::byte*>(block.data()), divisor,
                  block.size());
  }
  for (Summand& s : summands)
    if (!s.finish()) return corrupted(s.wrong());
  return Status::ok();
}

}  // namespace

Status decode_sum_topk(std::span<const std::span<const std::byte>> encodings, std::span<float> dst,
                       double divisor) {
  thread_local std::vector<Summand> summands;
  summands.clear();
  bool finite = true;
  for (const auto bytes : encodings) {
    PACELINE_ASSIGN(const Encoding e, parse(bytes, dst.size()));
    finite = finite && e.finite();
    summands.emplace_back(e);
  }
  if (!finite) {
    std::fill(dst.begin(), dst.end(), std::numeric_limits<float>::quiet_NaN());
    return Status::ok();
  }
  const cpu::FloatMode mode;
  return add_up(summands, dst, divisor);
}

}  // namespace paceline::codec
