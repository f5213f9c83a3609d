#include "cli/bench/workload.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "capi/handle.h"
#include "capi/options.h"
#include "device/cpu/casts.h"

namespace paceline::bench {
namespace {

constexpr int kAllReduce = 0, kBroadcast = 1, kAllGather = 2, kReduceScatter = 3, kAllToAll = 4;

// Addresses of buffers that are not made.
std::byte stand_ins[2];

// SplitMix64's finaliser (G. L. Steele, D. Lea and C. H. Flood, 2014).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

template <class T>
void store(std::byte* to, uint64_t index, T value) {
  std::memcpy(to + index * sizeof(T), &value, sizeof(T));
}
template <class T>
T load(const std::byte* from, uint64_t index) {
  T value;
  std::memcpy(&value, from + index * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

Result<Memory> Memory::make(paceline_comm* comm, std::size_t bytes, Kind kind) {
  Memory m;
  m.comm_ = comm;
  m.bytes_ = bytes;
  m.kind_ = kind;
  const bool shared = kind == Kind::kShared;
  std::size_t rounded = (std::max<std::size_t>(bytes, 1) + 4095) / 4096 * 4096;
  m.data_ = static_cast<std::byte*>(shared ? paceline_alloc(comm, rounded)
                                           : std::aligned_alloc(4096, rounded));
  const auto none = [&](const char* what, bool why) {
    return Status(Code::kResourceExhausted,
                  fmt::format("no {} memory for {} bytes{}{}", what, bytes, why ? ": " : "",
                              why ? paceline_error(comm) : ""));
  };
  if (m.data_ == nullptr) return none(shared ? "shared" : "private", shared);
  std::memset(m.data_, 0, rounded);
  if (kind == Kind::kExchanged && paceline_share(comm, m.data_, rounded) != PACELINE_OK) {
    m.kind_ = Kind::kPrivate;
    return none("shared", true);
  }
  return m;
}

Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }
Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(comm_, other.comm_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(kind_, other.kind_);
  return *this;
}
Memory::~Memory() {
  if (data_ == nullptr) return;
  if (kind_ == Kind::kShared) {
    paceline_free(comm_, data_);
    return;
  }
  // If they stay others' too, its pages are never to be used again.
  if (kind_ != Kind::kExchanged || paceline_unshare(comm_, data_) == PACELINE_OK) std::free(data_);
}

Workload Workload::outline(paceline_comm* comm, const paceline_identity& who,
                           const Options& options, uint64_t bytes) {
  Workload w;
  w.comm_ = comm;
  w.rank_ = who.rank;
  w.size_ = who.size;
  auto& a = w.args_;
  a.struct_size = sizeof a;
  a.collective = collective_code(options.operation);
  a.dtype = dtype_code(options.dtype);
  uint64_t element = dtype_size(static_cast<DType>(a.dtype));
  auto ranks = static_cast<uint64_t>(who.size);
  bool in_blocks = a.collective >= kAllGather;
  uint64_t elements = std::max<uint64_t>(bytes / element, 1);
  if (in_blocks) elements = (elements + ranks - 1) / ranks * ranks;
  w.block_ = in_blocks ? elements / ranks : elements;
  w.bytes_ = elements * element;
  w.counts_.assign(ranks, w.block_);
  // In place where the peers' interfaces are, too.
  w.in_place_ = (a.collective == kAllReduce || a.collective == kBroadcast) && !options.out_of_place;
  a.input = &stand_ins[0];
  a.output = &stand_ins[w.in_place_ ? 0 : 1];
  a.count = w.block_;
  if (a.collective == kAllToAll) a.send_counts = a.receive_counts = w.counts_.data();
  if (a.collective == kAllGather || a.collective == kReduceScatter) a.counts = w.counts_.data();
  const std::vector<std::string> algorithms = {"auto",   "ring",      "doubling", "tree",
                                               "direct", "two_level", "sparse"};
  a.codec = codec_code(options.codec);
  for (std::size_t i = 0; i < algorithms.size(); ++i) {
    if (algorithms[i] == options.algorithm) a.algorithm = static_cast<int32_t>(i);
  }
  a.fp16_values = -1;
  a.ratio = options.ratio;
  a.name = "bench";
  w.codec_ = capi::codec_for(comm->settings, a);
  // Counts point into the vector, whose storage moves along with it.
  return w;
}

Result<Workload> Workload::make(paceline_comm* comm, const paceline_identity& who,
                                const Options& options, uint64_t bytes) {
  auto w = outline(comm, who, options, bytes);
  auto& a = w.args_;
  const uint64_t block_bytes = w.block_ * dtype_size(static_cast<DType>(a.dtype));
  const auto kind = options.buffers == "shared"      ? Memory::Kind::kShared
                    : options.buffers == "exchanged" ? Memory::Kind::kExchanged
                                                     : Memory::Kind::kPrivate;
  PACELINE_ASSIGN(w.input_,
                  Memory::make(comm, a.collective == kAllGather ? block_bytes : w.bytes_, kind));
  if (!w.in_place_) {
    PACELINE_ASSIGN(
        w.output_,
        Memory::make(comm, a.collective == kReduceScatter ? block_bytes : w.bytes_, kind));
  }
  a.input = w.input_.data();
  a.output = w.in_place_ ? w.input_.data() : w.output_.data();
  return w;
}

Result<plan::PlanRequest> Workload::request() const {
  engine::Operation o;
  o.collective = static_cast<plan::Collective>(args_.collective);
  o.dtype = static_cast<DType>(args_.dtype);
  o.input = args_.input;
  o.output = args_.output;
  o.count = args_.count;
  o.algorithm = static_cast<plan::Algorithm>(args_.algorithm);
  o.codec = codec_;
  return comm_->runner->request_for(o);
}

double Workload::value(int rank, uint64_t index) const {
  uint64_t bits = mix(index * 4096 + static_cast<uint64_t>(rank));
  switch (static_cast<DType>(args_.dtype)) {
    case DType::kInt32:
    case DType::kInt64:
      return static_cast<double>(bits % 2001) - 1000;
    case DType::kFloat16:  // from 1 to 2, as what each can hold
      return 1 + static_cast<double>(bits % 1024) / 1024;
    case DType::kBFloat16:
      return 1 + static_cast<double>(bits % 128) / 128;
    default:
      return static_cast<double>(bits >> 40) / (1 << 24) - 0.5;
  }
}

void Workload::refill() {
  auto elements = input_.size() / dtype_size(static_cast<DType>(args_.dtype));
  std::byte* to = input_.data();
  for (uint64_t i = 0; i < elements; ++i) {
    double v = value(rank_, i);
    switch (static_cast<DType>(args_.dtype)) {
      case DType::kFloat32:
        store(to, i, static_cast<float>(v));
        break;
      case DType::kFloat64:
        store(to, i, v);
        break;
      case DType::kInt32:
        store(to, i, static_cast<int32_t>(v));
        break;
      case DType::kInt64:
        store(to, i, static_cast<int64_t>(v));
        break;
      case DType::kFloat16:
      case DType::kBFloat16:
        cpu::store_rounded(static_cast<DType>(args_.dtype), v, to + 2 * i);
        break;
      default:
        break;
    }
  }
}

double Workload::read(const std::byte* from, uint64_t index) const {
  switch (static_cast<DType>(args_.dtype)) {
    case DType::kFloat32:
      return load<float>(from, index);
    case DType::kFloat64:
      return load<double>(from, index);
    case DType::kInt32:
      return load<int32_t>(from, index);
    case DType::kFloat16:
    case DType::kBFloat16:
      return cpu::load_wide(static_cast<DType>(args_.dtype), from + 2 * index);
    default:
      return static_cast<double>(load<int64_t>(from, index));
  }
}

double Workload::expected(uint64_t index) const {
  auto mine = static_cast<uint64_t>(rank_);
  double sum = 0;
  switch (args_.collective) {
    case kBroadcast:
      return value(0, index);
    case kAllGather:
      return value(static_cast<int>(index / block_), index % block_);
    case kAllToAll:
      return value(static_cast<int>(index / block_), mine * block_ + index % block_);
    case kReduceScatter:
      index += mine * block_;
      break;
    default:
      break;
  }
  for (int r = 0; r < size_; ++r) sum += value(r, index);
  return sum;
}

Status Workload::verify() const {
  const auto type = static_cast<DType>(args_.dtype);
  if (codec_.codec == plan::Codec::kTopK) return Status::ok();
  const std::byte* out = static_cast<const std::byte*>(args_.output);
  uint64_t elements = (in_place_ ? input_.size() : output_.size()) / dtype_size(type);
  const bool bf16 = codec_.codec == plan::Codec::kBf16 || type == DType::kBFloat16;
  const bool fp16 = codec_.codec == plan::Codec::kFp16 || type == DType::kFloat16;
  const double rounding = bf16 ? 1e-2 : fp16 ? 1e-3 : 1e-6;
  constexpr uint64_t kSample = 1024;
  for (uint64_t k = 0; k < std::min(kSample, elements); ++k) {
    uint64_t i = k + 1 == kSample ? elements - 1 : mix(k) % elements;
    double got = read(out, i);
    double want = expected(i);
    if (std::fabs(got - want) <= rounding * size_ * (1 + std::fabs(want))) continue;
    return {Code::kInternal,
            fmt::format("rank {}: element {} is {} instead of {}", rank_, i, got, want)};
  }
  return Status::ok();
}

Status Workload::run() {
  paceline_result result{};
  result.struct_size = sizeof result;
  paceline_code code = paceline_run(comm_, &args_, &result);
  if (code != PACELINE_OK) return {static_cast<Code>(code), paceline_error(comm_)};
  if (codec_.codec == plan::Codec::kTopK) {
    code = paceline_residual_commit(comm_, nullptr, 0);
    if (code != PACELINE_OK) return {static_cast<Code>(code), paceline_error(comm_)};
  }
  return Status::ok();
}

}  // namespace paceline::bench
