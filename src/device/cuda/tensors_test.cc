// Sparse rows and segments: the reference against dense sums in float64 and against plain copies.
#include <gtest/gtest.h>

#include <set>

#include "device/cuda/codec_test_util.h"
#include "device/cuda/reference.h"

namespace paceline::device::cuda {
namespace {

using drivers::cuda::DevicePtr;
using test::Buffer;

constexpr uint64_t kRows = 700;

/// A gradient in which about one row in `every` is not zero.
Buffer sparse_rows(const RowFormat& format, uint32_t every, uint32_t seed) {
  Buffer gradient = test::normal(format.dtype, format.rows * format.row_elements, 1, seed);
  std::mt19937 random(seed + 1);
  for (uint64_t row = 0; row < format.rows; ++row) {
    if (random() % every == 0) continue;
    for (uint64_t e = 0; e < format.row_elements; ++e)
      test::narrow(format.dtype, -0.0F, gradient.as<void>(), row * format.row_elements + e);
  }
  return gradient;
}

Buffer encoded_rows(const RowFormat& format, const Buffer& gradient, uint32_t& report) {
  Buffer encoded(encoded_row_bytes(format));
  const Buffer state(row_state_bytes(format));
  const EncodeRowsArguments a{gradient.address(), 0.5F, encoded.address(), state.address(),
                              reinterpret_cast<DevicePtr>(&report)};
  EXPECT_TRUE(reference::encode_rows(format, a).is_ok());
  return encoded;
}

TEST(SparseRows, SumIsTheDenseSum) {
  for (const uint64_t row_elements : {1U, 3U, 24U, 130U}) {
    for (const auto& [dtype, values] :
         {std::pair{DType::kFloat32, DType::kFloat32}, std::pair{DType::kFloat32, DType::kFloat16},
          std::pair{DType::kFloat32, DType::kBFloat16}, std::pair{DType::kFloat16, DType::kFloat16},
          std::pair{DType::kBFloat16, DType::kFloat16},
          std::pair{DType::kBFloat16, DType::kBFloat16}}) {
      const RowFormat format{dtype, values, kRows, row_elements, kRows / 2};
      std::vector<Buffer> gradients, encodings;
      std::vector<DevicePtr> sources;
      uint32_t report = 0;
      for (uint32_t node = 0; node < 3; ++node) {
        gradients.push_back(sparse_rows(format, 5, 10 * node));
        encodings.push_back(encoded_rows(format, gradients.back(), report));
        sources.push_back(encodings.back().address());
      }
      EXPECT_EQ(report, 0U);
      const Buffer output(kRows * row_elements * dtype_size(dtype));
      ASSERT_TRUE(reference::combine_rows(format, {sources, 2.0F, output.address()}).is_ok());
      const bool coarse = dtype == DType::kBFloat16 || values == DType::kBFloat16;
      const double step = values == DType::kFloat32 ? 1e-6 : coarse ? 0.02 : 3e-3;
      for (uint64_t i = 0; i < kRows * row_elements; ++i) {
        double sum = 0, size = 0;
        for (const Buffer& gradient : gradients) {
          sum += test::widen(dtype, gradient.as<void>(), i);
          size += std::abs(test::widen(dtype, gradient.as<void>(), i));
        }
        ASSERT_NEAR(test::widen(dtype, output.as<void>(), i), sum, step * size);
      }
    }
  }
}

TEST(SparseRows, CountsAreTrueAndListsAscend) {
  const RowFormat format{DType::kFloat32, DType::kFloat32, kRows, 7, kRows};
  const Buffer gradient = sparse_rows(format, 9, 3);
  uint32_t report = 0;
  const Buffer encoded = encoded_rows(format, gradient, report);
  std::set<uint32_t> want;
  for (uint64_t i = 0; i < kRows * 7; ++i)
    if (gradient.as<float>()[i] != 0) want.insert(static_cast<uint32_t>(i / 7));
  ASSERT_EQ(encoded.as<uint32_t>()[0], want.size());
  EXPECT_EQ(used_row_bytes(format, want.size()),
            16 + (want.size() + 3) / 4 * 16 + want.size() * 32);
  EXPECT_TRUE(std::equal(want.begin(), want.end(), encoded.as<uint32_t>() + 4));
}

TEST(SparseRows, MoreThanTheBoundPoisonsTheSumOfAll) {
  const RowFormat format{DType::kFloat32, DType::kFloat32, kRows, 8, 10};
  uint32_t report = 0;
  const Buffer full = encoded_rows(format, sparse_rows(format, 5, 3), report);
  EXPECT_EQ(report, kReportRows);
  const Buffer output(kRows * 8 * 4);
  const DevicePtr source = full.address();
  ASSERT_TRUE(reference::combine_rows(format, {{&source, 1}, 1.0F, output.address()}).is_ok());
  for (uint64_t i = 0; i < kRows * 8; ++i) ASSERT_TRUE(std::isnan(output.as<float>()[i]));
}

TEST(SparseRows, BadFormatsAreNamed) {
  const Buffer memory(4096);
  const EncodeRowsArguments a{memory.address(), 1, memory.address(), memory.address(), 0};
  for (const RowFormat& format : {RowFormat{DType::kInt8, DType::kInt8, 4, 4, 4},
                                  RowFormat{DType::kFloat16, DType::kBFloat16, 4, 4, 4},
                                  RowFormat{DType::kFloat32, DType::kFloat32, 0, 4, 4},
                                  RowFormat{DType::kFloat32, DType::kFloat32, 4, 4, 5},
                                  RowFormat{DType::kFloat32, DType::kFloat32, 4, 0, 4}})
    EXPECT_EQ(reference::encode_rows(format, a).code(), Code::kInvalidArgument);
}

TEST(Segments, ComeBackAsTheyWere) {
  std::mt19937 random(3);
  std::vector<Buffer> tensors, copies;
  std::vector<Segment> out, back;
  uint64_t offset = 0;
  for (int i = 0; i < 300; ++i) {  // more than one launch takes
    const uint64_t bytes = i % 50 == 0 ? 100000 + random() % 1000 : random() % 500;
    tensors.push_back(test::normal(DType::kFloat32, bytes / 4 + 1, 1, i));
    copies.emplace_back(bytes / 4 * 4 + 4);
    out.push_back({tensors.back().address(), offset, bytes});
    back.push_back({copies.back().address(), offset, bytes});
    offset += bytes;
  }
  const Buffer buffer(offset);
  ASSERT_TRUE(reference::pack(out, buffer.address()).is_ok());
  ASSERT_TRUE(reference::unpack(back, buffer.address()).is_ok());
  for (size_t i = 0; i < tensors.size(); ++i)
    ASSERT_EQ(0, std::memcmp(tensors[i].as<void>(), copies[i].as<void>(), out[i].bytes));
  EXPECT_EQ(reference::pack(out, 0).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace paceline::device::cuda
