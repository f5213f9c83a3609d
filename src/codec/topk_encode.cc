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
//    fp16 values leave in the rest what their rounding left over. The pass does that on the way, in units that the
//    sample's largest magnitude suggests; where that was far too small, it is done again for what travels.
// 4. The k largest of the candidates stay. They are exactly the k largest of all, whatever the
// guess was.
//    Workers share the sample and the first pass: each part of the buffer keeps its own k largest, among which are all
//    that are among the k largest of the whole. The rest is done by one thread.
#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <vector>

#include "codec/candidates.h"
#include "codec/codec.h"
#include "codec/kept.h"
#include "codec/positions.h"
#include "codec/topk_format.h"
#include "codec/topk_sample.h"
#include "codec/topk_sum.h"
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
/// The same where the gradient is a sum that is made ahead of the call: it stays in the nearest cache.
constexpr uint64_t kSumTile = 4096;
constexpr uint32_t kInfinityBits = 0x7F800000;
/// A worker's part has at least so many elements (a tenth of a millisecond), and there are so many for each thread, so
/// that one which the scheduler holds up leaves some to the others.
constexpr uint64_t kPartElements = 4 * kTile;
constexpr uint64_t kPartsOfAThread = 2;
/// From this size on the rest would push everything else out of the cache before it is read again,
/// a step later.
constexpr uint64_t kStreamElements = uint64_t{1} << 20;

/// fp16 values: the sample's largest is brought to [2^10, 2^11), so that one 16 times as large still fits.
constexpr int kSampleTop = 10;

/// What a worker finds in its part of the buffer.
struct Part {
  topk::Scratch<uint32_t> index;
  topk::Scratch<float> value;
  topk::Leaving leaving;
  uint64_t found = 0;
  uint32_t largest = 0;
};

struct Memory {
  topk::SampleMemory sample;
  topk::Scratch<uint32_t> index;
  topk::Scratch<float> value;
  topk::Scratch<uint32_t> more_index;
  topk::Scratch<float> more_value;
  topk::Scratch<float> sent;
  topk::Leaving leaving;
  std::vector<Part> parts;
};

Kept<Memory>& kept_memory() {
  static auto& all = *new Kept<Memory>();  // for threads that outlive main(), too
  return all;
}

uint64_t room_for(uint64_t keep, uint64_t elements) {
  return std::min(2 * keep, elements) + kTile + cpu::kSelectSlack;
}

/// What is asked of a pass over all runs.
struct PassRequest {
  const topk::GradientSum* gradient = nullptr;  ///< null: |after| alone is looked through
  uint32_t threshold = 1;
  bool stream = false;
  bool halves = false;
  int exponent = 0;
};

/// Elements [from, to) of the buffer.
struct Stretch {
  uint64_t from = 0;
  uint64_t to = 0;
};

/// One pass in tiles: collects what reaches the threshold. Returns the bits of the largest magnitude; stops early on an
/// Inf or NaN.
uint32_t collect(const PassRequest& request, std::span<const ResidualRun> runs, Stretch stretch,
                 Candidates& found) {
  const bool is_sum = request.gradient != nullptr && !request.gradient->is_plain();
  const uint64_t tile_elements = is_sum ? kSumTile : kTile;
  alignas(64) float made[kSumTile];
  uint32_t largest = 0;
  uint64_t begin = 0;
  cpu::SelectInput in;
  in.threshold = request.threshold;
  in.halves = request.halves;
  in.half_exponent = request.exponent;
  in.stream = request.stream;
  for (const auto& run : runs) {
    const uint64_t first = std::max(begin, stretch.from) - begin;
    const uint64_t end = std::min(begin + run.elements, stretch.to) - std::min(begin, stretch.to);
    for (uint64_t at = first; at < end; at += tile_elements) {
      in.elements = std::min(tile_elements, end - at);
      if (found.room() < in.elements + cpu::kSelectSlack)
        in.threshold = std::max(in.threshold, found.shrink(runs, request.threshold));
      in.rest = run.after + at;
      in.gradient = in.rest;
      if (request.gradient != nullptr) {
        const auto terms = request.gradient->terms(begin + at, in.elements, made);
        in.gradient = terms.first;
        in.addend = terms.second;
        in.residual = run.before + at;
      }
      in.first_index = static_cast<uint32_t>(begin + at);
      const auto tile = cpu::add_select(in, found.index_end(), found.value_end());
      found.add(tile.found);
      largest = std::max(largest, tile.largest);
      if (largest >= kInfinityBits) return largest;
    }
    begin += run.elements;
  }
  return largest;
}

