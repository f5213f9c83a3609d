#include "check.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "device/cuda/kernel_arguments.h"
#include "device/cuda/layout.h"
#include "device/cuda/numbers.h"
#include "device/cuda/reference.h"
#include "inputs.h"

namespace bench {
namespace {

using namespace paceline::device::cuda;
using paceline::DType;
using paceline::Status;
using Bytes = std::vector<std::byte>;

struct Case {
  WireFormat format;
  uint64_t elements;
  Kind kind;
  bool feedback, momentum, in_place;
  float scale;
  uint32_t addends = 0;

  [[nodiscard]] std::string name() const {
    constexpr const char* kCodecs[] = {"exact", "fp16", "bf16", "top-k", "int8"};
    return fmt::format(
        "{} of {} {} ({}){}{}{}{}{}", kCodecs[static_cast<int>(format.codec)], elements,
        paceline::dtype_name(format.dtype), kind_name(kind), feedback ? ", residual" : "",
        momentum ? ", momentum" : "", in_place ? ", in place" : "",
        format.codec == WireCodec::kTopK && !format.fp16_values ? ", fp32 values" : "",
        addends > 0 ? fmt::format(", {} addends", addends) : "");
  }
};

/// What an encode is given and what it leaves.
struct Tensors {
  Bytes gradient, residual, velocity, next_residual, next_velocity, encoded;
  std::vector<Bytes> addends;
  uint32_t report = 0;
};

void must(const Status& status, const Case& c) {
  if (!status.is_ok()) fail(fmt::format("{}: {}", c.name(), status.to_string()));
}

DevicePtr address(const Bytes& bytes) { return reinterpret_cast<DevicePtr>(bytes.data()); }
template <class T>
const T* view(const Bytes& bytes) {
  return reinterpret_cast<const T*>(bytes.data());
}

Tensors make_inputs(const Case& c, uint64_t seed) {
  Tensors t;
  t.gradient = make_input(c.format.dtype, c.elements, c.kind, seed);
  for (uint32_t i = 0; i < c.addends; ++i)
    t.addends.push_back(make_input(c.format.dtype, c.elements, c.kind, seed + 3 + i));
  if (c.feedback) t.residual = make_input(DType::kFloat32, c.elements, Kind::kNormal, seed + 1);
  if (c.momentum) t.velocity = make_input(DType::kFloat32, c.elements, Kind::kNormal, seed + 2);
  if (c.kind == Kind::kTies) {  // equal values stay equal: more than k of them
    std::fill(t.residual.begin(), t.residual.end(), std::byte{0});
    std::fill(t.velocity.begin(), t.velocity.end(), std::byte{0});
  }
  return t;
}

EncodeArguments plain_arguments(const Case& c) {
  EncodeArguments a;
  a.elements = c.elements;
  a.scale = c.scale;
  a.momentum = c.momentum ? 0.9F : 0;
  return a;
}

void run_reference(const Case& c, Tensors& t) {
  t.next_residual.assign(t.residual.size(), std::byte{0xA5});
  t.next_velocity.assign(t.velocity.size(), std::byte{0xA5});
  t.encoded.assign(encoded_bytes(c.format, c.elements), std::byte{0xA5});
  Bytes state(state_bytes(c.format, c.elements));
  EncodeArguments a = plain_arguments(c);
  a.gradient = address(t.gradient);
  std::vector<DevicePtr> addends;
  for (const Bytes& addend : t.addends) addends.push_back(address(addend));
  a.addends = addends;
  if (c.feedback) a.residual = address(t.residual), a.next_residual = address(t.next_residual);
  if (c.momentum) a.velocity = address(t.velocity), a.next_velocity = address(t.next_velocity);
  a.encoded = address(t.encoded);
  if (!state.empty()) a.state = address(state);
  a.state_capacity = state.size();
  a.report = reinterpret_cast<DevicePtr>(&t.report);
  must(reference::encode(c.format, a), c);
}

/// On the device; the encoding stays there.
Memory run_device(const Gpu& gpu, const Kernels& kernels, const Case& c, Tensors& t) {
  const auto upload = [&](const Bytes& bytes) { return Memory(gpu, bytes.data(), bytes.size()); };
  const Memory gradient = upload(t.gradient), residual = upload(t.residual);
  const Memory velocity = upload(t.velocity);
  const Memory next_residual(gpu, t.residual.size()), next_velocity(gpu, t.velocity.size());
  const Memory state(gpu, state_bytes(c.format, c.elements)), report(gpu, 16);
  Memory encoded(gpu, encoded_bytes(c.format, c.elements));
  for (const Memory* memory : {&next_residual, &next_velocity, &state}) memory->fill(0xA5);
  encoded.fill(0xA5);
  report.fill(0);
  EncodeArguments a = plain_arguments(c);
  a.gradient = gradient.address();
  std::vector<Memory> addends;
  std::vector<DevicePtr> addresses;
  for (const Bytes& addend : t.addends) {
    addends.push_back(upload(addend));
    addresses.push_back(addends.back().address());
  }
  a.addends = addresses;
  a.residual = residual.address();
  a.velocity = velocity.address();
  a.next_residual = c.in_place ? a.residual : next_residual.address();
  a.next_velocity = c.in_place ? a.velocity : next_velocity.address();
  a.encoded = encoded.address();
  a.state = state.address();
  a.state_capacity = state.bytes();
  a.report = report.address();
  must(kernels.encode(c.format, a, gpu.stream()), c);
  gpu.wait();
  t.encoded = encoded.copy<std::byte>();
  t.next_residual = (c.in_place ? residual : next_residual).copy<std::byte>();
  t.next_velocity = (c.in_place ? velocity : next_velocity).copy<std::byte>();
  report.read(&t.report, sizeof(t.report));
  return encoded;
}

/// Elements that differ; two NaN are the same when `dtype` is a float's.
uint64_t differences(const Bytes& a, const Bytes& b, DType dtype) {
  if (a.size() != b.size()) return UINT64_MAX;
  std::atomic<uint64_t> count = 0;
  in_parallel(a.size() / paceline::dtype_size(dtype), [&](uint64_t begin, uint64_t end) {
    uint64_t mine = 0;
    for (uint64_t i = begin; i < end; ++i) {
      if (dtype == DType::kFloat32) {
        const float x = view<float>(a)[i], y = view<float>(b)[i];
        mine += bits_of(x) != bits_of(y) && !(std::isnan(x) && std::isnan(y)) ? 1 : 0;
      } else {
        mine += view<uint16_t>(a)[i] != view<uint16_t>(b)[i] ? 1 : 0;
      }
    }
    count += mine;
  });
  return count;
}

Bytes combine_device(const Gpu& gpu, const Kernels& kernels, const WireFormat& format,
                     uint64_t elements, const std::vector<DevicePtr>& sources, float scale,
                     uint32_t& report) {
  const Memory output(gpu, elements * paceline::dtype_size(format.dtype)), reports(gpu, 16);
  output.fill(0xA5);
  reports.fill(0);
  const CombineArguments a{sources, elements, scale, output.address(), reports.address()};
  const Status status = kernels.combine(format, a, gpu.stream());
  if (!status.is_ok()) fail(status.to_string());
  gpu.wait();
  reports.read(&report, sizeof(report));
  return output.copy<std::byte>();
}

class Checker {
 public:
  Checker(const Gpu& gpu, const Kernels& kernels) : gpu_(gpu), kernels_(kernels) {}

