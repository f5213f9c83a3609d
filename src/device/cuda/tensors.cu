// Rows that are not zero, and copies of many tensors in one launch: see tensors.h.
#include "device/cuda/device.cuh"

namespace paceline::device::cuda {
namespace {

constexpr uint32_t kRowWarps = kRowThreads / 32;

/// Whether a word holds something else than zeros of either sign.
template <class Word>
__device__ bool holds(uint32_t bits) {
  return (bits & (sizeof(Word) == 4 ? 0x7FFFFFFFU : 0x7FFF7FFFU)) != 0;
}

/// A warp takes a row and stops at the first part that is not zero.
template <class Word>
__device__ void flag(const RowsEncode& a) {
  const uint64_t row = uint64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32;
  if (row >= a.rows) return;
  const uint32_t lane = threadIdx.x % 32;
  const Word* words = at<const Word>(a.gradient) + row * a.row_elements;
  bool found = false;
  if (a.row_elements * sizeof(Word) % 16 == 0) {
    const auto* quads = reinterpret_cast<const uint4*>(words);
    const uint64_t count = a.row_elements * sizeof(Word) / 16;
    for (uint64_t i = lane; !__any_sync(kAllLanes, found) && i - lane < count; i += 64) {
      const uint4 none = make_uint4(0, 0, 0, 0);
      const uint4 one = i < count ? __ldca(quads + i) : none;
      const uint4 two = i + 32 < count ? __ldca(quads + i + 32) : none;
      found =
          holds<Word>(one.x | one.y | one.z | one.w) || holds<Word>(two.x | two.y | two.z | two.w);
    }
  } else {
    for (uint64_t i = lane; !__any_sync(kAllLanes, found) && i - lane < a.row_elements; i += 32)
      found = i < a.row_elements && holds<Word>(words[i]);
  }
  found = __any_sync(kAllLanes, found);
  if (lane == 0) at<uint8_t>(a.flags)[row] = found ? 1 : 0;
}

/// One block lists the flagged rows in ascending order.
__device__ void list(const RowsEncode& a) {
  __shared__ uint32_t in_warps[kListThreads / 32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* rows = at<uint32_t>(a.encoded + kRowHead);
  uint32_t listed = 0;
  for (uint64_t first = 0; first < a.rows; first += kListThreads) {
    const uint64_t row = first + threadIdx.x;
    const bool flagged = row < a.rows && at<const uint8_t>(a.flags)[row] != 0;
    const uint32_t lanes = __ballot_sync(kAllLanes, flagged);
    __syncthreads();
    if (lane == 0) in_warps[warp] = __popc(lanes);
    __syncthreads();
    const uint32_t mine = in_warps[lane];
    const uint32_t before = __reduce_add_sync(kAllLanes, lane < warp ? mine : 0);
    const uint32_t place = listed + before + __popc(lanes & ((1U << lane) - 1));
    if (flagged && place < a.capacity) rows[place] = static_cast<uint32_t>(row);
    listed += __reduce_add_sync(kAllLanes, mine);
  }
  const uint64_t used = min(uint64_t{listed}, a.capacity);
  const uint64_t slots = (row_values(used) - kRowHead) / sizeof(uint32_t);
  if (used + threadIdx.x < slots) rows[used + threadIdx.x] = 0;
  if (threadIdx.x >= 4) return;
  at<uint32_t>(a.encoded)[threadIdx.x] = threadIdx.x == 0 ? listed : 0;
  if (threadIdx.x == 0 && listed > a.capacity && a.report != 0)
    atomicOr(at<uint32_t>(a.report), kTooManyRows);
}
static_assert(kListThreads / 32 == 32, "a lane for each warp's count");

/// A warp takes a place of the encoding and fills it with its row.
template <class From, class Wire>
__device__ void encode(const RowsEncode& a) {
  const uint64_t place = uint64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32;
  const uint64_t used = min(uint64_t{*at<const uint32_t>(a.encoded)}, a.capacity);
  if (place >= used) return;
  const uint64_t row = at<const uint32_t>(a.encoded + kRowHead)[place];
  const auto* from = at<const typename From::Bits>(a.gradient) + row * a.row_elements;
  auto* to = at<typename Wire::Bits>(a.encoded + row_values(used) + place * a.row_bytes);
  const uint64_t slots = a.row_bytes / sizeof(typename Wire::Bits);
  uint32_t report = 0;
  const auto value = [&](uint64_t e, typename From::Bits bits) {
    if (e >= a.row_elements) return typename Wire::Bits{0};
    return saturated<Wire>(__fmul_rn(From::widen(bits), a.scale), report);
  };
  if (a.row_elements % 8 == 0) {  // rows begin at multiples of 16 bytes on both sides
    for (uint64_t e = threadIdx.x % 32 * 4; e < slots; e += 128) {
      using In = Pack<typename From::Bits, 4>;
      const In in = e < a.row_elements ? In::load(from + e) : In{};
      Pack<typename Wire::Bits, 4> out;
#pragma unroll
      for (int j = 0; j < 4; ++j) out.of[j] = value(e + j, in.of[j]);
      out.store(to + e);
    }
  } else {
    for (uint64_t e = threadIdx.x % 32; e < slots; e += 32)
      to[e] = value(e, e < a.row_elements ? from[e] : typename From::Bits{0});
  }
  add_report(a.report, report);
}

/// Where `row` stands in the ascending list, or `count`.
__device__ uint32_t place_of(const uint32_t* list, uint32_t count, uint32_t row) {
  uint32_t low = 0, high = count;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (__ldca(list + middle) < row)
      low = middle + 1;
    else
      high = middle;
  }
  return low < count && __ldca(list + low) == row ? low : count;
}

/// A warp takes a row of the output; its lanes look the row up in 32 sources at a time.
template <class Wire, class To>
__device__ void combine(const RowsCombine& a) {
  __shared__ Address found[kRowWarps][32];
  const uint64_t row = uint64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32;
  if (row >= a.rows) return;
  const uint32_t lane = threadIdx.x % 32;
  Address* mine = found[threadIdx.x / 32];
  auto* to = at<typename To::Bits>(a.output) + row * a.row_elements;
  bool whole = true;
  // More than 32 sources are looked up again for each part of the row.
  const auto look_up = [&](uint32_t base) {
    __syncwarp();
    const uint32_t source = base + lane;
    Address values = 0;
    if (source < a.sources) {
      const Address encoded = a.encoded[source];
      const uint32_t count = __ldca(at<const uint32_t>(encoded));
      if (count > a.capacity) whole = false;
      const auto used = static_cast<uint32_t>(min(uint64_t{count}, a.capacity));
      const uint32_t place =
          place_of(at<const uint32_t>(encoded + kRowHead), used, static_cast<uint32_t>(row));
      if (place < used) values = encoded + row_values(used) + place * a.row_bytes;
    }
    mine[lane] = values;
    whole = __all_sync(kAllLanes, whole);
    __syncwarp();
  };
  const bool one_turn = a.sources <= 32;
  if (one_turn) look_up(0);
  const auto add = [&](float sum, uint64_t e, uint32_t base) {
    for (uint32_t j = 0; j < 32 && base + j < a.sources; ++j)
      if (mine[j] != 0)
        sum = __fadd_rn(sum, Wire::widen(at<const typename Wire::Bits>(mine[j])[e]));
    return sum;
  };
  if (one_turn && a.row_elements % 8 == 0) {
    for (uint64_t e = lane * 4; e < a.row_elements; e += 128) {
      float sum[4] = {0, 0, 0, 0};
      for (uint32_t j = 0; j < a.sources; ++j) {
        if (mine[j] == 0) continue;
        const auto in =
            Pack<typename Wire::Bits, 4>::load(at<const typename Wire::Bits>(mine[j]) + e);
#pragma unroll
        for (int n = 0; n < 4; ++n) sum[n] = __fadd_rn(sum[n], Wire::widen(in.of[n]));
      }
      Pack<typename To::Bits, 4> out;
#pragma unroll
      for (int n = 0; n < 4; ++n)
        out.of[n] = To::narrow(whole ? __fmul_rn(sum[n], a.scale) : __uint_as_float(kNan));
      out.store(to + e);
    }
    return;
  }
  for (uint64_t begin = 0; begin < a.row_elements; begin += 32) {
    const uint64_t e = begin + lane;
    float sum = 0;
    for (uint32_t base = 0; base < a.sources; base += 32) {
      if (!one_turn) look_up(base);
      if (e < a.row_elements) sum = add(sum, e, base);
    }
    if (e < a.row_elements)
      to[e] = To::narrow(whole ? __fmul_rn(sum, a.scale) : __uint_as_float(kNan));
  }
}

/// Copies words of one size; `bytes` is a multiple of it.
template <class Word>
__device__ void copy(Address from, Address to, uint64_t bytes) {
  const uint64_t count = bytes / sizeof(Word);
  constexpr int kBatch = 4;
  for (uint64_t i = threadIdx.x; i < count; i += kBatch * kCopyThreads) {
    Word words[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (i + b * kCopyThreads < count) words[b] = at<const Word>(from)[i + b * kCopyThreads];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (i + b * kCopyThreads < count) at<Word>(to)[i + b * kCopyThreads] = words[b];
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kCopyThreads)
    paceline_copy_segments(const __grid_constant__ CopySegments a) {
  uint32_t low = 0, high = a.segments;  // the last segment that begins at this block or before
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (a.first[middle] <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  const uint64_t begin = uint64_t{blockIdx.x - a.first[low]} * kCopyBytes;
  const uint64_t bytes = min(uint64_t{kCopyBytes}, a.bytes[low] - begin);
  const Address from = a.from[low] + begin, to = a.to[low] + begin;
  const uint64_t all = from | to | bytes;
  if (all % 16 == 0)
    copy<uint4>(from, to, bytes);
  else if (all % 4 == 0)
    copy<uint32_t>(from, to, bytes);
  else if (all % 2 == 0)
    copy<uint16_t>(from, to, bytes);
  else
    copy<uint8_t>(from, to, bytes);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    paceline_rows_flag_32(const __grid_constant__ RowsEncode a) {
  flag<uint32_t>(a);
}
extern "C" __global__ void __launch_bounds__(kRowThreads)
    paceline_rows_flag_16(const __grid_constant__ RowsEncode a) {
  flag<uint16_t>(a);
}
extern "C" __global__ void __launch_bounds__(kListThreads)
    paceline_rows_list(const __grid_constant__ RowsEncode a) {
  list(a);
}

#define PACELINE_ROWS(name, From, Wire)                                          \
  extern "C" __global__ void __launch_bounds__(kRowThreads)                      \
      paceline_rows_encode_##name(const __grid_constant__ RowsEncode argument) { \
    encode<From, Wire>(argument);                                                \
  }
#define PACELINE_ROWS_BACK(name, Wire, To)                                         \
  extern "C" __global__ void __launch_bounds__(kRowThreads)                        \
      paceline_rows_combine_##name(const __grid_constant__ RowsCombine argument) { \
    combine<Wire, To>(argument);                                                   \
  }

PACELINE_ROWS(f32_f32, F32, F32)
PACELINE_ROWS(f16_f16, F16, F16)
PACELINE_ROWS(bf16_bf16, BF16, BF16)
PACELINE_ROWS(f32_f16, F32, F16)
PACELINE_ROWS(bf16_f16, BF16, F16)
PACELINE_ROWS(f32_bf16, F32, BF16)
PACELINE_ROWS_BACK(f32_f32, F32, F32)
PACELINE_ROWS_BACK(f16_f16, F16, F16)
PACELINE_ROWS_BACK(bf16_bf16, BF16, BF16)
PACELINE_ROWS_BACK(f16_f32, F16, F32)
PACELINE_ROWS_BACK(f16_bf16, F16, BF16)
PACELINE_ROWS_BACK(bf16_f32, BF16, F32)

}  // namespace paceline::device::cuda
