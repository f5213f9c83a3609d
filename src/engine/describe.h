// What an operation is, as ranks tell it to each other: its digest travels in every message, its
// words only when ranks disagree.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/types.h"
#include "plan/plan.h"

namespace paceline::engine {

/// The metadata that all ranks of an operation must share (`name` is for messages only).
struct Description {
  static constexpr uint8_t kTransfer = 100;           ///< `kind` of point-to-point messages
  static constexpr uint64_t kAnyLength = UINT64_MAX;  ///< `count` of a transfer: the sender's
  uint8_t kind = 0;                                   ///< plan::Collective, or kTransfer
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  plan::Algorithm algorithm = plan::Algorithm::kAuto;
  plan::CodecSpec codec;
  Rank root = 0;
  uint64_t count = 0;        ///< elements; bytes of a transfer
  uint64_t counts_hash = 0;  ///< of the per-rank counts, 0 when there are none
  /// All-to-all, in questions only: elements that the asker sends to the asked and expects from it. A transfer: 1 for
  /// the side that this rank is on.
  uint64_t pair_send = 0, pair_receive = 0;
  std::string name;
  std::string shape;

  static constexpr std::size_t kTextLimit = 1024;  ///< of name and shape, each

  [[nodiscard]] std::string_view kind_name() const;
  /// "all-reduce 'layer1.weight'" (without a name: "all-reduce").
  [[nodiscard]] std::string title() const;
  /// "float32 [64, 128]".
  [[nodiscard]] std::string contents() const;
};

/// A hash of everything but the name (and, where ranks may hold different counts, but count and
/// shape); never 0.
uint32_t digest_of(const Description& d);
/// A well-mixed hash of a sequence of numbers: seed it, then fold value by value.
uint64_t mix(uint64_t seed, uint64_t value);

/// The sentence for two ranks that disagree: "all-reduce 'layer1.weight': rank 0 (host a) has
/// float32 [64, 128], rank 2 (host b) has float32 [64, 127]".
std::string disagreement(const Description& a, const std::string& rank_a, const Description& b,
                         const std::string& rank_b);

void write_description(ByteWriter& out, const Description& d);
/// Check `in.ok()` afterwards.
Description read_description(ByteReader& in);

}  // namespace paceline::engine