/// The first pass by all workers. Returns what they found, in the order of positions, in `memory`, and the bits of the
/// largest magnitude.
Candidates collect_parts(const PassRequest& request, std::span<const ResidualRun> runs,
                         uint64_t elements, uint64_t keep, int count, Workers& workers,
                         Memory& memory, uint32_t& largest) {
  const auto parts = static_cast<uint64_t>(count);
  if (memory.parts.size() < parts) memory.parts.resize(parts);
  const auto boundary = [&](uint64_t part) {
    return part == parts ? elements : elements / kTile * part / parts * kTile;
  };
  for (uint64_t i = 0; i < parts; ++i) {  // here, where a lack of memory can be told
    const uint64_t room = room_for(keep, boundary(i + 1) - boundary(i));
    memory.parts[i].index.room(room);
    memory.parts[i].value.room(room);
  }
  workers.run(count, [&](int number) {
    const cpu::FloatMode mode;
    const auto i = static_cast<uint64_t>(number);
    Part& part = memory.parts[i];
    const Stretch stretch{boundary(i), boundary(i + 1)};
    const uint64_t room = room_for(keep, stretch.to - stretch.from);
    Candidates found(part.index.room(room), part.value.room(room), room, keep, part.leaving);
    part.largest = collect(request, runs, stretch, found);
    part.found = found.size();
  });
  uint64_t all = 0;
  for (uint64_t i = 0; i < parts; ++i) {
    all += memory.parts[i].found;
    largest = std::max(largest, memory.parts[i].largest);
  }
  const uint64_t room = std::max(all, room_for(keep, elements));
  Candidates found(memory.index.room(room), memory.value.room(room), room, keep, memory.leaving);
  for (uint64_t i = 0; i < parts; ++i) {
    Part& part = memory.parts[i];
    std::copy_n(part.index.room(0), part.found, found.index_end());
    std::copy_n(part.value.room(0), part.found, found.value_end());
    found.add(part.found);
  }
  return found;
}