  void run(const Case& c) {
    ++cases_;
    const int sources = c.elements > 10000000 ? 1 : 3;
    std::vector<Memory> encoded;
    std::vector<Bytes> host;
    for (int source = 0; source < sources; ++source) {
      Tensors device = make_inputs(c, 1000 * cases_ + 10 * source), reference = device;
      run_reference(c, reference);
      encoded.push_back(run_device(gpu_, kernels_, c, device));
      compare(c, reference, device);
      check_float64(c, device, encoded.back().address());
      host.push_back(std::move(reference.encoded));
    }
    check_combine(c, encoded, host);
  }
  [[nodiscard]] int cases() const { return cases_; }
  [[nodiscard]] int failures() const { return failures_; }

 private:
  void expect(bool holds, const Case& c, const std::string& what) {
    if (holds) return;
    ++failures_;
    if (failures_ <= 40) fmt::print("  FAILED {}: {}\n", c.name(), what);
  }

  void compare(const Case& c, const Tensors& want, const Tensors& got) {
    const bool exact32 = c.format.codec == WireCodec::kExact && c.format.dtype == DType::kFloat32;
    const auto same = [&](const Bytes& a, const Bytes& b, DType dtype, const char* what) {
      const uint64_t count = differences(a, b, dtype);
      expect(count == 0, c,
             fmt::format("{} differs from the reference's in {} places", what, count));
    };
    same(want.encoded, got.encoded, exact32 ? DType::kFloat32 : DType::kFloat16, "encoding");
    if (c.feedback) same(want.next_residual, got.next_residual, DType::kFloat32, "residual");
    if (c.momentum) same(want.next_velocity, got.next_velocity, DType::kFloat32, "velocity");
    expect(want.report == got.report, c, fmt::format("report {} not {}", got.report, want.report));
  }

