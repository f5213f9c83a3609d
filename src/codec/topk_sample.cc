#include "codec/topk_sample.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "codec/candidates.h"
#include "codec/rank_select.h"
#include "codec/topk_sum.h"
#include "device/cpu/float_mode.h"
#include "device/cpu/kernels.h"

namespace paceline::codec::topk {
namespace {

constexpr uint64_t kGroup = 16;
/// At least so many sampled elements should lie above the threshold: 9 % standard error, for which a quarter more
/// candidates than travel are looked at. More of a sample takes more time than it saves.
constexpr uint64_t kWantedAbove = 128;
/// And at least one in so many elements is sampled.
constexpr uint64_t kSparsest = 512;
/// Groups whose memory is asked for ahead of their use.
constexpr uint64_t kAhead = 12;

uint64_t sample_size(uint64_t elements, uint64_t keep) {
  const double all = static_cast<double>(elements);
  const double wanted = std::max(kWantedAbove * all / static_cast<double>(keep), all / kSparsest);
  if (wanted >= all / 2 || elements <= 4096) return elements;
  return static_cast<uint64_t>(wanted);
}

/// Where the groups begin, ascending.
void draw_groups(uint64_t elements, std::span<uint64_t> groups) {
  const double stratum = static_cast<double>(elements) / static_cast<double>(groups.size());
  const auto width = static_cast<uint64_t>(
      stratum);            // at least 2 groups: half of the elements are sampled at most
  std::mt19937_64 random;  // its sequence is the same everywhere
  for (std::size_t i = 0; i < groups.size(); ++i)
    groups[i] =
        static_cast<uint64_t>(static_cast<double>(i) * stratum) + random() % (width - kGroup + 1);
}

/// Sums at the groups; returns how many.
uint64_t take_sample(const GradientSum& gradient, std::span<const ResidualRun> runs,
                     std::span<const uint64_t> groups, float* out) {
  float made[kGroup];
  std::size_t run = 0;
  uint64_t begin = 0;
  uint64_t taken = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const uint64_t at = groups[i];
    while (at >= begin + runs[run].elements) begin += runs[run++].elements;
    const auto& here = runs[run];
    if (i + kAhead < groups.size()) {
      const uint64_t ahead = groups[i + kAhead];
      gradient.prefetch(ahead);
      if (ahead < begin + here.elements) __builtin_prefetch(here.before + (ahead - begin));
    }
    const uint64_t offset = at - begin;
    const uint64_t length = std::min(kGroup, here.elements - offset);
    const float* sums = gradient.plain() + at;
    if (!gradient.is_plain()) {
      gradient.make(at, length, made);
      sums = made;
    }
    for (uint64_t j = 0; j < length; ++j) out[taken + j] = sums[j] + here.before[offset + j];
    taken += length;
  }
  return taken;
}

/// The same by several threads, each at groups of its own.
uint64_t share_sample(const GradientSum& gradient, std::span<const ResidualRun> runs,
                      std::span<const uint64_t> groups, float* out, Workers& workers) {
  constexpr int kMostParts = 16;
  const int parts = std::min(workers.threads(), kMostParts);
  const auto boundary = [&](int part) {
    return groups.size() * static_cast<std::size_t>(part) / static_cast<std::size_t>(parts);
  };
  uint64_t taken[kMostParts];
  workers.run(parts, [&](int part) {
    const cpu::FloatMode mode;
    const std::size_t first = boundary(part);
    taken[part] = take_sample(gradient, runs, groups.subspan(first, boundary(part + 1) - first),
                              out + first * kGroup);
  });
  uint64_t all = taken[0];
  for (int part = 1; part < parts; ++part) {  // a group at the end of a run may have been cut short
    float* from = out + boundary(part) * kGroup;
    if (from != out + all) std::copy_n(from, taken[part], out + all);
    all += taken[part];
  }
  return all;
}

void take_all(const GradientSum& gradient, std::span<const ResidualRun> runs, float* out) {
  const float* sums = gradient.plain();
  if (!gradient.is_plain()) {
    gradient.make(0, gradient.size(), out);
    sums = out;
  }
  uint64_t at = 0;
  for (const auto& run : runs) {
    cpu::reduce_into(DType::kFloat32, ReduceOp::kSum, out + at, sums + at, run.before,
                     run.elements);
    at += run.elements;
  }
}

Guess at_rank(std::span<const float> sample, uint64_t rank) {
  Guess guess;
  for (const float x : sample) guess.largest = std::max(guess.largest, std::abs(x));
  if (rank < sample.size()) guess.threshold = std::max(1U, rank_select(sample, rank).key);
  return guess;
}

}  // namespace

Guess guess_threshold(const GradientSum& gradient, std::span<const ResidualRun> runs, uint64_t keep,
                      SampleMemory& memory, Workers* workers) {
  const uint64_t elements = gradient.size();
  const uint64_t wanted = sample_size(elements, keep);
  if (wanted == elements) {
    float* all = memory.sums.room(elements);
    take_all(gradient, runs, all);
    return at_rank({all, elements}, keep);
  }
  const uint64_t count = wanted / kGroup;
  const std::span<uint64_t> groups(memory.places.room(count), count);
  draw_groups(elements, groups);
  float* sample = memory.sums.room(count * kGroup);
  const uint64_t taken = workers == nullptr
                             ? take_sample(gradient, runs, groups, sample)
                             : share_sample(gradient, runs, groups, sample, *workers);
  const double above =
      static_cast<double>(keep) * static_cast<double>(taken) / static_cast<double>(elements);
  return at_rank({sample, taken},
                 static_cast<uint64_t>(std::ceil(above + 3 * std::sqrt(above) + 1)));
}

}  // namespace paceline::codec::topk
