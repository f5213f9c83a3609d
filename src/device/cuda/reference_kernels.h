// What the reference kernels share: a launch's struct, and typed views of its addresses.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "device/cuda/codec.h"
#include "device/cuda/kernel_arguments.h"
#include "device/cuda/numbers.h"

namespace paceline::device::cuda::reference {

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));  // NOLINT: host memory, as agreed
}

inline void add_report(Address report, uint32_t bits) {
  if (report != 0) *at<uint32_t>(report) |= bits;
}

/// A finite value that the type can't hold becomes its largest number.
template <class Wire>
typename Wire::Bits saturated(float value, uint32_t& report) {
  if (!is_finite(value)) {
    report |= kReportNonFinite;
  } else if (magnitude_bits(value) >= Wire::kOverflow) {
    report |= kReportSaturated;
    const auto largest = Wire::largest();
    return std::signbit(value) ? Wire::narrow(-Wire::widen(largest)) : largest;
  }
  return Wire::narrow(value);
}

// The kernels, by file.
template <class From, class Wire>
void encode_dense(const DenseEncode& argument);
template <class Wire, class To>
void combine_dense(const DenseCombine& argument);
template <class From>
void encode_int8(const Int8Encode& argument);
template <class To>
void combine_int8(const Int8Combine& argument);
template <class From>
void sample_coarse(const TopK& argument);
template <class From>
void sample_fine(const TopK& argument);
template <class From>
void select_top_k(const TopK& argument);
void gather_top_k(const TopK& argument);
template <class To>
void combine_top_k(const TopKCombine& argument);
template <class Word>
void flag_rows(const RowsEncode& argument);
void list_rows(const RowsEncode& argument);
template <class From, class Wire>
void encode_rows(const RowsEncode& argument);
template <class Wire, class To>
void combine_rows(const RowsCombine& argument);
void copy_segments(const CopySegments& argument);

}  // namespace paceline::device::cuda::reference
