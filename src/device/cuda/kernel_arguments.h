// What host and device share: the kernels' names, their one argument each, and the constants of the formats.
//
// A kernel takes one struct by value. Pointers are 64-bit numbers, so that the same struct serves the device and the
// reference. Included by nvcc too: plain C++17, no other header of the project.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PACELINE_ON_BOTH __host__ __device__
#else
#define PACELINE_ON_BOTH
#endif

namespace paceline::device::cuda {

inline constexpr uint32_t kSourceLimit = 256;
inline constexpr uint32_t kAddendLimit = 15;

/// Elements whose entries lie together in a top-k encoding; their offsets fit 16 bits.
inline constexpr uint32_t kTopKTile = 4096;
/// Elements that share a scale in an int8 encoding.
inline constexpr uint32_t kInt8Block = 512;

// Top-k's threshold is read off a sample by two histograms over the bits of |v|: the upper 12, then the next 12.
inline constexpr uint32_t kBins = 4096;
inline constexpr uint32_t kCoarseShift = 19;
inline constexpr uint32_t kFineShift = 7;
/// Elements sampled side by side: 64 bytes of float32, what memory hands out at once.
inline constexpr uint32_t kSampleChunk = 16;

// Shapes of the launches.
inline constexpr uint32_t kDenseThreads = 256;
inline constexpr uint32_t kDenseTile = 4096;   ///< elements that a block takes at a time
inline constexpr uint32_t kDenseBlocks = 32;   ///< at most, per multiprocessor
inline constexpr uint32_t kInt8Threads = 256;  ///< a warp takes a block of elements
inline constexpr uint32_t kSampleThreads = 512;
inline constexpr uint32_t kTopKThreads = 256;    ///< a block takes a tile
inline constexpr uint32_t kGatherThreads = 128;  ///< a warp takes a tile
inline constexpr uint32_t kTopKCombineThreads = 256;
inline constexpr uint32_t kCombineTiles = 2;  ///< a block's
/// Entries that a tile may hand from select to gather; it has them in shared memory meanwhile.
inline constexpr uint32_t kMostSlot = 1024;

using Address = uint64_t;

struct DenseEncode {
  Address gradient, encoded, report;
  uint64_t elements;
  float scale;
};

struct DenseCombine {
  Address output;
  uint64_t elements;
  float scale;
  uint32_t sources;
  Address encoded[kSourceLimit];
};

struct Int8Encode {
  Address gradient, residual, next_residual, report;
  Address scales, values;  ///< of the encoding
  uint64_t elements;
  float scale;
};

struct Int8Combine {
  Address output;
  uint64_t elements;
  uint64_t values_offset;  ///< in an encoding; its scales come first
  float scale;
  uint32_t sources;
  Address encoded[kSourceLimit];
};

/// The head of EncodeArguments::state. Behind it lie, from select to gather: the sums of groups of kTileGroup tiles, the
/// tiles' counts (kNoSlot set: the tile has no slot), and a slot of `slot` offsets and values per tile.
struct TopKState {
  uint32_t coarse_bin;   ///< the coarse bin that holds the threshold
  uint32_t coarse_rank;  ///< which of that bin's samples, counted from the largest, from 1
  uint32_t threshold;    ///< bits of |v|: what is at least this large is sent
  uint32_t coarse_done, fine_done;  ///< blocks that have finished
  uint32_t unused[3];
  uint32_t coarse[kBins], fine[kBins];
};
inline constexpr uint32_t kTileGroup = 128;
inline constexpr uint32_t kNoSlot = 0x80000000U;

struct TopK {
  Address gradient, residual, next_residual, velocity, next_velocity, report;
  Address state, groups, counts, slot_offsets, slot_values;  ///< the last four lie in the state
  Address starts, exponents, offsets, values, end;           ///< of the encoding
  uint64_t elements;
  uint32_t entries;  ///< at most
  uint32_t tiles;
  uint32_t slot;  ///< entries
  float scale, momentum;
  uint32_t fp16_values;
  uint32_t sample_chunks, sample_step;  ///< one chunk in every `sample_step` chunks
  uint32_t sample_rank;                 ///< the threshold is the sample's so many-th largest
  uint32_t addend_count;
  Address addends[kAddendLimit];  ///< added to the gradient first
};

struct TopKCombine {
  Address output, report;
  uint64_t elements;
  uint64_t exponents_offset, offsets_offset, values_offset;
  uint32_t entries, tiles;
  float scale;
  uint32_t fp16_values;
  uint32_t sources;
  Address encoded[kSourceLimit];
};

struct RowsEncode {
  Address gradient, flags, encoded, report;  ///< flags: a byte per row
  uint64_t rows, row_elements, capacity;
  uint64_t row_bytes;  ///< of the encoding; a multiple of 16
  float scale;
};

struct RowsCombine {
  Address output;
  uint64_t rows, row_elements, capacity, row_bytes;
  float scale;
  uint32_t sources;
  Address encoded[kSourceLimit];
};

inline constexpr uint32_t kRowThreads = 256;    ///< a warp takes a row
inline constexpr uint32_t kListThreads = 1024;  ///< one block
inline constexpr uint32_t kRowHead = 16;        ///< bytes before the list of rows
/// Where the values of an encoding of `used` rows begin.
PACELINE_ON_BOTH constexpr uint64_t row_values(uint64_t used) {
  return kRowHead + (used * sizeof(uint32_t) + 15) / 16 * 16;
}

/// Copies between segments. A block moves kCopyBytes of one of them; `first` holds the number of each one's first block.
inline constexpr uint32_t kCopyThreads = 256;
inline constexpr uint32_t kCopyBytes = 32768;
inline constexpr uint32_t kCopySegments = 128;
struct CopySegments {
  uint32_t segments;
  uint32_t first[kCopySegments + 1];
  Address from[kCopySegments], to[kCopySegments];
  uint64_t bytes[kCopySegments];
};

/// The chunk that stands for the `index`-th group of `step` chunks: pseudo-random, so that no period of the gradient
/// meets it, and the same in every step.
PACELINE_ON_BOTH constexpr uint32_t sampled_chunk(uint32_t index, uint32_t step) {
  uint32_t hash = index * 0x9E3779B1U;
  hash ^= hash >> 15;
  hash *= 0x85EBCA77U;
  hash ^= hash >> 13;
  return index * step + hash % step;
}

/// X(name, argument). `paceline_` + name is the kernel's name in the device code.
#define PACELINE_DENSE_KERNELS(X)   \
  X(encode_f32_f32, DenseEncode)    \
  X(encode_f32_f16, DenseEncode)    \
  X(encode_f32_bf16, DenseEncode)   \
  X(encode_f16_f16, DenseEncode)    \
  X(encode_f16_bf16, DenseEncode)   \
  X(encode_bf16_f16, DenseEncode)   \
  X(encode_bf16_bf16, DenseEncode)  \
  X(combine_f32_f32, DenseCombine)  \
  X(combine_f16_f32, DenseCombine)  \
  X(combine_bf16_f32, DenseCombine) \
  X(combine_f16_f16, DenseCombine)  \
  X(combine_bf16_f16, DenseCombine) \
  X(combine_f16_bf16, DenseCombine) \
  X(combine_bf16_bf16, DenseCombine)
#define PACELINE_INT8_KERNELS(X)   \
  X(int8_encode_f32, Int8Encode)   \
  X(int8_encode_f16, Int8Encode)   \
  X(int8_encode_bf16, Int8Encode)  \
  X(int8_combine_f32, Int8Combine) \
  X(int8_combine_f16, Int8Combine) \
  X(int8_combine_bf16, Int8Combine)
#define PACELINE_TOPK_KERNELS(X)   \
  X(topk_coarse_f32, TopK)         \
  X(topk_coarse_f16, TopK)         \
  X(topk_coarse_bf16, TopK)        \
  X(topk_fine_f32, TopK)           \
  X(topk_fine_f16, TopK)           \
  X(topk_fine_bf16, TopK)          \
  X(topk_select_f32, TopK)         \
  X(topk_select_f16, TopK)         \
  X(topk_select_bf16, TopK)        \
  X(topk_select_sum_f32, TopK)     \
  X(topk_select_sum_f16, TopK)     \
  X(topk_select_sum_bf16, TopK)    \
  X(topk_momentum_f32, TopK)       \
  X(topk_momentum_f16, TopK)       \
  X(topk_momentum_bf16, TopK)      \
  X(topk_momentum_sum_f32, TopK)   \
  X(topk_momentum_sum_f16, TopK)   \
  X(topk_momentum_sum_bf16, TopK)  \
  X(topk_gather_f32, TopK)         \
  X(topk_gather_f16, TopK)         \
  X(topk_gather_bf16, TopK)        \
  X(topk_combine_f32, TopKCombine) \
  X(topk_combine_f16, TopKCombine) \
  X(topk_combine_bf16, TopKCombine)
#define PACELINE_TENSOR_KERNELS(X)       \
  X(rows_flag_32, RowsEncode)            \
  X(rows_flag_16, RowsEncode)            \
  X(rows_list, RowsEncode)               \
  X(rows_encode_f32_f32, RowsEncode)     \
  X(rows_encode_f16_f16, RowsEncode)     \
  X(rows_encode_bf16_bf16, RowsEncode)   \
  X(rows_encode_f32_f16, RowsEncode)     \
  X(rows_encode_bf16_f16, RowsEncode)    \
  X(rows_encode_f32_bf16, RowsEncode)    \
  X(rows_combine_f32_f32, RowsCombine)   \
  X(rows_combine_f16_f16, RowsCombine)   \
  X(rows_combine_bf16_bf16, RowsCombine) \
  X(rows_combine_f16_f32, RowsCombine)   \
  X(rows_combine_f16_bf16, RowsCombine)  \
  X(rows_combine_bf16_f32, RowsCombine)  \
  X(copy_segments, CopySegments)
#define PACELINE_KERNELS(X) \
  PACELINE_DENSE_KERNELS(X) \
  PACELINE_INT8_KERNELS(X)  \
  PACELINE_TOPK_KERNELS(X)  \
  PACELINE_TENSOR_KERNELS(X)

enum class KernelId : int {
#define PACELINE_KERNEL_ID(name, argument) name,
  PACELINE_KERNELS(PACELINE_KERNEL_ID)
#undef PACELINE_KERNEL_ID
};

inline constexpr const char* kKernelNames[] = {
#define PACELINE_KERNEL_NAME(name, argument) "paceline_" #name,
    PACELINE_KERNELS(PACELINE_KERNEL_NAME)
#undef PACELINE_KERNEL_NAME
};
/// The source file that a kernel is in, without .cu.
inline constexpr const char* kKernelFiles[] = {
#define PACELINE_KERNEL_FILE(name, argument) "dense",
    PACELINE_DENSE_KERNELS(PACELINE_KERNEL_FILE)
#undef PACELINE_KERNEL_FILE
#define PACELINE_KERNEL_FILE(name, argument) "int8",
        PACELINE_INT8_KERNELS(PACELINE_KERNEL_FILE)
#undef PACELINE_KERNEL_FILE
#define PACELINE_KERNEL_FILE(name, argument) "topk",
            PACELINE_TOPK_KERNELS(PACELINE_KERNEL_FILE)
#undef PACELINE_KERNEL_FILE
#define PACELINE_KERNEL_FILE(name, argument) "tensors",
                PACELINE_TENSOR_KERNELS(PACELINE_KERNEL_FILE)
#undef PACELINE_KERNEL_FILE
};
inline constexpr int kKernelCount = sizeof(kKernelNames) / sizeof(kKernelNames[0]);

}  // namespace paceline::device::cuda
