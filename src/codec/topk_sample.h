// A first guess of top-k's threshold from a sample.
#pragma once

#include <cstdint>
#include <span>

#include "codec/codec.h"

namespace paceline::codec::topk {

/// Bits of a magnitude that a little more than `keep` of the elements of gradient + residual reach,
/// most likely: aims at 3 standard deviations of the sampling error above `keep`. At least 1.
/// Deterministic: groups of 16 neighbours (one cache line) are taken from equal strata, at an
/// offset in each that a fixed generator gives, so that no period in the data meets a period in the
/// sample. A wrong guess costs time, never the result.
uint32_t guess_threshold(std::span<const float> gradient, std::span<const ResidualRun> runs,
                         uint64_t keep);

}  // namespace paceline::codec::topk
