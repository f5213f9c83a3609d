// Any floats as gradient and residual: decode + rest is gradient + residual in every bit, the count is right, the bound
// holds.
//
// Input: one byte of options, then pairs of float32 (gradient, residual).
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "base/testing/fuzz_input.h"
#include "codec/codec.h"

namespace {

using paceline::testing::require;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  using namespace paceline;
  if (size < 1) return 0;
  plan::CodecSpec spec;
  spec.codec = plan::Codec::kTopK;
  spec.fp16_values = (data[0] & 1) != 0;
  spec.ratio = static_cast<double>(data[0] >> 1) / 127.0;
  const std::size_t n = (size - 1) / 8;
  std::vector<float> gradient(n), before(n), after(n), decoded(n);
  bool finite = true;
  std::size_t numbers = 0;
  for (std::size_t i = 0; i < n; ++i) {
    std::memcpy(&gradient[i], data + 1 + i * 8, 4);
    std::memcpy(&before[i], data + 5 + i * 8, 4);
    const float sum = gradient[i] + before[i];
    finite = finite && std::isfinite(sum);
    if (sum != 0) ++numbers;
  }
  const uint64_t bound = codec::encoded_bytes(spec, DType::kFloat32, n);
  std::vector<std::byte> bytes(bound);
  const codec::ResidualRun runs[] = {{before.data(), after.data(), n / 3},
                                     {before.data() + n / 3, after.data() + n / 3, n - n / 3}};
  const auto result = codec::encode_topk(spec, gradient, runs, bytes.data());
  require(result.bytes <= bound && result.finite == finite);
  const std::span<const std::byte> encoding(bytes.data(), result.bytes);
  require(codec::decode_sum_topk({&encoding, 1}, decoded).is_ok());
  if (!finite) {
    require(n == 0 || std::memcmp(before.data(), after.data(), n * 4) == 0);
    for (const float x : decoded) require(std::isnan(x));
    return 0;
  }
  require(result.kept == std::min<uint64_t>(codec::top_k_count(spec, n), numbers));
  for (std::size_t i = 0; i < n; ++i)
    require(std::bit_cast<uint32_t>(decoded[i] + after[i] + 0.0F) ==
            std::bit_cast<uint32_t>(gradient[i] + before[i] + 0.0F));
  return 0;
}