  /// What decoding and the residual give back, in float64, against gradient · scale + residual.
  void check_float64(const Case& c, const Tensors& t, DevicePtr encoded) {
    if (c.momentum || (!c.feedback && c.format.codec >= WireCodec::kTopK)) return;
    WireFormat wide = c.format;
    const bool dense = c.format.codec < WireCodec::kTopK;
    if (!dense) wide.dtype = DType::kFloat32;
    if (dense && c.format.dtype != DType::kFloat32) return;  // decoding would round again
    uint32_t report = 0;
    const Bytes decoded = combine_device(gpu_, kernels_, wide, c.elements, {encoded}, 1, report);
    const double step = dense_wire_dtype(c.format) == DType::kFloat16    ? 0x1p-11
                        : dense_wire_dtype(c.format) == DType::kBFloat16 ? 0x1p-8
                                                                         : 0x1p-24;
    const double least = dense_wire_dtype(c.format) == DType::kFloat16 ? 0x1p-25 : 0x1p-133;
    std::atomic<uint64_t> wrong = 0;
    in_parallel(c.elements, [&](uint64_t begin, uint64_t end) {
      for (uint64_t i = begin; i < end; ++i) {
        const double g = gradient(c, t, i);
        const double r = c.feedback ? view<float>(t.residual)[i] : 0;
        const double exact = g * c.scale + r, d = view<float>(decoded)[i];
        if (std::isnan(d) || !std::isfinite(exact)) continue;
        if (dense) {
          const bool saturated = std::abs(d) >= (least == 0x1p-25 ? 65504 : 3.3e38);
          wrong += !saturated && std::abs(d - exact) > std::abs(exact) * (step * 1.001) + least;
          continue;
        }
        const double start = std::fma(static_cast<float>(g), c.scale, static_cast<float>(r));
        wrong += d + view<float>(t.next_residual)[i] != start;
        wrong += std::abs(start - exact) > std::abs(exact) * 0x1p-24 + 0x1p-149;
      }
    });
    expect(wrong == 0, c, fmt::format("{} elements break the identity in float64", wrong.load()));
    if (c.format.codec != WireCodec::kTopK) return;
    const uint64_t k = top_k_entries(c.format, c.elements);
    const uint64_t sent = view<uint32_t>(t.encoded)[top_k_layout(c.format, c.elements).tiles];
    expect(sent <= k, c, fmt::format("{} entries, more than {}", sent, k));
    if (c.kind == Kind::kNormal && c.elements >= 100000)
      expect(sent * 100 >= k * 95, c, fmt::format("{} entries of {}", sent, k));
  }

  /// With what is added to it.
  static float gradient(const Case& c, const Tensors& t, uint64_t i) {
    float sum = widen(c.format.dtype, t.gradient, i);
    if (t.addends.empty()) return sum;
    for (const Bytes& addend : t.addends) sum += widen(c.format.dtype, addend, i);
    if (c.format.dtype == DType::kFloat32) return sum;
    return c.format.dtype == DType::kFloat16 ? Float16::widen(Float16::narrow(sum))
                                             : BFloat16::widen(BFloat16::narrow(sum));
  }
  static float widen(DType dtype, const Bytes& data, uint64_t i) {
    if (dtype == DType::kFloat32) return view<float>(data)[i];
    const uint16_t half = view<uint16_t>(data)[i];
    return dtype == DType::kFloat16 ? Float16::widen(half) : BFloat16::widen(half);
  }

