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
  /// first: the entry to begin with.
  ValueReader(const Encoding& e, uint64_t first)
      : at_byte_(e.values.data() + first * (e.fp16() ? 2 : 4)),
        left_(e.entries - first),
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

/// Positions that are decoded at a time.
constexpr uint32_t kTogether = 32;

/// Goes on to the next block, which has `here` entries: counted in `seen`. Returns "" or what is wrong.
const char* begin_block(topk::PositionReader& positions, uint64_t entries, uint64_t& seen,
                        uint32_t& here) {
  if (!positions.next_block()) return positions.finish();
  here = positions.entries();
  if (here > entries - seen) return "its blocks have more entries than its header says";
  seen += here;
  return "";
}

/// Where a block of an encoding begins.
struct Mark {
  topk::PositionReader positions;
  uint64_t seen = 0;  ///< entries before it

  explicit Mark(const Encoding& e) : positions(e.positions, e.elements) {}
};

/// One encoding on its way into the sum, block by block.
class Summand {
 public:
  Summand(const Encoding& e, const Mark& from)
      : entries_(e.entries), seen_(from.seen), positions_(from.positions), values_(e, from.seen) {}

  /// Adds the next block's entries times `factor`; false: wrong() tells why. `dst` is where the encoding begins.
  bool add_block(float* dst, float factor) {
    if (entries_ == 0) return true;
    uint32_t here = 0;
    wrong_ = begin_block(positions_, entries_, seen_, here);
    if (*wrong_ != '\0') return false;
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

  uint64_t entries_;
  uint64_t seen_;
  const char* wrong_ = "";
  topk::PositionReader positions_;
  ValueReader values_;
};

/// How entries and sums are divided.
struct Division {
  double divisor;
  /// By a power of two each summand is divided: it keeps its bits (denormals apart), so the quotient is that of the sum.
  /// By another number the sum itself has to be.
  bool of_entries;
  float factor;  ///< of entries

