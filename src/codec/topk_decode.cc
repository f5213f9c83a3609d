// Top-k, the decoding side: bytes from the wire, none of them trusted.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/bytes.h"
#include "codec/codec.h"
#include "codec/positions.h"
#include "codec/topk_format.h"
#include "device/cpu/casts.h"
#include "device/cpu/float_mode.h"

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
  explicit ValueReader(const Encoding& e) : encoding_(e), scale_(std::ldexp(1.0f, e.exponent)) {}

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
    const uint64_t left = encoding_.entries - read_;
    filled_ = static_cast<std::size_t>(std::min<uint64_t>(left, kGroup));
    at_ = 0;
    if (encoding_.fp16())
      cpu::widen(DType::kFloat16, group_, encoding_.values.data() + read_ * 2, scale_, filled_);
    else
      std::memcpy(group_, encoding_.values.data() + read_ * 4, filled_ * sizeof(float));
    uint32_t largest = 0;
    for (std::size_t i = 0; i < filled_; ++i)
      largest = std::max(largest, std::bit_cast<uint32_t>(group_[i]) & 0x7FFFFFFFU);
    if (largest >= 0x7F800000U) finite_ = false;
    read_ += filled_;
  }

  static constexpr std::size_t kGroup = 1024;
  const Encoding& encoding_;
  float scale_;
  float group_[kGroup];
  std::size_t at_ = 0, filled_ = 0;
  uint64_t read_ = 0;
  bool finite_ = true;
};

[[gnu::noinline]] Status add_entries(const Encoding& e, std::span<float> dst, float factor) {
  constexpr uint32_t kAhead = 32;
  topk::PositionReader positions(e.positions, e.elements);
  ValueReader values(e);
  uint64_t seen = 0;
  while (positions.next_block()) {
    const uint32_t here = positions.entries();
    if (here > e.entries - seen)
      return corrupted("its blocks have more entries than its header says");
    seen += here;
    for (uint32_t i = 0; i < here; i += kAhead) {
      const uint32_t group = std::min<uint32_t>(kAhead, here - i);
      // The elements lie far apart in memory: ask for a group of them, then add.
      uint64_t at[kAhead];
      if (!positions.next(group, at)) return corrupted(positions.finish());
      for (uint32_t j = 0; j < group; ++j) __builtin_prefetch(&dst[at[j]], 1);
      for (uint32_t j = 0; j < group;) {
        const auto some = values.next(group - j);
        if (!values.finite()) return corrupted("a value is not finite");
        for (const float value : some) dst[at[j++]] += value * factor;
      }
    }
  }
  if (const char* wrong = positions.finish(); *wrong != '\0') return corrupted(wrong);
  if (seen != e.entries) return corrupted("its blocks have fewer entries than its header says");
  return Status::ok();
}

}  // namespace

Status decode_add_topk(std::span<const std::byte> encoded, std::span<float> dst, float factor) {
  PACELINE_ASSIGN(const Encoding e, parse(encoded, dst.size()));
  if (!e.finite()) {
    std::fill(dst.begin(), dst.end(), std::numeric_limits<float>::quiet_NaN());
    return Status::ok();
  }
  if (e.entries == 0) return Status::ok();
  const cpu::FloatMode mode;
  return add_entries(e, dst, factor);
}

}  // namespace paceline::codec
