// The codec's share of a step, alone: what one rank encodes and decodes when `elements` gradients
// are reduced among `nodes`, without any transfer. Start one process per rank at the same time
// (`paceline lab --loopback`), so that they share the machine as they do in training.
//
//   paceline-codec-alone fp16|topk ELEMENTS NODES
//
// Prints "median seconds S". fp16 as a ring takes it: N-1 chunks encoded and N-1 added on the way
// round, one encoded and N-1 decoded on the way back. top-k: one encoding of everything, N added.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "codec/codec.h"

namespace {

using Clock = std::chrono::steady_clock;
namespace codec = paceline::codec;
constexpr uint64_t kBucket = uint64_t{1} << 20;  // 4 MiB of float32, as under DDP

struct Work {
  paceline::plan::CodecSpec spec;
  uint64_t nodes;
  std::vector<float> fresh, gradient, residual, residual_after, sum;
  std::vector<std::byte> encoded;
};

void step_dense(Work& w) {
  auto chunk = w.gradient.size() / w.nodes;
  for (uint64_t i = 0; i < w.nodes; ++i) {
    std::span<float> piece(w.gradient.data() + i * chunk, chunk);
    codec::encode_dense(w.spec, piece, w.encoded.data());
    if (i + 1 == w.nodes) break;
    std::span<float> target(w.sum.data() + i * chunk, chunk);
    codec::decode_reduce_dense(w.spec, paceline::ReduceOp::kSum, w.encoded.data(), target);
    codec::decode_dense(w.spec, w.encoded.data(), target);
  }
}

bool step_topk(Work& w) {
  codec::ResidualRun run{w.residual.data(), w.residual_after.data(), w.gradient.size()};
  auto sent = codec::encode_topk_clearing(w.spec, w.gradient, std::span(&run, 1), w.encoded.data());
  for (uint64_t i = 0; i < w.nodes; ++i) {
    auto added = codec::decode_add_topk(std::span(w.encoded.data(), sent.bytes), w.gradient);
    if (!added.is_ok()) return false;
  }
  std::swap(w.residual, w.residual_after);
  return true;
}

std::vector<Work> make_buckets(const paceline::plan::CodecSpec& spec, uint64_t elements,
                               uint64_t nodes) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0, 1e-3F);
  std::vector<Work> buckets;
  for (uint64_t at = 0; at < elements; at += kBucket) {
    auto n = std::min(kBucket, elements - at);
    Work w{spec,
           nodes,
           std::vector<float>(n),
           std::vector<float>(n),
           std::vector<float>(n),
           std::vector<float>(n),
           std::vector<float>(n),
           {}};
    for (auto& v : w.fresh) v = normal(random);
    w.encoded.resize(codec::encoded_bytes(spec, paceline::DType::kFloat32, n));
    buckets.push_back(std::move(w));
  }
  return buckets;
}

}  // namespace

int main(int argc, char** argv) try {
  std::string name = argc == 4 ? argv[1] : "";
  auto elements = argc == 4 ? std::strtoull(argv[2], nullptr, 10) : 0;
  auto nodes = argc == 4 ? std::strtoull(argv[3], nullptr, 10) : 0;
  if ((name != "fp16" && name != "topk") || elements == 0 || nodes == 0) {
    std::fputs("usage: paceline-codec-alone fp16|topk ELEMENTS NODES\n", stderr);
    return 2;
  }
  paceline::plan::CodecSpec spec;
  spec.codec = name == "fp16" ? paceline::plan::Codec::kFp16 : paceline::plan::Codec::kTopK;
  auto buckets = make_buckets(spec, elements, nodes);
  std::vector<double> times;
  auto until = Clock::now() + std::chrono::seconds(3);
  while (Clock::now() < until || times.size() < 5) {
    double seconds = 0;
    for (auto& bucket : buckets) {
      bucket.gradient = bucket.fresh;  // the backward pass's work
      auto started = Clock::now();
      if (name == "fp16") {
        step_dense(bucket);
      } else if (!step_topk(bucket)) {
        std::fputs("decoding failed\n", stderr);
        return 1;
      }
      seconds += std::chrono::duration<double>(Clock::now() - started).count();
    }
    times.push_back(seconds);
  }
  std::sort(times.begin(), times.end());
  fmt::print("median seconds {:.6f}\n", times[times.size() / 2]);
  return 0;
} catch (const std::exception& error) {
  std::fputs(error.what(), stderr);
  return 1;
}