  void check_combine(const Case& c, const std::vector<Memory>& encoded,
                     const std::vector<Bytes>& host) {
    std::vector<DevicePtr> sources, host_sources;
    for (size_t i = 0; i < encoded.size() + 1; ++i) {  // one of them twice
      sources.push_back(encoded[i % encoded.size()].address());
      host_sources.push_back(address(host[i % host.size()]));
    }
    Bytes want(c.elements * paceline::dtype_size(c.format.dtype));
    const CombineArguments a{host_sources, c.elements, c.scale, address(want), 0};
    must(reference::combine(c.format, a), c);
    uint32_t report = 0;
    const Bytes got =
        combine_device(gpu_, kernels_, c.format, c.elements, sources, c.scale, report);
    const uint64_t count = differences(want, got, c.format.dtype);
    expect(
        count == 0 && report == 0, c,
        fmt::format("the sum differs from the reference's in {} places, report {}", count, report));
  }

  const Gpu& gpu_;
  const Kernels& kernels_;
  int cases_ = 0, failures_ = 0;
};

void check_codec(Checker& checker, WireCodec codec, Extent extent) {
  std::vector<uint64_t> sizes = {1, 3, 4095, 4097, 20001, 1000003};
  if (extent == Extent::kSanitizer) sizes = {3, 4097, 20001};
  const bool lossy = codec >= WireCodec::kTopK;
  uint64_t turn = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const uint64_t elements : sizes) {
      for (const Kind kind : kKinds) {
        if (extent == Extent::kSanitizer && (kind == Kind::kSparse || kind == Kind::kDenormal))
          continue;
        for (int variant = 0; variant < (codec == WireCodec::kTopK ? 4
                                         : lossy                   ? 2
                                                                   : 1);
             ++variant) {
          ++turn;
          WireFormat format{codec, dtype, turn % 3 == 0 ? 0.001 : 0.01, variant != 2};
          const uint32_t addends = codec == WireCodec::kTopK ? turn / 2 % 4 : 0;
          checker.run({format, elements, kind, lossy && variant != 1, variant == 3, turn % 2 == 0,
                       turn % 5 == 0 ? 1.0F : 0.3F, addends});
        }
      }
    }
  }
  // From 4 Mi elements on top-k's sample leaves some out.
  if (extent == Extent::kSanitizer && codec == WireCodec::kTopK)
    for (const uint32_t addends : {0U, 1U})
      checker.run({{codec, DType::kFloat32, 0.01},
                   4300003,
                   Kind::kNormal,
                   true,
                   false,
                   addends == 0,
                   0.5F,
                   addends});
  if (extent == Extent::kFull)
    checker.run(
        {{codec, DType::kFloat32, 0.01}, 100000000, Kind::kNormal, lossy, false, true, 0.5F});
  if (extent == Extent::kFull && codec == WireCodec::kTopK)
    checker.run(
        {{codec, DType::kFloat32, 0.01}, 100000000, Kind::kNormal, true, false, true, 0.5F, 1});
}

}  // namespace

bool check(const Gpu& gpu, const Kernels& kernels, Extent extent) {
  int failures = 0;
  for (const auto& [codec, name] :
       {std::pair{WireCodec::kExact, "exact"}, std::pair{WireCodec::kFp16, "fp16"},
        std::pair{WireCodec::kBf16, "bf16"}, std::pair{WireCodec::kTopK, "top-k"},
        std::pair{WireCodec::kInt8, "int8"}}) {
    Checker checker(gpu, kernels);
    check_codec(checker, codec, extent);
    fmt::print("check {:6} {:4} cases, {} failures\n", name, checker.cases(), checker.failures());
    std::fflush(stdout);
    failures += checker.failures();
  }
  return failures == 0;
}

}  // namespace bench