  explicit Division(double by) : divisor(by) {
    int exponent = 0;
    of_entries = std::frexp(by, &exponent) == 0.5;
    factor = of_entries ? static_cast<float>(1.0 / by) : 1.0F;
  }
};

/// Blocks [from, to) of the sum; the summands stand at the first. Returns "" or what is wrong.
//
// A block, 256 KiB of memory, is cleared, gets every encoding's entries and is divided while it lies in the cache: memory
// is written once, whatever the number of encodings. An encoding by itself would fetch a line of memory for nearly every
// entry.
[[gnu::noinline]] const char* add_up(std::span<Summand> summands, std::span<float> dst,
                                     const Division& division, uint64_t from, uint64_t to) {
  for (uint64_t block_number = from; block_number < to; ++block_number) {
    const uint64_t begin = block_number * topk::kBlockElements;
    const auto block =
        dst.subspan(begin, std::min<uint64_t>(topk::kBlockElements, dst.size() - begin));
    std::memset(block.data(), 0, block.size_bytes());
    for (Summand& s : summands)
      if (!s.add_block(dst.data(), division.factor)) return s.wrong();
    if (!division.of_entries)
      cpu::divide(DType::kFloat32, reinterpret_cast<std::byte*>(block.data()), division.divisor,
                  block.size());
  }
  return "";
}

const char* finish(std::span<Summand> summands) {
  for (Summand& s : summands)
    if (!s.finish()) return s.wrong();
  return "";
}

/// Walks an encoding's positions up to the last part's first block, and leaves a mark at each part's. parts: their first
/// blocks. Returns "" or what is wrong.
[[gnu::noinline]] const char* skim(const Encoding& e, std::span<const uint64_t> parts,
                                   std::span<Mark> marks) {
  if (e.entries == 0) return "";
  Mark here = marks[0];
  uint64_t block = 0;
  for (std::size_t part = 1; part < parts.size(); ++part) {
    for (; block < parts[part]; ++block) {
      uint32_t left = 0;
      const char* wrong = begin_block(here.positions, e.entries, here.seen, left);
      if (*wrong != '\0') return wrong;
      while (left > 0) {
        uint64_t skipped[kTogether];
        const uint32_t group = std::min(kTogether, left);
        if (!here.positions.next(group, skipped)) return here.positions.finish();
        left -= group;
      }
    }
    marks[part] = here;
  }
  return "";
}

/// Memory that a thread keeps from sum to sum.
struct Memory {
  std::vector<Encoding> encodings;
  std::vector<Mark> marks;        ///< [encoding][part]
  std::vector<Summand> summands;  ///< [part][encoding]
  std::vector<uint64_t> parts;    ///< first blocks, and behind the last block
  std::vector<const char*> wrong;
};

/// Where a part would have less than so many blocks, it is not worth a thread's waking up.
constexpr uint64_t kPartBlocks = 2;
/// For each thread: one that the scheduler holds up leaves some to the others.
constexpr uint64_t kPartsOfAThread = 2;

uint64_t part_count(uint64_t blocks, const Workers* workers) {
  if (workers == nullptr || workers->threads() == 1) return 1;
  const auto most = static_cast<uint64_t>(workers->threads()) * kPartsOfAThread;
  return std::clamp<uint64_t>(blocks / kPartBlocks, 1, most);
}

const char* first_wrong(std::span<const char* const> all) {
  for (const char* wrong : all)
    if (*wrong != '\0') return wrong;
  return "";
}

/// Positions have no index, so a part's begin is found by walking there: every encoding is skimmed by one thread, then
/// the parts are added up by all.
const char* add_up_parts(Memory& m, std::span<float> dst, const Division& division,
                         Workers& workers) {
  const std::size_t parts = m.parts.size() - 1;
  const std::size_t count = m.encodings.size();
  m.marks.clear();
  for (const Encoding& e : m.encodings) m.marks.insert(m.marks.end(), parts, Mark(e));
  m.wrong.assign(std::max(count, parts), "");
  workers.run(static_cast<int>(count), [&](int i) {
    const auto at = static_cast<std::size_t>(i);
    m.wrong[at] = skim(m.encodings[at], std::span(m.parts).first(parts),
                       std::span(m.marks).subspan(at * parts, parts));
  });
  if (const char* wrong = first_wrong(m.wrong); *wrong != '\0') return wrong;
  for (std::size_t part = 0; part < parts; ++part)
    for (std::size_t i = 0; i < count; ++i)
      m.summands.emplace_back(m.encodings[i], m.marks[i * parts + part]);
  workers.run(static_cast<int>(parts), [&](int number) {
    const cpu::FloatMode mode;
    const auto part = static_cast<std::size_t>(number);
    const auto mine = std::span(m.summands).subspan(part * count, count);
    m.wrong[part] = add_up(mine, dst, division, m.parts[part], m.parts[part + 1]);
    if (*m.wrong[part] == '\0' && part + 1 == parts) m.wrong[part] = finish(mine);
  });
  return first_wrong(std::span(m.wrong).first(parts));
}

}  // namespace

Status decode_sum_topk(std::span<const std::span<const std::byte>> encodings, std::span<float> dst,
                       double divisor, Workers* workers) {
  thread_local Memory m;
  m.encodings.clear();
  m.summands.clear();
  bool finite = true;
  for (const auto bytes : encodings) {
    PACELINE_ASSIGN(const Encoding e, parse(bytes, dst.size()));
    finite = finite && e.finite();
    m.encodings.push_back(e);
  }
  if (!finite) {
    std::fill(dst.begin(), dst.end(), std::numeric_limits<float>::quiet_NaN());
    return Status::ok();
  }
  const cpu::FloatMode mode;
  const Division division(divisor);
  const uint64_t blocks = (dst.size() + topk::kBlockElements - 1) / topk::kBlockElements;
  const uint64_t parts = part_count(blocks, workers);
  const char* wrong = nullptr;
  if (parts > 1) {
    m.parts.resize(parts + 1);
    for (uint64_t i = 0; i <= parts; ++i) m.parts[i] = blocks * i / parts;
    wrong = add_up_parts(m, dst, division, *workers);
  } else {
    for (const Encoding& e : m.encodings) m.summands.emplace_back(e, Mark(e));
    wrong = add_up(m.summands, dst, division, 0, blocks);
    if (*wrong == '\0') wrong = finish(m.summands);
  }
  return *wrong == '\0' ? Status::ok() : corrupted(wrong);
}

}  // namespace paceline::codec