/// Step 3: brings `found`, which holds fewer than `keep`, up to `keep` or to all that isn't zero. What was found left
/// zeros in the rest.
void collect_missing(std::span<const ResidualRun> runs, uint64_t elements, uint64_t keep,
                     uint32_t threshold, Memory& memory, Candidates& found) {
  // A lower guess: two octaves catch a sampling error; 1 is every number but zero.
  const uint32_t lower = threshold > (2U << 23) ? threshold - (2U << 23) : 1;
  for (const uint32_t next : {lower, 1U}) {
    if (found.size() >= keep) return;
    const uint64_t missing = keep - found.size();
    const uint64_t room = room_for(missing, elements);
    Candidates more(memory.more_index.room(room), memory.more_value.room(room), room, missing,
                    memory.leaving);
    PassRequest request;
    request.threshold = next;
    collect(request, runs, {0, elements}, more);
    more.shrink(runs, next);
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

/// The largest float with 11 bits: what lies beyond would round to 2^128, which isn't a float. Its excess stays.
constexpr float kHalfLimit = 0x1.FFCp127F;

/// The power of two that brings `largest` to [2^top, 2^(top + 1)).
int exponent_for(float largest, int top) {
  if (largest == 0 || !std::isfinite(largest)) return 0;
  return std::clamp(top - std::ilogb(largest), topk::kMinExponent, topk::kMaxExponent);
}

/// True when fp16 numbers in units of 2^-exponent suit `largest`: below 2^15, for fp16 ends at 65,504; and where a sample
/// that saw it would have put it, for else what is much smaller has few bits left, or none.
bool halves_suit(float largest, int exponent) {
  if (largest == 0) return true;
  const int top = std::ilogb(largest) + exponent;
  return largest <= kHalfLimit && top >= kSampleTop && top <= 14;
}

/// Stores `fn(i)` as the rest of the i-th entry kept.
template <class Fn>
void set_rest(const Candidates& kept, std::span<const ResidualRun> runs, Fn fn) {
  topk::RestCursor rest(runs);
  const auto index = kept.index();
  for (std::size_t i = 0; i < index.size(); ++i) rest.at(index[i]) = fn(i);
}

/// Writes the values as fp16 where the pass didn't know the right exponent, and leaves in the rest what the rounding
/// left over. Returns the exponent.
int write_halves_again(const Candidates& kept, std::span<const ResidualRun> runs, float largest,
                       Memory& memory, std::byte* dst) {
  const int exponent = exponent_for(largest, 14);
  const float scale = std::ldexp(1.0F, exponent);
  const auto values = kept.value();
  float* sent = memory.sent.room(values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    sent[i] = std::clamp(values[i], -kHalfLimit, kHalfLimit);
  cpu::narrow(DType::kFloat16, dst, sent, scale, values.size());
  cpu::widen(DType::kFloat16, sent, dst, scale, values.size());
  set_rest(kept, runs, [&](std::size_t i) { return values[i] - sent[i]; });
  return exponent;
}

EncodedTopK write_non_finite(std::span<const ResidualRun> runs, uint64_t elements, std::byte* dst) {
  // The gradient is lost (the optimizer skips this step); the residual stays what it was.
  for (const auto& run : runs) cpu::copy(run.after, run.before, run.elements * sizeof(float));
  write_header({topk::kFlagNonFinite, 0, elements, 0}, dst);
  return {topk::kHeaderBytes, 0, false};
}

/// In how many parts the first pass is worth sharing.
int part_count(uint64_t elements, const Workers* workers) {
  if (workers == nullptr || workers->threads() == 1) return 1;
  const auto most = static_cast<uint64_t>(workers->threads()) * kPartsOfAThread;
  return static_cast<int>(std::clamp<uint64_t>(elements / kPartElements, 1, most));
}

[[gnu::noinline]] EncodedTopK encode(const plan::CodecSpec& spec, const topk::GradientSum& gradient,
                                     std::span<const ResidualRun> runs, std::byte* dst,
                                     Workers* workers) {
  const uint64_t elements = gradient.size();
  const uint64_t keep = top_k_count(spec, elements);
  Header header{static_cast<uint8_t>(spec.fp16_values ? topk::kFlagFp16 : 0), 0, elements, 0};
  if (elements == 0) {
    write_header(header, dst);
    return {topk::kHeaderBytes, 0, true};
  }
  assert(elements <= topk::kMaxElements);

  const int parts = part_count(elements, workers);
  const auto loan = kept_memory().take();
  Memory& memory = *loan;
  const topk::Guess guess =
      topk::guess_threshold(gradient, runs, keep, memory.sample, parts > 1 ? workers : nullptr);
  if (guess.threshold >= kInfinityBits) return write_non_finite(runs, elements, dst);
  PassRequest pass{&gradient, guess.threshold, elements >= kStreamElements, spec.fp16_values,
                   exponent_for(guess.largest, kSampleTop)};
  uint32_t largest_bits = 0;
  Candidates found = [&] {
    if (parts > 1)
      return collect_parts(pass, runs, elements, keep, parts, *workers, memory, largest_bits);
    const uint64_t room = room_for(keep, elements);
    Candidates all(memory.index.room(room), memory.value.room(room), room, keep, memory.leaving);
    largest_bits = collect(pass, runs, {0, elements}, all);
    return all;
  }();
  if (largest_bits >= kInfinityBits) return write_non_finite(runs, elements, dst);
  const auto largest = std::bit_cast<float>(largest_bits);
  bool halves_done = spec.fp16_values && halves_suit(largest, pass.exponent);
  if (found.size() < keep && guess.threshold > 1) {
    if (spec.fp16_values) set_rest(found, runs, [](std::size_t) { return 0.0F; });
    halves_done = false;
    collect_missing(runs, elements, keep, guess.threshold, memory, found);
  }
  if (found.size() > keep) found.shrink(runs, guess.threshold);

  header.entries = found.size();
  std::byte* values = dst + topk::kHeaderBytes;
  const uint64_t value_bytes = found.size() * (spec.fp16_values ? 2 : 4);
  if (halves_done) {
    header.exponent = static_cast<int16_t>(pass.exponent);
    cpu::narrow(DType::kFloat16, values, found.value().data(), std::ldexp(1.0F, pass.exponent),
                found.size());
  } else if (spec.fp16_values) {
    header.exponent =
        static_cast<int16_t>(write_halves_again(found, runs, largest, memory, values));
  } else if (found.size() > 0) {
    std::memcpy(values, found.value().data(), value_bytes);
  }
  const uint64_t position_bytes =
      found.size() == 0 ? 0 : topk::encode_positions(found.index(), elements, values + value_bytes);
  write_header(header, dst);
  return {topk::kHeaderBytes + value_bytes + position_bytes, found.size(), true};
}

}  // namespace

EncodedTopK encode_topk(const plan::CodecSpec& spec, std::span<const float> gradient,
                        std::span<const ResidualRun> runs, std::byte* dst, Workers* workers,
                        std::span<const Addend> addends) {
  const cpu::FloatMode mode;
  return encode(spec, {gradient, addends}, runs, dst, workers);
}

void forget_topk_sizes() { kept_memory().forget(); }

}  // namespace paceline::codec
