#include "codec/topk_sample.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "codec/candidates.h"
#include "codec/rank_select.h"
#include "device/cpu/select.h"

namespace paceline::codec::topk {
namespace {

constexpr uint64_t kGroup = 16;
/// At least so many sampled elements should lie above the threshold: 5 % standard error.
constexpr uint64_t kWantedAbove = 400;

uint64_t sample_size(uint64_t elements, uint64_t keep) {
  const double for_accuracy =
      static_cast<double>(kWantedAbove) * static_cast<double>(elements) / static_cast<double>(keep);
  const double wanted = std::max(for_accuracy, static_cast<double>(elements) / 128);
  if (wanted >= static_cast<double>(elements) / 2 || elements <= 4096) return elements;
  return static_cast<uint64_t>(wanted);
}

/// Magnitudes of `groups` stretches of kGroup elements; returns how many were written.
uint64_t take_sample(std::span<const float> gradient, std::span<const ResidualRun> runs,
                     uint64_t groups, uint32_t* out) {
  const double stratum = static_cast<double>(gradient.size()) / static_cast<double>(groups);
  std::mt19937_64 random;  // its sequence is the same everywhere
  std::size_t run = 0;
  uint64_t begin = 0;
  uint64_t taken = 0;
  for (uint64_t i = 0; i < groups; ++i) {
    const auto low = static_cast<uint64_t>(static_cast<double>(i) * stratum);
    const auto width = static_cast<uint64_t>(stratum);
    const uint64_t at = low + random() % (width > kGroup ? width - kGroup + 1 : 1);
    if (at >= gradient.size()) break;
    while (at >= begin + runs[run].elements) begin += runs[run++].elements;
    const uint64_t offset = at - begin;
    const uint64_t length = std::min(kGroup, runs[run].elements - offset);
    cpu::add_magnitudes(gradient.data() + at, runs[run].before + offset, length, out + taken);
    taken += length;
  }
  return taken;
}

uint64_t take_all(std::span<const float> gradient, std::span<const ResidualRun> runs,
                  uint32_t* out) {
  uint64_t at = 0;
  for (const auto& run : runs) {
    cpu::add_magnitudes(gradient.data() + at, run.before, run.elements, out + at);
    at += run.elements;
  }
  return at;
}

}  // namespace

uint32_t guess_threshold(std::span<const float> gradient, std::span<const ResidualRun> runs,
                         uint64_t keep) {
  thread_local Scratch<uint32_t> scratch;
  const uint64_t elements = gradient.size();
  if (keep >= elements) return 1;
  const uint64_t wanted = sample_size(elements, keep);
  const uint64_t groups = (wanted + kGroup - 1) / kGroup;
  uint32_t* keys = scratch.room((groups + 1) * kGroup);
  if (wanted == elements) {
    const uint64_t taken = take_all(gradient, runs, keys);
    return std::max(1U, rank_select({keys, taken}, keep).key);
  }
  const uint64_t taken = take_sample(gradient, runs, groups, keys);
  const double above =
      static_cast<double>(keep) * static_cast<double>(taken) / static_cast<double>(elements);
  const double rank = std::ceil(above + 3 * std::sqrt(above) + 1);
  if (rank >= static_cast<double>(taken)) return 1;
  return std::max(1U, rank_select({keys, taken}, static_cast<uint64_t>(rank)).key);
}

}  // namespace paceline::codec::topk
