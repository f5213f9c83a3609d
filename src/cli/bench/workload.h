// One collective of one size on this rank: its buffers, what is in them, and what must come out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cli/bench/bench.h"

namespace paceline::bench {

/// Memory from paceline_alloc, or from the C++ heap: private, or with its pages exchanged by paceline_share.
class Memory {
 public:
  Memory() = default;
  enum class Kind : uint8_t { kPrivate, kShared, kExchanged };
  /// kResourceExhausted when there is none.
  static Result<Memory> make(paceline_comm* comm, std::size_t bytes, Kind kind);
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }

 private:
  paceline_comm* comm_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Kind kind_ = Kind::kPrivate;
};

class Workload {
 public:
  /// Without its buffers: all that its plan follows from.
  static Workload outline(paceline_comm* comm, const paceline_identity& who, const Options& options,
                          uint64_t bytes);
  static Result<Workload> make(paceline_comm* comm, const paceline_identity& who,
                               const Options& options, uint64_t bytes);

  /// Random values that follow from rank and position, the same on every call.
  void refill();
  /// One operation, from submission to completion.
  Status run();
  /// Compares a sample of the output of one run() after refill() with what the ranks' values give; for types that
  /// can be summed without rounding doubts and exact transport or a dense codec.
  [[nodiscard]] Status verify() const;

  /// What the engine would plan for it, by its settings.
  [[nodiscard]] Result<plan::PlanRequest> request() const;

  [[nodiscard]] const paceline_op_args& args() const { return args_; }
  /// As asked for, or as the settings say.
  [[nodiscard]] const plan::CodecSpec& codec() const { return codec_; }
  /// The buffer that the row is named by: all-gather's output, reduce-scatter's input, else the input.
  [[nodiscard]] uint64_t bytes() const { return bytes_; }

 private:
  [[nodiscard]] double value(int rank, uint64_t index) const;
  [[nodiscard]] double read(const std::byte* from, uint64_t index) const;
  [[nodiscard]] double expected(uint64_t index) const;

  paceline_comm* comm_ = nullptr;
  int rank_ = 0;
  int size_ = 1;
  uint64_t bytes_ = 0;
  uint64_t block_ = 0;  ///< elements of one rank's block
  bool in_place_ = false;
  Memory input_;
  Memory output_;
  std::vector<uint64_t> counts_;
  paceline_op_args args_{};
  plan::CodecSpec codec_;
};

}  // namespace paceline::bench
