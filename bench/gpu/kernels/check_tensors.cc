#include <fmt/format.h>

#include <cstring>

#include "check.h"
#include "device/cuda/reference.h"
#include "inputs.h"

namespace bench {
namespace {

using namespace paceline::device::cuda;
using paceline::DType;
using paceline::Status;
using Bytes = std::vector<std::byte>;

DevicePtr address(const Bytes& bytes) { return reinterpret_cast<DevicePtr>(bytes.data()); }

void must(const Status& status) {
  if (!status.is_ok()) fail(status.to_string());
}

/// All rows but one in `every` are zeros, of either sign.
Bytes sparse_rows(const RowFormat& format, uint64_t every, uint64_t seed) {
  Bytes data = make_input(format.dtype, format.rows * format.row_elements, Kind::kNormal, seed);
  const uint64_t row_bytes = format.row_elements * paceline::dtype_size(format.dtype);
  for (uint64_t row = 0; row < format.rows; ++row)
    if ((row * 2654435761U + seed) % every != 0)
      for (uint64_t b = 0; b < row_bytes; ++b)
        data[row * row_bytes + b] =
            (b + 1) % paceline::dtype_size(format.dtype) == 0 ? std::byte{0x80} : std::byte{0};
  return data;
}

/// Differing bytes of one format's encodings and sum, on 3 nodes.
uint64_t rows_differ(const Gpu& gpu, const Kernels& kernels, const RowFormat& format,
                     uint64_t every) {
  std::vector<Bytes> host;
  std::vector<Memory> device;
  std::vector<DevicePtr> host_sources, sources;
  uint64_t wrong = 0;
  for (uint64_t node = 0; node < 3; ++node) {
    const Bytes gradient = sparse_rows(format, every, 31 * node);
    Bytes scratch(row_state_bytes(format));
    host.emplace_back(encoded_row_bytes(format), std::byte{0xA5});
    uint32_t want = 0, got = 0;
    must(reference::encode_rows(format, {address(gradient), 0.3F, address(host.back()),
                                         address(scratch), reinterpret_cast<DevicePtr>(&want)}));
    const Memory input(gpu, gradient.data(), gradient.size()), state(gpu, scratch.size());
    const Memory report(gpu, 16);
    device.emplace_back(gpu, encoded_row_bytes(format));
    device.back().fill(0xA5);
    state.fill(0xA5);
    report.fill(0);
    must(kernels.encode_rows(
        format, {input.address(), 0.3F, device.back().address(), state.address(), report.address()},
        gpu.stream()));
    gpu.wait();
    report.read(&got, sizeof(got));
    wrong += want != got ? 1 : 0;
    wrong += device.back().copy<std::byte>() != host.back() ? 1 : 0;
    host_sources.push_back(address(host.back()));
    sources.push_back(device.back().address());
  }
  // Many sources are looked up in turns of 32.
  while (sources.size() < (format.rows % 2 == 0 ? 40U : 3U)) {
    sources.push_back(sources[sources.size() % 3]);
    host_sources.push_back(host_sources[host_sources.size() % 3]);
  }
  Bytes want(format.rows * format.row_elements * paceline::dtype_size(format.dtype));
  must(reference::combine_rows(format, {host_sources, 0.5F, address(want)}));
  const Memory output(gpu, want.size());
  output.fill(0xA5);
  must(kernels.combine_rows(format, {sources, 0.5F, output.address()}, gpu.stream()));
  gpu.wait();
  // A poisoned sum is NaN on both, in other bits.
  const Bytes got = output.copy<std::byte>();
  return wrong + (every > 1 && got != want ? 1 : 0);
}

uint64_t segments_differ(const Gpu& gpu, const Kernels& kernels) {
  constexpr uint64_t kBytes = 1 << 22;
  const Bytes data = make_input(DType::kFloat32, kBytes / 4, Kind::kNormal, 5);
  const Memory tensors(gpu, data.data(), kBytes), buffer(gpu, kBytes), back(gpu, kBytes);
  buffer.fill(0xA5);
  back.fill(0xA5);
  std::vector<Segment> out, in;
  uint64_t wrong = 0, offset = 0, random = 12345;
  Bytes want_buffer(kBytes, std::byte{0xA5}), want_back(kBytes, std::byte{0xA5});
  for (uint64_t place = 0; place + 70000 < kBytes;) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    const uint64_t bytes = random % 100000 < 3000 ? 69999 : (random >> 33) % 3000;
    out.push_back({tensors.address() + place, offset, bytes});
    in.push_back({back.address() + place, offset, bytes});
    std::memcpy(want_buffer.data() + offset, data.data() + place, bytes);
    std::memcpy(want_back.data() + place, data.data() + place, bytes);
    offset += bytes;
    place += bytes + (random >> 20) % 16;
  }
  must(kernels.pack(out, buffer.address(), gpu.stream()));
  must(kernels.unpack(in, buffer.address(), gpu.stream()));
  gpu.wait();
  wrong += buffer.copy<std::byte>() != want_buffer ? 1 : 0;
  wrong += back.copy<std::byte>() != want_back ? 1 : 0;
  return wrong;
}

}  // namespace

bool check_tensors(const Gpu& gpu, const Kernels& kernels, Extent extent) {
  uint64_t failures = 0, cases = 0;
  std::vector<uint64_t> rows = {1, 700, 2049};
  if (extent == Extent::kFull) rows.push_back(50257);
  for (const auto& [dtype, values] :
       {std::pair{DType::kFloat32, DType::kFloat32}, std::pair{DType::kFloat32, DType::kFloat16},
        std::pair{DType::kFloat32, DType::kBFloat16}, std::pair{DType::kFloat16, DType::kFloat16},
        std::pair{DType::kBFloat16, DType::kBFloat16},
        std::pair{DType::kBFloat16, DType::kFloat16}})
    for (const uint64_t count : rows)
      for (const uint64_t row_elements : {1U, 7U, 96U, 1000U})
        for (const uint64_t every : {1U, 3U, 50U}) {
          if (count > 10000 && (row_elements != 96 || every != 50)) continue;
          const uint64_t capacity = every == 1 ? (count + 1) / 2 : count;
          const RowFormat format{dtype, values, count, row_elements, capacity};
          const uint64_t wrong = rows_differ(gpu, kernels, format, every);
          ++cases;
          failures += wrong;
          if (wrong != 0)
            fmt::print("  FAILED rows: {} × {} {}, one in {}, as {}\n", count, row_elements,
                       paceline::dtype_name(dtype), every, paceline::dtype_name(values));
        }
  fmt::print("check rows   {:4} cases, {} failures\n", cases, failures);
  const uint64_t segments = segments_differ(gpu, kernels);
  fmt::print("check pack      1 cases, {} failures\n", segments);
  return failures + segments == 0;
}

}  // namespace bench
