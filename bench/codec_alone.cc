// The codec's share of a step, alone: what one rank encodes and decodes when `elements` gradients
// are reduced among NODES nodes of SLOTS ranks, without any transfer. Start one process per rank,
// so that they share the machine as they do in training, and ask all at the same time.
//
//   paceline-codec-alone fp16|topk ELEMENTS NODES SLOTS
//
// For every line of its standard input, a number of steps, it takes so many and prints the seconds
// of one, their mean.
//
// PACELINE_CODEC_THREADS and PACELINE_TOPK_FP16 as in a job, top-k's buckets too: 4 MiB, 32 where a rank has less than two cores.
// A rank encodes its share of the node's sum, ELEMENTS / SLOTS. fp16 as a
// ring takes it: N-1 chunks encoded and N-1 added on the way round, one encoded and N-1 decoded on
// the way back. top-k: one encoding of the share, with the last neighbour's gradient where a node has several ranks (a
// pass that the encoder makes of its own), and the sum of N encodings for every rank's share.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/cores.h"
#include "base/workers.h"
#include "codec/codec.h"

namespace {

using Clock = std::chrono::steady_clock;
namespace codec = paceline::codec;
// Elements of a DDP bucket: 4 MiB of float32, top-k's 32 where cores are few (python/paceline/_torch/buckets.py).
constexpr uint64_t kBucket = uint64_t{1} << 20;
constexpr uint64_t kSparseBucket = uint64_t{8} << 20;

/// A bucket as one rank sees it.
struct Work {
  paceline::plan::CodecSpec spec;
  uint64_t nodes;
  std::vector<float> fresh, gradient;  ///< of the whole bucket
  std::vector<float> neighbour;        ///< a neighbour's gradient, of this rank's share
  std::vector<float> residual, residual_after, sum;  ///< of this rank's share
  std::vector<std::byte> encoded;
  std::vector<std::vector<std::byte>> others;  ///< top-k: slots × nodes, the own one is not used

  [[nodiscard]] uint64_t share() const { return residual.size(); }
};

void step_dense(Work& w) {
  auto chunk = w.share() / w.nodes;
  for (uint64_t i = 0; i < w.nodes; ++i) {
    std::span<float> piece(w.gradient.data() + i * chunk, chunk);
    codec::encode_dense(w.spec, piece, w.encoded.data());
    if (i + 1 == w.nodes) break;
    std::span<float> target(w.sum.data() + i * chunk, chunk);
    codec::decode_reduce_dense(w.spec, paceline::ReduceOp::kSum, w.encoded.data(), target);
    codec::decode_dense(w.spec, w.encoded.data(), target);
  }
}

bool step_topk(Work& w, paceline::Workers& workers) {
  const uint64_t share = w.share();
  codec::ResidualRun run{w.residual.data(), w.residual_after.data(), share};
  const codec::Addend addend{w.neighbour.data(), 0, w.neighbour.size()};
  auto sent =
      codec::encode_topk(w.spec, {w.gradient.data(), share}, std::span(&run, 1), w.encoded.data(),
                         &workers, {&addend, w.neighbour.empty() ? std::size_t{0} : 1});
  std::swap(w.residual, w.residual_after);
  std::vector<std::span<const std::byte>> encodings(w.nodes);
  for (uint64_t slot = 0; (slot + 1) * share <= w.gradient.size(); ++slot) {
    for (uint64_t i = 0; i < w.nodes; ++i) encodings[i] = w.others[slot * w.nodes + i];
    if (slot == 0) encodings[0] = {w.encoded.data(), sent.bytes};
    std::span<float> sum(w.gradient.data() + slot * share, share);
    if (!codec::decode_sum_topk(encodings, sum, static_cast<double>(w.nodes), &workers).is_ok())
      return false;
  }
  return true;
}

/// What other ranks have sent: other entries than this rank's.
std::vector<std::vector<std::byte>> encodings_of_others(const Work& w, uint64_t count,
                                                        std::mt19937_64& random) {
  std::vector<float> gradient(w.share()), zeros(w.share()), rest(w.share());
  std::normal_distribution<float> normal(0, 1e-3F);
  codec::ResidualRun run{zeros.data(), rest.data(), w.share()};
  std::vector<std::vector<std::byte>> out(count);
  for (auto& bytes : out) {
    for (auto& v : gradient) v = normal(random);
    bytes.resize(codec::encoded_bytes(w.spec, paceline::DType::kFloat32, w.share()));
    bytes.resize(codec::encode_topk(w.spec, gradient, std::span(&run, 1), bytes.data()).bytes);
  }
  return out;
}

std::vector<Work> make_buckets(const paceline::plan::CodecSpec& spec, uint64_t elements,
                               uint64_t nodes, uint64_t slots, int cores) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0, 1e-3F);
  std::vector<Work> buckets;
  const bool sparse = spec.codec == paceline::plan::Codec::kTopK;
  const bool few = static_cast<uint64_t>(cores) < 2 * nodes * slots;
  const uint64_t most = sparse && few ? kSparseBucket : kBucket;
  for (uint64_t at = 0; at < elements; at += most) {
    auto share = std::min(most, elements - at) / slots;
    Work w{spec, nodes, {}, {}, {}, {}, {}, {}, {}, {}};
    w.fresh.resize(share * slots);
    for (auto& v : w.fresh) v = normal(random);
    w.gradient = w.fresh;
    w.residual.resize(share);
    w.residual_after.resize(share);
    w.sum.resize(share);
    w.encoded.resize(codec::encoded_bytes(spec, paceline::DType::kFloat32, share));
    if (sparse && slots > 1)
      w.neighbour.assign(w.fresh.end() - static_cast<std::ptrdiff_t>(share), w.fresh.end());
    if (sparse) w.others = encodings_of_others(w, slots * nodes, random);
    buckets.push_back(std::move(w));
  }
  return buckets;
}

