#include <fmt/format.h>

#include "inputs.h"
#include "measure.h"

namespace bench {
namespace {

using namespace paceline::device::cuda;
using paceline::DType;

void must(const paceline::Status& status) {
  if (!status.is_ok()) fail(status.to_string());
}

/// GPT-2's table (50,257 rows of 1,024), of which a batch of 4,096 tokens touches some 3,500 rows.
void sparse_rows(const Gpu& gpu, const Kernels& kernels, const Memory& flush,
                 std::vector<Row>& rows) {
  const RowFormat format{DType::kFloat32, DType::kFloat16, 50257, 1024, 4096};
  const uint64_t elements = format.rows * format.row_elements;
  auto data = make_input(DType::kFloat32, elements, Kind::kNormal, 3);
  for (uint64_t row = 0; row < format.rows; ++row)
    if (row % 14 != 0)
      std::fill_n(reinterpret_cast<float*>(data.data()) + row * format.row_elements,
                  format.row_elements, 0.0F);
  const Memory gradient(gpu, data.data(), data.size()), output(gpu, data.size());
  const Memory encoded(gpu, encoded_row_bytes(format)), state(gpu, row_state_bytes(format));
  const double zero_rows = format.rows - format.rows / 14.0;
  rows.push_back(time_of(
      gpu, flush, "sparse rows: find, cast", elements,
      zero_rows * 4096 + format.rows / 14.0 * (4096 + 2048), [&](int) {
        must(kernels.encode_rows(
            format, {gradient.address(), 1, encoded.address(), state.address(), 0}, gpu.stream()));
      }));
  const std::vector<DevicePtr> sources(4, encoded.address());
  rows.push_back(
      time_of(gpu, flush, "sparse rows: combine × 4", elements,
              elements * 4.0 + 4.0 * format.rows / 14 * 2048, [&](int) {
                must(kernels.combine_rows(format, {sources, 1, output.address()}, gpu.stream()));
              }));
}

/// 400 tensors of 1 KB to 4 MB, as a transformer has.
void segments(const Gpu& gpu, const Kernels& kernels, const Memory& flush, std::vector<Row>& rows) {
  std::vector<Segment> list;
  uint64_t bytes = 0;
  for (int i = 0; i < 400; ++i) bytes += i % 3 == 0 ? 4 << 20 : 4096;
  const Memory tensors(gpu, bytes), buffer(gpu, bytes);
  uint64_t offset = 0;
  for (int i = 0; i < 400; ++i) {
    const uint64_t size = i % 3 == 0 ? 4 << 20 : 4096;
    list.push_back({tensors.address() + offset, offset, size});
    offset += size;
  }
  rows.push_back(time_of(gpu, flush, "pack of 400 tensors", bytes / 4, 2.0 * bytes,
                         [&](int) { must(kernels.pack(list, buffer.address(), gpu.stream())); }));
}

}  // namespace

std::vector<Row> measure_tensors(const Gpu& gpu, const Kernels& kernels, const Memory& flush) {
  std::vector<Row> rows;
  sparse_rows(gpu, kernels, flush, rows);
  segments(gpu, kernels, flush, rows);
  return rows;
}

}  // namespace bench
