// Any bytes as encodings that came for a GPU: int8, top-k, rows and dense. What adds them up reads nothing beyond them,
// writes nothing beyond its output, says so where a count or a position is impossible, and gives the same bits twice.
// Run by the reference, whose bits are the kernels'.
//
// Input: one byte each of codec, dtype, elements, ratio and nodes; then the encodings, one after the other, each as long
// as its format says; what the input lacks is zero.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "base/testing/fuzz_input.h"
#include "device/cuda/codec_test_util.h"
#include "device/cuda/kernel_arguments.h"
#include "device/cuda/reference.h"

namespace {

using namespace paceline;                // NOLINT: a fuzzer has no headers to leak into
using namespace paceline::device::cuda;  // NOLINT
using drivers::cuda::DevicePtr;
using paceline::testing::FuzzInput;
using paceline::testing::require;
using test::Buffer;

/// What is left of the input, and zeros where that is too little.
void fill(FuzzInput& in, const Buffer& buffer, uint64_t from = 0) {
  const std::size_t n = std::min<std::size_t>(buffer.bytes() - from, in.rest.size());
  std::memset(buffer.as<std::byte>() + from, 0, buffer.bytes() - from);
  if (n > 0) std::memcpy(buffer.as<std::byte>() + from, in.rest.data(), n);
  in.rest = in.rest.subspan(n);
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

std::vector<DevicePtr> addresses(const std::vector<Buffer>& buffers) {
  std::vector<DevicePtr> all;
  all.reserve(buffers.size());
  for (const Buffer& buffer : buffers) all.push_back(buffer.address());
  return all;
}

bool same(const Buffer& a, const Buffer& b) {
  return std::memcmp(a.as<void>(), b.as<void>(), a.bytes()) == 0;
}

void elements(FuzzInput& in, WireCodec codec) {
  const DType dtype = kTypes[in.byte() % 3];
  const uint64_t count = 1 + in.byte() * (in.byte() % 2 == 0 ? 1U : 41U);
  const WireFormat format{codec, dtype, (1 + in.byte()) / 256.0, in.byte() % 2 == 0};
  std::vector<Buffer> encodings;
  for (int n = 1 + in.byte() % 3; n > 0; --n) {
    encodings.emplace_back(encoded_bytes(format, count));
    fill(in, encodings.back());
  }
  const auto sources = addresses(encodings);
  const Buffer once(count * dtype_size(dtype)), again(once.bytes());
  uint32_t reports[2] = {0, 0};
  require(reference::combine(format, {sources, count, 0.5F, once.address(),
                                      reinterpret_cast<DevicePtr>(&reports[0])})
              .is_ok());
  require(reference::combine(format, {sources, count, 0.5F, again.address(),
                                      reinterpret_cast<DevicePtr>(&reports[1])})
              .is_ok());
  require(same(once, again) && reports[0] == reports[1] && (reports[0] & ~kReportCorrupted) == 0);
  require(codec == WireCodec::kTopK || reports[0] == 0);
  if (codec != WireCodec::kTopK) return;
  // A table of counts that goes back, or beyond the entries, is always told.
  const auto layout = top_k_layout(format, count);
  for (const Buffer& encoding : encodings) {
    const auto* starts = encoding.as<const uint32_t>();
    if (!std::is_sorted(starts, starts + layout.tiles + 1) || starts[layout.tiles] > layout.entries)
      require(reports[0] == kReportCorrupted);
  }
}

void rows(FuzzInput& in) {
  RowFormat format{kTypes[in.byte() % 3]};
  const uint8_t values = in.byte() % 3;
  format.values = values == 0 ? format.dtype : DType::kFloat16;
  if (values == 2 && format.dtype == DType::kFloat32) format.values = DType::kBFloat16;
  format.rows = 1U + in.byte();
  format.row_elements = 1U + in.byte() % 40;
  format.capacity = std::min<uint64_t>(format.rows, 1U + in.byte());
  std::vector<Buffer> encodings;
  bool is_possible = true;
  for (int n = 1 + in.byte() % 3; n > 0; --n) {
    // The head says how much is sent, and no more is there.
    const uint32_t count = in.byte() < 240
                               ? static_cast<uint32_t>(in.byte() % (format.capacity + 1))
                               : in.byte() * 0x01010101U;
    is_possible = is_possible && count <= format.capacity;
    encodings.emplace_back(used_row_bytes(format, std::min<uint64_t>(count, format.capacity)));
    fill(in, encodings.back(), sizeof count);
    std::memcpy(encodings.back().as<void>(), &count, sizeof count);
  }
  const auto sources = addresses(encodings);
  const Buffer once(format.rows * format.row_elements * dtype_size(format.dtype));
  const Buffer again(once.bytes());
  require(reference::combine_rows(format, {sources, 0.5F, once.address()}).is_ok());
  require(reference::combine_rows(format, {sources, 0.5F, again.address()}).is_ok());
  require(same(once, again));
  for (uint64_t i = 0; !is_possible && i < format.rows * format.row_elements; ++i)
    require(std::isnan(test::widen(format.dtype, once.as<void>(), i)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  FuzzInput in{{data, size}};
  const uint8_t what = in.byte() % 8;
  if (what < 5) {
    elements(in, static_cast<WireCodec>(what));
  } else {
    rows(in);
  }
  return 0;
}
