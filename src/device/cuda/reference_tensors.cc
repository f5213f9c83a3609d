#include <algorithm>
#include <cstring>

#include "device/cuda/reference_kernels.h"

namespace paceline::device::cuda::reference {

template <class Word>
void flag_rows(const RowsEncode& a) {
  for (uint64_t row = 0; row < a.rows; ++row) {
    const Word* words = at<const Word>(a.gradient) + row * a.row_elements;
    constexpr int kWithoutSign = sizeof(Word) * 8 - 1;
    at<uint8_t>(a.flags)[row] =
        std::any_of(words, words + a.row_elements,
                    [](Word word) { return (word & ((Word{1} << kWithoutSign) - 1)) != 0; })
            ? 1
            : 0;
  }
}

void list_rows(const RowsEncode& a) {
  std::memset(at<void>(a.encoded), 0, kRowHead);
  auto& count = *at<uint32_t>(a.encoded);
  auto* list = at<uint32_t>(a.encoded + kRowHead);
  for (uint64_t row = 0; row < a.rows; ++row) {
    if (at<const uint8_t>(a.flags)[row] == 0) continue;
    if (count < a.capacity) list[count] = static_cast<uint32_t>(row);
    ++count;
  }
  const uint64_t used = std::min<uint64_t>(count, a.capacity);
  std::fill(list + used, at<uint32_t>(a.encoded + row_values(used)), 0);
  if (count > a.capacity) add_report(a.report, kReportRows);
}

template <class From, class Wire>
void encode_rows(const RowsEncode& a) {
  const uint64_t count = std::min<uint64_t>(*at<const uint32_t>(a.encoded), a.capacity);
  const Address values = a.encoded + row_values(count);
  std::memset(at<void>(values), 0, count * a.row_bytes);
  uint32_t report = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t row = at<const uint32_t>(a.encoded + kRowHead)[i];
    const auto* from = at<const typename From::Bits>(a.gradient) + row * a.row_elements;
    auto* to = at<typename Wire::Bits>(values + i * a.row_bytes);
    for (uint64_t e = 0; e < a.row_elements; ++e)
      to[e] = saturated<Wire>(From::widen(from[e]) * a.scale, report);
  }
  if (report != 0) add_report(a.report, report);
}

template <class Wire, class To>
void combine_rows(const RowsCombine& a) {
  bool whole = true;
  for (uint32_t source = 0; source < a.sources; ++source)
    whole = whole && *at<const uint32_t>(a.encoded[source]) <= a.capacity;
  for (uint64_t row = 0; row < a.rows; ++row) {
    auto* to = at<typename To::Bits>(a.output) + row * a.row_elements;
    std::vector<const typename Wire::Bits*> found;
    for (uint32_t source = 0; source < a.sources; ++source) {
      const Address encoded = a.encoded[source];
      const auto* list = at<const uint32_t>(encoded + kRowHead);
      const uint64_t used = std::min<uint64_t>(*at<const uint32_t>(encoded), a.capacity);
      const auto* end = list + used;
      const auto* place = std::lower_bound(list, end, row);
      if (place != end && *place == row)
        found.push_back(at<const typename Wire::Bits>(encoded + row_values(used) +
                                                      (place - list) * a.row_bytes));
    }
    for (uint64_t e = 0; e < a.row_elements; ++e) {
      float sum = 0;
      for (const auto* values : found) sum += Wire::widen(values[e]);
      to[e] = To::narrow(whole ? sum * a.scale : float_of(0x7FC00000U));
    }
  }
}

void copy_segments(const CopySegments& a) {
  for (uint32_t i = 0; i < a.segments; ++i)
    std::memcpy(at<void>(a.to[i]), at<const void>(a.from[i]), a.bytes[i]);
}

template void flag_rows<uint32_t>(const RowsEncode&);
template void flag_rows<uint16_t>(const RowsEncode&);
template void encode_rows<Float32, Float32>(const RowsEncode&);
template void encode_rows<Float16, Float16>(const RowsEncode&);
template void encode_rows<BFloat16, BFloat16>(const RowsEncode&);
template void encode_rows<Float32, Float16>(const RowsEncode&);
template void encode_rows<BFloat16, Float16>(const RowsEncode&);
template void encode_rows<Float32, BFloat16>(const RowsEncode&);
template void combine_rows<Float32, Float32>(const RowsCombine&);
template void combine_rows<Float16, Float16>(const RowsCombine&);
template void combine_rows<BFloat16, BFloat16>(const RowsCombine&);
template void combine_rows<Float16, Float32>(const RowsCombine&);
template void combine_rows<Float16, BFloat16>(const RowsCombine&);
template void combine_rows<BFloat16, Float32>(const RowsCombine&);

}  // namespace paceline::device::cuda::reference
