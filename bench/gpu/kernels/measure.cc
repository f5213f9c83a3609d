#include "measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "device/cuda/enqueue.h"
#include "device/cuda/layout.h"
#include "inputs.h"

namespace bench {
namespace {

using namespace paceline::device::cuda;
using paceline::DType;
using paceline::Status;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void must(const Status& status) {
  if (!status.is_ok()) fail(status.to_string());
}

/// All buffers of the largest size; each is larger than any cache together with its neighbours.
class Bench {
 public:
  Bench(const Gpu& gpu, const Kernels& kernels, uint64_t elements)
      : gpu_(gpu), kernels_(kernels), most_(elements), report_(gpu, 16), flush_(gpu, 512 << 20) {
    for (uint32_t set = 0; set < kSets; ++set) {
      const auto values = make_input(DType::kFloat32, elements, Kind::kNormal, 77 + set);
      gradients_.emplace_back(gpu, values.data(), values.size());
      residuals_.emplace_back(gpu, elements * 4);
      velocities_.emplace_back(gpu, elements * 4);
      residuals_.back().fill(0);
      velocities_.back().fill(0);
    }
    const auto halves = make_input(DType::kBFloat16, elements, Kind::kNormal, 99);
    for (uint32_t set = 0; set < kSets; ++set)
      bfloats_.emplace_back(gpu, halves.data(), halves.size());
    for (uint32_t source = 0; source < 8; ++source) encoded_.emplace_back(gpu, elements * 4 + 4096);
    state_ = Memory(gpu, state_bytes({WireCodec::kTopK}, elements));
    report_.fill(0);
    gpu.wait();
  }

  void all() {
    copies();
    for (const uint64_t elements : {most_, uint64_t{25000000}, uint64_t{1000000}}) {
      if (elements > most_) continue;
      casts(elements);
      top_k(elements);
      int8(elements);
    }
    for (Row& row : measure_tensors(gpu_, kernels_, flush_)) rows_.push_back(std::move(row));
    copies();
  }
  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
  [[nodiscard]] double copy_bandwidth() const { return copy_bandwidth_; }  ///< bytes per ms

 private:
  static constexpr uint32_t kSets = 3;

  void copies() {
    Row copy = time_of(gpu_, flush_, "copy (driver)", most_, 8.0 * most_, [&](int i) {
      gpu_.must(
          gpu_.api().memcpy_dtod_async(encoded_[i % 8].address(), gradients_[i % kSets].address(),
                                       most_ * 4, gpu_.stream()),
          "cuMemcpyDtoDAsync");
    });
    copy_bandwidth_ = std::max(copy_bandwidth_, copy.bytes / copy.milliseconds);
    rows_.push_back(copy);
  }

  EncodeArguments arguments(DType dtype, uint64_t elements, int i) {
    EncodeArguments a;
    a.gradient = (dtype == DType::kFloat32 ? gradients_ : bfloats_)[i % kSets].address();
    a.elements = elements;
    a.encoded = encoded_[i % 8].address();
    a.report = report_.address();
    a.scale = 0.5F;
    return a;
  }

  void encode_row(const std::string& name, const WireFormat& format, uint64_t elements) {
    const double bytes =
        static_cast<double>(elements) * dtype_size(format.dtype) + encoded_bytes(format, elements);
    rows_.push_back(time_of(gpu_, flush_, name, elements, bytes, [&](int i) {
      must(kernels_.encode(format, arguments(format.dtype, elements, i), gpu_.stream()));
    }));
  }

  /// The encodings in encoded_ are of this format already.
  void combine_rows(const std::string& name, const WireFormat& format, uint64_t elements) {
    for (const uint32_t sources : {2U, 4U, 8U}) {
      std::vector<DevicePtr> list;
      for (uint32_t source = 0; source < sources; ++source)
        list.push_back(encoded_[source].address());
      const double bytes = static_cast<double>(elements) * dtype_size(format.dtype) +
                           static_cast<double>(sources) * encoded_bytes(format, elements);
      rows_.push_back(
          time_of(gpu_, flush_, fmt::format("{} × {}", name, sources), elements, bytes, [&](int i) {
            const CombineArguments a{list, elements, 0.5F, gradients_out(format.dtype, i).address(),
                                     report_.address()};
            must(kernels_.combine(format, a, gpu_.stream()));
          }));
    }
  }
  /// The velocities are free when nothing with momentum runs.
  const Memory& gradients_out(DType /*dtype*/, int i) { return velocities_[i % kSets]; }

