// Any bytes as a top-k message: decoding ends with a value or with kCorrupted, and touches nothing but its buffer.
//
// Input: two bytes, the buffer's elements (× 3), then the message.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/topk_format.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  using namespace paceline;
  if (size < 2) return 0;
  uint16_t third = 0;
  std::memcpy(&third, data, sizeof(third));
  std::vector<float> dst(std::size_t{third} * 3, 0.0F);
  // A copy of exactly this size, so that a read beyond it is seen.
  std::vector<std::byte> message(size - 2);
  std::copy_n(reinterpret_cast<const std::byte*>(data) + 2, message.size(), message.data());
  const std::span<const std::byte> encodings[] = {message, message};
  const Status status = codec::decode_sum_topk(std::span(encodings).first(1), dst);
  // Twice the same ends the same way.
  std::vector<float> twice(dst.size(), 1.0F);
  if (codec::decode_sum_topk(encodings, twice, 2.0).code() != status.code()) std::abort();
  if (!status.is_ok() && status.code() != Code::kCorrupted) std::abort();
  if (!status.is_ok()) return 0;
  // What was accepted is either flagged or adds finite values only.
  const bool flagged = (static_cast<uint8_t>(message[4]) & codec::topk::kFlagNonFinite) != 0;
  for (const float x : dst)
    if (std::isfinite(x) == flagged) std::abort();
  return 0;
}
