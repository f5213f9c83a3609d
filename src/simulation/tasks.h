// What the ranks of a simulated job do, and what has to come out.
#pragma once

#include <cstddef>
#include <vector>

#include "simulation/world.h"

namespace paceline::simulation {

/// Elements of some type.
using Buffer = std::vector<std::byte>;

/// Small integers, few enough bits of them for fp16, unless it says otherwise: sums are exact in every order, in every
/// type and by every codec.
struct Task {
  enum class Kind { kCollective, kSend, kReceive } kind = Kind::kCollective;
  plan::Collective collective = plan::Collective::kAllReduce;
  plan::Algorithm algorithm = plan::Algorithm::kAuto;
  plan::CodecSpec codec;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::size_t count = 0;
  /// Blocks that differ in length, none included: by member; of all-to-all, row by row, what each sends to each.
  std::vector<uint64_t> counts;
  Rank root = 0;              ///< in the group's numbering
  std::vector<Rank> members;  ///< world numbering, in the group's order
  bool in_group = false;
  /// float32, and no integers: the sum depends on its order, which is the same on all ranks.
  bool is_rounded = false;
  bool keeps_back = false;     ///< top-k of some of the elements: the rest stays as residuals
  std::vector<char> in_place;  ///< by rank: its own affair
  std::vector<std::vector<float>> numbers, wanted;  ///< by rank: what input and expected hold
  std::vector<Buffer> input, output, expected;      ///< by rank; of members
  std::vector<Buffer> given, taken;  ///< by rank: input before, output when it had ended
  std::vector<char> ended;
  std::vector<engine::OpId> ids;
  std::vector<Time> submit_at, submitted_at;
};

/// What `buffer` holds, of float32.
std::vector<float> floats_of(const Buffer& buffer);

/// The tasks of a job in the order of their submission; drawn from its seed.
std::vector<Task> make_tasks(const Scenario& scenario);

}  // namespace paceline::simulation
