// How gradients are made smaller for the wire: one contract for all codecs, on all devices.
//
// The identity that every codec keeps (tested as such): decode(encode(g + r)) + r' == g + r, where
// r is the residual before and r' after; exactly for top-k, and for casts (which keep no residual)
// within one rounding of the target type. Decoding is deterministic: the same bytes give the same
// bits on every CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "base/types.h"
#include "base/workers.h"
#include "plan/plan.h"

namespace paceline::codec {

/// The largest encoding of `elements` elements of `dtype`, in bytes. Dense codecs: exact, and
/// linear, so that pieces can be encoded and decoded on their own. Top-k: the bound (header + at
/// most k entries).
uint64_t encoded_bytes(const plan::CodecSpec& spec, DType dtype, uint64_t elements);

/// Elements that top-k may keep: max(1, round(ratio · elements)), 0 of 0.
uint64_t top_k_count(const plan::CodecSpec& spec, uint64_t elements);

// Dense codecs (kFp16, kBf16): float32 in memory, 16 bits on the wire. With kNone these copy.

/// dst[i] = cast(src[i] · scale). `dst` has encoded_bytes() bytes. Values beyond the target's range
/// become infinite (so that loss scaling sees them); NaN stays NaN.
void encode_dense(const plan::CodecSpec& spec, std::span<const float> src, std::byte* dst);
/// dst[i] = wide(src[i]) / scale.
void decode_dense(const plan::CodecSpec& spec, const std::byte* src, std::span<float> dst);
/// dst[i] = op(dst[i], wide(src[i]) / scale).
void decode_reduce_dense(const plan::CodecSpec& spec, ReduceOp op, const std::byte* src,
                         std::span<float> dst);

// Sparse codec (kTopK).
//
// What travels is exactly the k = top_k_count() elements of largest |gradient + residual|, among
// equals the lower index first; fewer only where fewer are not zero (a zero never travels). So the
// bytes depend on the inputs alone: not on the SIMD target, nor on the sample from which the
// threshold is guessed first (topk_encode.cc tells the passes).
//
// With float32 values an element that travels leaves 0 behind. With fp16_values it leaves what the
// rounding to fp16 left, exactly; values share a power of two chosen from the largest, so nothing
// overflows, and what is below 2^-34 of the largest stays behind whole. The wire format is drawn in
// topk_format.h.

/// Residual storage of one contiguous run of a parameter: `before` is read, `after` is written;
/// they never overlap, so that a step can be taken back.
struct ResidualRun {
  const float* before = nullptr;
  float* after = nullptr;
  uint64_t elements = 0;
};

/// A neighbour's part of what is encoded, where it lies: added to gradient[first + i].
struct Addend {
  const float* data = nullptr;
  uint64_t first = 0;
  uint64_t elements = 0;
};

struct EncodedTopK {
  uint64_t bytes = 0;  ///< written to dst
  uint64_t kept = 0;   ///< entries: top_k_count(), or all that aren't zero
  bool finite =
      true;  ///< false: an Inf or NaN was seen; the encoding carries a flag that all ranks see
};

/// Encodes gradient + residual (at most 2^32 elements): the entries of largest magnitude travel,
/// the rest becomes the new residual. `runs` cover `gradient` in order (their elements add up to
/// its size). `dst` has encoded_bytes() bytes; those beyond EncodedTopK::bytes may be overwritten.
/// When an Inf or NaN is in the sum, nothing is sent but that fact, and `after` becomes a copy of
/// `before`. `addends` are added to the gradient in their order, before the residual, as if that had been done ahead; the
/// sum is nowhere in memory but in the cache, each is read once. `workers`, if any, share the work; the result is the same in every bit. Some
/// scratch memory is kept from call to call, for as many as encode at once: about 16 bytes × k + 4 bytes × elements / 100,
/// and with several threads 32 bytes × k for each of them, but no more than 16 bytes × elements.
EncodedTopK encode_topk(const plan::CodecSpec& spec, std::span<const float> gradient,
                        std::span<const ResidualRun> runs, std::byte* dst,
                        Workers* workers = nullptr, std::span<const Addend> addends = {});
/// Buffers of other sizes follow: what encode_topk() keeps is freed. From any thread.
void forget_topk_sizes();
/// dst = (the sum of all encodings, each element's values added in their order to 0) / divisor: in
/// one walk over dst, which has the `elements` that each encodes. If one is flagged non-finite, dst
/// becomes NaN. Every byte is checked before it is used: kCorrupted names what is wrong, and dst may
/// then hold a part of the sum. `workers`, if any, share the work; the result is the same in every bit. The calling
/// thread keeps 1.2 KiB an encoding from call to call, with several threads 2.5 KiB an encoding and thread.
Status decode_sum_topk(std::span<const std::span<const std::byte>> encodings, std::span<float> dst,
                       double divisor = 1.0, Workers* workers = nullptr);

}  // namespace paceline::codec