  void casts(uint64_t elements) {
    encode_row("fp32 scaled", {WireCodec::kExact}, elements);
    combine_rows("combine fp32", {WireCodec::kExact}, elements);
    encode_row("fp32 → bf16", {WireCodec::kBf16}, elements);
    encode_row("fp32 → fp16", {WireCodec::kFp16}, elements);
    combine_rows("combine fp16 → fp32", {WireCodec::kFp16}, elements);
    encode_row("bf16 → bf16", {WireCodec::kExact, DType::kBFloat16}, elements);
    encode_row("bf16 → fp16", {WireCodec::kFp16, DType::kBFloat16}, elements);
    combine_rows("combine fp16 → bf16", {WireCodec::kFp16, DType::kBFloat16}, elements);
  }

  void int8(uint64_t elements) {
    const WireFormat format{WireCodec::kInt8};
    for (const bool feedback : {false, true}) {
      const double bytes = elements * (feedback ? 12.0 : 4.0) + encoded_bytes(format, elements);
      rows_.push_back(
          time_of(gpu_, flush_, feedback ? "int8, residual" : "int8", elements, bytes, [&](int i) {
            EncodeArguments a = arguments(DType::kFloat32, elements, i);
            if (feedback) {
              a.residual = residuals_[i % kSets].address();
              a.next_residual = residuals_[(i + 1) % kSets].address();
            }
            must(kernels_.encode(format, a, gpu_.stream()));
          }));
    }
    combine_rows("combine int8", format, elements);
    for (const Memory& residual : residuals_) residual.fill(0);
  }

  /// Scale jumps tenfold from call to call; the residual goes on from one to the next.
  void top_k_row(const std::string& name, const WireFormat& format, uint64_t elements,
                 bool momentum, uint32_t addends = 0) {
    static constexpr float kScales[] = {1, 10, 1, 0.1F, 1, 10, 100, 10};
    const TopKLayout layout = top_k_layout(format, elements);
    const double streams = momentum ? 16 : 8;
    const double gradients = dtype_size(format.dtype) * (1.0 + addends);
    const double bytes =
        static_cast<double>(elements) * (gradients + streams) + encoded_bytes(format, elements);
    std::vector<double> counts;
    for (const Memory& memory : residuals_) memory.fill(0);
    for (const Memory& memory : velocities_) memory.fill(0);
    const auto encode = [&](int i) {
      EncodeArguments a = arguments(format.dtype, elements, i);
      a.scale = kScales[static_cast<unsigned>(i) % 8];
      std::vector<DevicePtr> others;
      for (uint32_t other = 1; other <= addends; ++other)
        others.push_back(gradients_[(i + other) % kSets].address());
      a.addends = others;
      a.residual = residuals_[i % kSets].address();
      a.next_residual = residuals_[(i + 1) % kSets].address();
      if (momentum) {
        a.momentum = 0.9F;
        a.velocity = velocities_[i % kSets].address();
        a.next_velocity = velocities_[(i + 1) % kSets].address();
      }
      a.state = state_.address();
      a.state_capacity = state_.bytes();
      must(kernels_.encode(format, a, gpu_.stream()));
    };
    Row row = time_of(gpu_, flush_, name, elements, bytes, encode,
                      [&](int i) { counts.push_back(sent(layout, i)); });
    const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
    row.note = fmt::format("{:.1f}–{:.1f} % of k sent", 100 * *least, 100 * *most);
    rows_.push_back(row);
  }
  double sent(const TopKLayout& layout, int i) {
    uint32_t entries = 0;
    encoded_[i % 8].read(&entries, sizeof(entries), uint64_t{layout.tiles} * 4);
    return static_cast<double>(entries) / layout.entries;
  }

  void top_k(uint64_t elements) {
    const WireFormat format{WireCodec::kTopK};
    top_k_row("top-k 1 %", format, elements, false);
    combine_rows("combine top-k 1 %", format, elements);
    top_k_row("top-k 0.1 %", {WireCodec::kTopK, DType::kFloat32, 0.001}, elements, false);
    combine_rows("combine top-k 0.1 %", {WireCodec::kTopK, DType::kFloat32, 0.001}, elements);
    top_k_row("top-k 1 %, bf16 gradient", {WireCodec::kTopK, DType::kBFloat16}, elements, false);
    top_k_row("top-k 1 %, momentum", format, elements, true);
    top_k_row("top-k 1 % of two gradients' sum", format, elements, false, 1);
    top_k_row("top-k 1 % of three gradients' sum", format, elements, false, 2);
    top_k_parts(elements);
  }

