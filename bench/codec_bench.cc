// Codecs against the memory they pass over.
//
// Each benchmark's iteration measures a reference and the codec in turn, so that other load on the machine meets both,
// in thread processor time, and reports medians: `ratio` is the median over iterations of codec time / reference time. The reference of top-k is one read of
// the buffer (a vector sum), that of the casts a memcpy of the float32 bytes.
//
//   codec_bench                                      all
//   codec_bench --benchmark_filter=topk/100M_fp32    the yardstick: at most 4
#include <benchmark/benchmark.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

#include "codec/codec.h"
#include "codec/residual_store.h"
#include "device/cpu/kernels.h"

namespace paceline {
namespace {

/// Seconds of processor time of this thread: everything here runs on one thread, and other processes may share its core.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

template <class Fn>
double timed(Fn fn) {
  const double start = thread_seconds();
  fn();
  return thread_seconds() - start;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Pairs of (reference, measured) seconds, in turn.
class Ratio {
 public:
  void add(double reference, double measured) {
    ratios_.push_back(measured / reference);
    references_.push_back(reference);
    measured_.push_back(measured);
  }
  void report(benchmark::State& state, double bytes) const {
    state.counters["ratio"] = median(ratios_);
    state.counters["reference_ms"] = median(references_) * 1e3;
    state.counters["measured_ms"] = median(measured_) * 1e3;
    state.counters["reference_GB/s"] = bytes / median(references_) * 1e-9;
    state.SetLabel(cpu::simd_target());
  }

 private:
  std::vector<double> ratios_, references_, measured_;
};

/// Reads every byte once, as fast as this processor can: the sum of the 64-bit words, which no compiler can leave out.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("default", "avx2", "avx512f"), optimize("O3")))
#endif
uint64_t
read_once(const std::vector<float>& buffer) {
  uint64_t sums[8] = {};
  const std::size_t words = buffer.size() / 2 / 8 * 8;
  const auto* p = reinterpret_cast<const char*>(buffer.data());
  for (std::size_t i = 0; i < words; i += 8) {
    uint64_t line[8];
    std::memcpy(line, p + i * 8, sizeof(line));
    for (int j = 0; j < 8; ++j) sums[j] += line[j];
  }
  uint64_t total = 0;
  for (const uint64_t s : sums) total += s;
  return total;
}

void fill_normal(std::vector<float>& values, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0F, 1e-3F);
  std::vector<float> pool(1U << 20);
  for (auto& x : pool) x = normal(random);
  // A fresh rotation of the pool and a fresh scale a stretch: as good as random for what is measured here, and quick.
  for (std::size_t at = 0; at < values.size(); at += 4096) {
    const std::size_t from = random() % (pool.size() - 4096);
    std::memcpy(values.data() + at, pool.data() + from,
                std::min<std::size_t>(4096, values.size() - at) * sizeof(float));
  }
}

void topk(benchmark::State& state, std::size_t elements, double ratio, bool fp16) {
  plan::CodecSpec spec;
  spec.codec = plan::Codec::kTopK;
  spec.ratio = ratio;
  spec.fp16_values = fp16;
  std::vector<float> gradient(elements);
  fill_normal(gradient, 1);
  codec::ResidualStore store;
  const codec::ResidualRange range{1, 0, elements};
  std::vector<std::byte> encoded(codec::encoded_bytes(spec, DType::kFloat32, elements));
  std::vector<codec::ResidualRun> runs;
  codec::EncodedTopK result;
  const auto encode = [&] {
    runs.clear();
    if (!store.runs({&range, 1}, 0, elements, runs).is_ok()) std::abort();
    result = codec::encode_topk(spec, gradient, runs, encoded.data());
    store.commit();
  };
  for (int i = 0; i < 2; ++i) encode();  // both planes get their pages
  Ratio ratio_of;
  while (state.KeepRunning()) {
    const double read = timed([&] { benchmark::DoNotOptimize(read_once(gradient)); });
    ratio_of.add(read, timed(encode));
  }
  ratio_of.report(state, static_cast<double>(elements) * 4);
  state.counters["kept/k"] =
      static_cast<double>(result.kept) / static_cast<double>(codec::top_k_count(spec, elements));
  state.counters["bytes/entry"] =
      static_cast<double>(result.bytes) / static_cast<double>(result.kept);
}

// A node of two: the other rank's gradient added within the pass; the reference adds it ahead, in pieces as it would
// arrive. The scale of the sum differs between the two, by what repeated adding makes of it: top-k doesn't mind.
void topk_of_two(benchmark::State& state, std::size_t elements, double ratio) {
  constexpr std::size_t kArriving = 128 * 1024;
  plan::CodecSpec spec;
  spec.codec = plan::Codec::kTopK;
  spec.ratio = ratio;
  std::vector<float> gradient(elements), other(elements);
  fill_normal(gradient, 1);
  fill_normal(other, 2);
  codec::ResidualStore store;
  const codec::ResidualRange range{1, 0, elements};
  std::vector<std::byte> encoded(codec::encoded_bytes(spec, DType::kFloat32, elements));
  std::vector<codec::ResidualRun> runs;
  const auto encode = [&](std::span<const codec::Addend> addends) {
    runs.clear();
    if (!store.runs({&range, 1}, 0, elements, runs).is_ok()) std::abort();
    codec::encode_topk(spec, gradient, runs, encoded.data(), nullptr, addends);
    store.commit();
  };
  const auto ahead = [&] {
    for (std::size_t at = 0; at < elements; at += kArriving)
      cpu::reduce(DType::kFloat32, ReduceOp::kSum, gradient.data() + at, other.data() + at,
                  std::min(kArriving, elements - at));
    encode({});
  };
  const codec::Addend addend{other.data(), 0, elements};
  for (int i = 0; i < 2; ++i) encode({});
  Ratio ratio_of;
  while (state.KeepRunning()) {
    const double reference = timed(ahead);
    ratio_of.add(reference, timed([&] { encode({&addend, 1}); }));
  }
  ratio_of.report(state, static_cast<double>(elements) * 4);
}

// The sum of four ranks' encodings, each of other entries.
void topk_decode_sum(benchmark::State& state, std::size_t elements, double ratio) {
  constexpr unsigned kRanks = 4;
  plan::CodecSpec spec;
  spec.codec = plan::Codec::kTopK;
  spec.ratio = ratio;
  spec.fp16_values = true;
  std::vector<float> gradient(elements), sum(elements);
  std::vector<std::vector<std::byte>> encoded(kRanks);
  std::vector<std::span<const std::byte>> encodings;
  {
    std::vector<float> zero(elements), after(elements);
    const codec::ResidualRun run{zero.data(), after.data(), elements};
    for (unsigned rank = 0; rank < kRanks; ++rank) {
      fill_normal(gradient, rank + 1);
      encoded[rank].resize(codec::encoded_bytes(spec, DType::kFloat32, elements));
      const auto result = codec::encode_topk(spec, gradient, {&run, 1}, encoded[rank].data());
      encodings.emplace_back(encoded[rank].data(), result.bytes);
    }
  }
  Ratio ratio_of;
  while (state.KeepRunning()) {
    const double read = timed([&] { benchmark::DoNotOptimize(read_once(gradient)); });
    ratio_of.add(read, timed([&] {
                   if (!codec::decode_sum_topk(encodings, sum, kRanks).is_ok()) std::abort();
                 }));
  }
  ratio_of.report(state, static_cast<double>(elements) * 4);
}

enum class Dense { kEncode, kDecode, kDecodeReduce };

void dense(benchmark::State& state, Dense what, plan::Codec codec, double scale,
           std::size_t elements) {
  plan::CodecSpec spec;
  spec.codec = codec;
  spec.scale = scale;
  std::vector<float> values(elements), other(elements), copy(elements);
  fill_normal(values, 2);
  std::vector<std::byte> wire(codec::encoded_bytes(spec, DType::kFloat32, elements));
  codec::encode_dense(spec, values, wire.data());
  Ratio ratio_of;
  while (state.KeepRunning()) {
    const double reference = timed([&] {
      std::memcpy(copy.data(), values.data(), elements * sizeof(float));
      benchmark::ClobberMemory();
    });
    ratio_of.add(reference, timed([&] {
                   if (what == Dense::kEncode) codec::encode_dense(spec, values, wire.data());
                   if (what == Dense::kDecode) codec::decode_dense(spec, wire.data(), other);
                   if (what == Dense::kDecodeReduce)
                     codec::decode_reduce_dense(spec, ReduceOp::kSum, wire.data(), other);
                 }));
  }
  ratio_of.report(state, static_cast<double>(elements) * 4);
}

void reduce(benchmark::State& state, DType dtype, std::size_t bytes) {
  std::vector<std::byte> a(bytes), b(bytes), copy(bytes);
  Ratio ratio_of;
  while (state.KeepRunning()) {
    const double reference = timed([&] {
      std::memcpy(copy.data(), b.data(), bytes);
      benchmark::ClobberMemory();
    });
    ratio_of.add(reference, timed([&] {
                   cpu::reduce(dtype, ReduceOp::kSum, a.data(), b.data(),
                               bytes / dtype_size(dtype));
                 }));
  }
  ratio_of.report(state, static_cast<double>(bytes));
}

void copy(benchmark::State& state, std::size_t bytes) {
  std::vector<std::byte> a(bytes), b(bytes);
  Ratio ratio_of;
  while (state.KeepRunning()) {
    const double reference = timed([&] {
      std::memcpy(a.data(), b.data(), bytes);
      benchmark::ClobberMemory();
    });
    ratio_of.add(reference, timed([&] { cpu::copy(a.data(), b.data(), bytes); }));
  }
  ratio_of.report(state, static_cast<double>(bytes));
}

constexpr std::size_t kPiece = 128 * 1024;   ///< elements of a 512 KiB piece: in the cache
constexpr std::size_t kBucket = 16'000'000;  ///< a large bucket: in memory

BENCHMARK_CAPTURE(topk, 100M_fp32, 100'000'000, 0.01, false)
    ->Iterations(15)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(topk_of_two, 4M, 4'194'304, 0.01)->Iterations(60)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(topk, 100M_fp16, 100'000'000, 0.01, true)
    ->Iterations(15)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(topk, 100M_fp16_permille, 100'000'000, 0.001, true)
    ->Iterations(15)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(topk, 6M_fp16, 6'250'000, 0.01, true)
    ->Iterations(60)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(topk, 1M_fp16, 1'000'000, 0.01, true)
    ->Iterations(200)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(topk_decode_sum, 100M, 100'000'000, 0.01)
    ->Iterations(15)
    ->Unit(benchmark::kMillisecond);

BENCHMARK_CAPTURE(dense, fp16_encode_piece, Dense::kEncode, plan::Codec::kFp16, 1.0, kPiece);
BENCHMARK_CAPTURE(dense, fp16_encode_scaled_piece, Dense::kEncode, plan::Codec::kFp16, 10.0,
                  kPiece);
BENCHMARK_CAPTURE(dense, fp16_decode_piece, Dense::kDecode, plan::Codec::kFp16, 1.0, kPiece);
BENCHMARK_CAPTURE(dense, fp16_decode_reduce_piece, Dense::kDecodeReduce, plan::Codec::kFp16, 1.0,
                  kPiece);
BENCHMARK_CAPTURE(dense, fp16_decode_reduce_scaled_piece, Dense::kDecodeReduce, plan::Codec::kFp16,
                  10.0, kPiece);
BENCHMARK_CAPTURE(dense, bf16_encode_piece, Dense::kEncode, plan::Codec::kBf16, 1.0, kPiece);
BENCHMARK_CAPTURE(dense, bf16_decode_reduce_piece, Dense::kDecodeReduce, plan::Codec::kBf16, 1.0,
                  kPiece);
BENCHMARK_CAPTURE(dense, fp16_encode_bucket, Dense::kEncode, plan::Codec::kFp16, 1.0, kBucket)
    ->Iterations(30);
BENCHMARK_CAPTURE(dense, fp16_decode_reduce_bucket, Dense::kDecodeReduce, plan::Codec::kFp16, 1.0,
                  kBucket)
    ->Iterations(30);

BENCHMARK_CAPTURE(reduce, float32_piece, DType::kFloat32, kPiece * 4);
BENCHMARK_CAPTURE(reduce, float16_piece, DType::kFloat16, kPiece * 4);
BENCHMARK_CAPTURE(reduce, bfloat16_piece, DType::kBFloat16, kPiece * 4);
BENCHMARK_CAPTURE(reduce, float32_bucket, DType::kFloat32, kBucket * 4)->Iterations(30);
BENCHMARK_CAPTURE(copy, 64MiB, std::size_t{64} << 20)->Iterations(40);
BENCHMARK_CAPTURE(copy, 16MiB, std::size_t{16} << 20)->Iterations(100);

}  // namespace
}  // namespace paceline

BENCHMARK_MAIN();
