// A first guess of top-k's threshold from a sample.
#pragma once

#include <cstdint>
#include <span>

#include "codec/candidates.h"
#include "codec/codec.h"
#include "codec/topk_sum.h"

namespace paceline::codec::topk {

struct Guess {
  uint32_t threshold = 1;  ///< bits of a magnitude, at least 1
  float largest = 0;       ///< magnitude, in the sample
};

/// What a guess works with: worth keeping for the next one.
struct SampleMemory {
  Scratch<float> sums;
  Scratch<uint64_t> places;
};

/// A threshold that a little more than `keep` of the elements of gradient + residual reach, most likely: it aims at 3
/// standard deviations of the sampling error above `keep`. Deterministic: groups of 16 neighbours (one cache line) are
/// taken from equal strata, at an offset in each that a fixed generator gives, so that no period in the data meets a
/// period in the sample. Small buffers are read whole. A wrong guess costs time, never the result. `workers`, if any,
/// share the reading.
Guess guess_threshold(const GradientSum& gradient, std::span<const ResidualRun> runs, uint64_t keep,
                      SampleMemory& memory, Workers* workers = nullptr);

}  // namespace paceline::codec::topk