  /// Each launch of one encode between events of its own: they sum to more than the whole, for what runs into one
  /// another there is apart here.
  void top_k_parts(uint64_t elements);

  const Gpu& gpu_;
  const Kernels& kernels_;
  uint64_t most_;
  std::vector<Memory> gradients_, bfloats_, residuals_, velocities_, encoded_;
  Memory state_, report_, flush_;
  std::vector<Row> rows_;
  double copy_bandwidth_ = 1;
};

void Bench::top_k_parts(uint64_t elements) {
  // Through the driver's table, with events around every launch.
  static const Gpu* gpu = nullptr;
  static std::vector<Event> events;
  gpu = &gpu_;
  static decltype(Api::launch_kernel) launch = nullptr;
  launch = gpu_.api().launch_kernel;
  Api timed = gpu_.api();
  timed.launch_kernel = [](auto... arguments) {
    const int result = launch(arguments...);
    events.push_back(gpu->record());
    return result;
  };
  auto kernels = Kernels::load(timed, 0);
  must(kernels.status());
  std::vector<double> parts[4];
  for (int i = 0; i < kRuns; ++i) {
    EncodeArguments a = arguments(DType::kFloat32, elements, i);
    a.residual = residuals_[i % kSets].address();
    a.next_residual = residuals_[(i + 1) % kSets].address();
    a.state = state_.address();
    a.state_capacity = state_.bytes();
    flush_.fill(1);
    events = {gpu_.record()};
    must(kernels->encode({WireCodec::kTopK}, a, gpu_.stream()));
    gpu_.wait();
    const std::vector<Event> these = std::move(events);
    for (size_t part = 0; part + 1 < these.size(); ++part)
      parts[part].push_back(gpu_.elapsed(these[part], these[part + 1]));
    for (const Event event : these) gpu_.api().event_destroy(event);
  }
  constexpr const char* kNames[] = {"  clear + coarse sample", "  fine sample", "  select",
                                    "  gather"};
  for (int part = 0; part < 4; ++part)
    rows_.push_back({kNames[part], elements, median(parts[part]), 0, 0, 0, ""});
}

void write_json(const std::string& path, const Gpu& gpu, const Bench& bench) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) fail(fmt::format("can't write {}", path));
  fmt::print(file,
             "{{\"device\": \"{}\", \"driver\": {}, \"copy_bytes_per_s\": {:.4e}, \"rows\": [\n",
             gpu.name(), gpu.driver_version(), bench.copy_bandwidth() * 1e3);
  const char* comma = "";
  for (const Row& row : bench.rows()) {
    fmt::print(file,
               "{}{{\"name\": \"{}\", \"elements\": {}, \"ms\": {:.5f}, \"ms_least\": {:.5f}, "
               "\"ms_most\": {:.5f}, \"bytes\": {:.0f}, \"floor_ms\": {:.5f}, \"note\": \"{}\"}}",
               comma, row.name, row.elements, row.milliseconds, row.best, row.worst, row.bytes,
               row.bytes / bench.copy_bandwidth(), row.note);
    comma = ",\n";
  }
  fmt::print(file, "\n]}}\n");
  std::fclose(file);
}

}  // namespace

void measure(const Gpu& gpu, const Kernels& kernels, uint64_t elements, const std::string& json) {
  Bench bench(gpu, kernels, elements);
  bench.all();
  fmt::print("{}, driver {}, copy {:.3f} TB/s; medians of {} runs\n", gpu.name(),
             gpu.driver_version(), bench.copy_bandwidth() / 1e9, kRuns);
  fmt::print("| | elements | ms | floor ms | measured / floor | share of copy bandwidth | |\n");
  fmt::print("|---|---|---|---|---|---|---|\n");
  for (const Row& row : bench.rows()) {
    const double floor = row.bytes / bench.copy_bandwidth();
    if (row.bytes == 0) {
      fmt::print("| {} | {} | {:.4f} | | | | |\n", row.name, row.elements, row.milliseconds);
      continue;
    }
    fmt::print("| {} | {} | {:.4f} | {:.4f} | {:.2f} | {:.0f} % | {} |\n", row.name, row.elements,
               row.milliseconds, floor, row.milliseconds / floor, 100 * floor / row.milliseconds,
               row.note);
  }
  if (!json.empty()) write_json(json, gpu, bench);
}

}  // namespace bench
