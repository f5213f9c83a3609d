// Top-k, the encoding side.
//
// 1. Guess a threshold from a sample (topk_sample.h).
// 2. One pass over gradient and residual (cpu::add_select): sums, takes what reaches the threshold,
// writes the rest.
//    Whenever the candidates fill their room, the largest k stay, the others go back to the rest,
//    and the threshold rises: too low a guess costs time in proportion to the buffer, at most.
// 3. When fewer than k were found (the guess was too high), at most two more passes, over the rest
// alone, fetch what
//    is missing: with a lower guess, then with every number that isn't zero.
// 4. The k largest of the candidates stay. They are exactly the k largest of all, whatever the
// guess was.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

#include "codec/candidates.h"
#include "codec/codec.h"
#include "codec/positions.h"
#include "codec/topk_format.h"
#include "codec/topk_sample.h"
#include "device/cpu/casts.h"
#include "device/cpu/float_mode.h"
#include "device/cpu/kernels.h"
#include "device/cpu/select.h"

namespace paceline::codec {
namespace {

using topk::Candidates;

/// Elements a call of the kernel: small enough for the candidates' room, large enough that the call
/// is free.
constexpr uint64_t kTile = 16384;
constexpr uint32_t kInfinityBits = 0x7F800000;
/// From this size on the rest would push everything else out of the cache before it is read again,
/// a step later.
constexpr uint64_t kStreamElements = uint64_t{1} << 20;

struct Memory {
  topk::Scratch<uint32_t> index;
  topk::Scratch<float> value;
  topk::Scratch<uint32_t> more_index;
  topk::Scratch<float> more_value;
  topk::Scratch<float> sent;
};

uint64_t room_for(uint64_t keep, uint64_t elements) {
  return std::min(2 * keep, elements) + kTile + cpu::kSelectSlack;
}

/// One pass in tiles: candidates of |gradient + before| (`gradient` null: of |after|) at or above
/// `threshold`. Returns the bits of the largest magnitude; stops early on an Inf or NaN.
uint32_t collect(const float* gradient, std::span<const ResidualRun> runs, uint32_t threshold,
                 bool stream, Candidates& found) {
  uint32_t largest = 0;
  uint64_t begin = 0;
  for (const auto& run : runs) {
    for (uint64_t at = 0; at < run.elements; at += kTile) {
      const uint64_t length = std::min(kTile, run.elements - at);
      if (found.room() < length + cpu::kSelectSlack)
        threshold = std::max(threshold, found.shrink(runs));
      const float* source = gradient != nullptr ? gradient + begin + at : run.after + at;
      const float* before = gradient != nullptr ? run.before + at : nullptr;
      const auto tile =
          cpu::add_select(source, before, run.after + at, length, static_cast<uint32_t>(begin + at),
                          threshold, stream, found.index_end(), found.value_end());
      found.add(tile.found);
      largest = std::max(largest, tile.largest);
      if (largest >= kInfinityBits) return largest;
    }
    begin += run.elements;
  }
  return largest;
}

/// Step 3: brings `found`, which holds fewer than `keep`, up to `keep` or to all that isn't zero.
void collect_missing(std::span<const ResidualRun> runs, uint64_t elements, uint64_t keep,
                     uint32_t threshold, Memory& memory, Candidates& found) {
  // A lower guess: two octaves catch a sampling error; 1 is every number but zero.
  const uint32_t lower = threshold > (2U << 23) ? threshold - (2U << 23) : 1;
  for (const uint32_t next : {lower, 1U}) {
    if (found.size() >= keep) return;
    const uint64_t missing = keep - found.size();
    const uint64_t room = room_for(missing, elements);
    Candidates more(memory.more_index.room(room), memory.more_value.room(room), room, missing);
    collect(nullptr, runs, next, false, more);
    more.shrink(runs);
    found.merge(more);
    if (next == 1) return;
  }
}

struct Header {
  uint8_t flags = 0;
  int16_t exponent = 0;
  uint64_t elements = 0;
  uint64_t entries = 0;
};

void write_header(const Header& header, std::byte* dst) {
  const uint32_t magic = topk::kMagic;
  std::memcpy(dst, &magic, 4);
  dst[4] = static_cast<std::byte>(header.flags);
  dst[5] = std::byte{0};
  std::memcpy(dst + 6, &header.exponent, 2);
  std::memcpy(dst + 8, &header.elements, 8);
  std::memcpy(dst + 16, &header.entries, 8);
}

float largest_magnitude(std::span<const float> values) {
  float largest = 0;
  for (const float v : values) largest = std::max(largest, std::abs(v));
  return largest;
}

/// The power of two that brings the largest value to [2^14, 2^15): nothing overflows (fp16 ends at
/// 65,504), and everything above 2^-38 of the largest keeps some bits.
int choose_exponent(float largest) {
  if (largest == 0) return 0;
  return std::clamp(14 - std::ilogb(largest), topk::kMinExponent, topk::kMaxExponent);
}

/// Writes the values as fp16 and what the rounding left over as the rest. Exact: value · 2^exponent
/// is (or is so small that its half is 0 anyway), the half differs from it by at most half a unit
/// of the half's last place, and that difference, a multiple of the float's last place, fits into
/// 24 bits.
int16_t write_halves(const Candidates& kept, std::span<const ResidualRun> runs, Memory& memory,
                     std::byte* dst) {
  // The largest float with 11 bits: what lies beyond would round to 2^128, which isn't a float. Its
  // excess stays.
  constexpr float kLimit = 0x1.FFCp127F;
  const auto values = kept.value();
  const float largest = largest_magnitude(values);
  const int exponent = choose_exponent(largest);
  const float scale = std::ldexp(1.0f, exponent);
  float* sent = memory.sent.room(values.size());
  const float* source = values.data();
  if (largest > kLimit) {
    for (std::size_t i = 0; i < values.size(); ++i)
      sent[i] = std::clamp(values[i], -kLimit, kLimit);
    source = sent;
  }
  cpu::narrow(DType::kFloat16, dst, source, scale, values.size());
  cpu::widen(DType::kFloat16, sent, dst, scale, values.size());
  topk::RestCursor rest(runs);
  const auto index = kept.index();
  for (std::size_t i = 0; i < values.size(); ++i) rest.at(index[i]) = values[i] - sent[i];
  return static_cast<int16_t>(exponent);
}

EncodedTopK write_non_finite(std::span<const ResidualRun> runs, uint64_t elements, std::byte* dst) {
  // The gradient is lost (the optimizer skips this step); the residual stays what it was.
  for (const auto& run : runs) cpu::copy(run.after, run.before, run.elements * sizeof(float));
  write_header({topk::kFlagNonFinite, 0, elements, 0}, dst);
  return {topk::kHeaderBytes, 0, false};
}

[[gnu::noinline]] EncodedTopK encode(const plan::CodecSpec& spec, std::span<const float> gradient,
                                     std::span<const ResidualRun> runs, std::byte* dst) {
  thread_local Memory memory;
  const uint64_t elements = gradient.size();
  const uint64_t keep = top_k_count(spec, elements);
  Header header{static_cast<uint8_t>(spec.fp16_values ? topk::kFlagFp16 : 0), 0, elements, 0};
  if (elements == 0) {
    write_header(header, dst);
    return {topk::kHeaderBytes, 0, true};
  }
  assert(elements <= topk::kMaxElements);

  const uint32_t threshold = topk::guess_threshold(gradient, runs, keep);
  if (threshold >= kInfinityBits) return write_non_finite(runs, elements, dst);
  const uint64_t room = room_for(keep, elements);
  Candidates found(memory.index.room(room), memory.value.room(room), room, keep);
  const uint32_t largest =
      collect(gradient.data(), runs, threshold, elements >= kStreamElements, found);
  if (largest >= kInfinityBits) return write_non_finite(runs, elements, dst);
  if (found.size() < keep && threshold > 1)
    collect_missing(runs, elements, keep, threshold, memory, found);
  found.shrink(runs);

  header.entries = found.size();
  std::byte* values = dst + topk::kHeaderBytes;
  if (spec.fp16_values)
    header.exponent = write_halves(found, runs, memory, values);
  else if (found.size() > 0)
    std::memcpy(values, found.value().data(), found.size() * sizeof(float));
  const uint64_t value_bytes = found.size() * (spec.fp16_values ? 2 : 4);
  const uint64_t position_bytes =
      found.size() == 0 ? 0 : topk::encode_positions(found.index(), elements, values + value_bytes);
  write_header(header, dst);
  return {topk::kHeaderBytes + value_bytes + position_bytes, found.size(), true};
}

}  // namespace

EncodedTopK encode_topk(const plan::CodecSpec& spec, std::span<const float> gradient,
                        std::span<const ResidualRun> runs, std::byte* dst) {
  const cpu::FloatMode mode;
  return encode(spec, gradient, runs, dst);
}

}  // namespace paceline::codec