/// Seconds of a step's encoding and decoding; negative when what was encoded can't be decoded.
double step(bool sparse, std::vector<Work>& buckets, paceline::Workers& workers) {
  double seconds = 0;
  for (auto& bucket : buckets) {
    bucket.gradient = bucket.fresh;  // the backward pass's work
    auto started = Clock::now();
    if (!sparse) {
      step_dense(bucket);
    } else if (!step_topk(bucket, workers)) {
      return -1;
    }
    seconds += std::chrono::duration<double>(Clock::now() - started).count();
  }
  return seconds;
}

}  // namespace

int main(int argc, char** argv) try {
  std::string name = argc == 5 ? argv[1] : "";
  auto number = [&](int i) { return argc == 5 ? std::strtoull(argv[i], nullptr, 10) : 0; };
  auto elements = number(2), nodes = number(3), slots = number(4);
  if ((name != "fp16" && name != "topk") || elements == 0 || nodes == 0 || slots == 0) {
    std::fputs("usage: paceline-codec-alone fp16|topk ELEMENTS NODES SLOTS\n", stderr);
    return 2;
  }
  paceline::plan::CodecSpec spec;
  spec.codec = name == "fp16" ? paceline::plan::Codec::kFp16 : paceline::plan::Codec::kTopK;
  const char* halves = std::getenv("PACELINE_TOPK_FP16");
  spec.fp16_values = halves != nullptr && std::string(halves) == "1";
  // As many threads as a rank of the job has (src/capi/options.cc).
  const char* asked = std::getenv("PACELINE_CODEC_THREADS");
  const int cores = paceline::usable_cores();
  paceline::Workers workers(
      asked != nullptr && std::atoi(asked) > 0
          ? std::atoi(asked)
          : paceline::fitting_codec_threads(static_cast<int>(nodes * slots), cores, cores));
  auto buckets = make_buckets(spec, elements, nodes, slots, cores);
  for (int steps = 0; std::cin >> steps && steps > 0;) {
    double sum = 0;
    for (int i = 0; i < steps; ++i) {
      const double seconds = step(name == "topk", buckets, workers);
      if (seconds < 0) {
        std::fputs("decoding failed\n", stderr);
        return 1;
      }
      sum += seconds;
    }
    fmt::print("{:.6f}\n", sum / steps);
    std::fflush(stdout);
  }
  return 0;
} catch (const std::exception& error) {
  std::fputs(error.what(), stderr);
  return 1;
}
