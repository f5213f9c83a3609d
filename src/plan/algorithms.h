// The algorithms, each a function that writes one rank's steps into a Builder. Requests are
// validated before.
#pragma once

#include <vector>

#include "plan/builder.h"
#include "plan/plan.h"
#include "plan/shape.h"

namespace paceline::plan {

/// Where an all-reduce's phase finds this rank's contribution: the user's input, or the output,
/// where an earlier level has left its partial sum.
enum class From { kInput, kOutput };

// All-reduce.
void ring_all_reduce(Builder& b);
void direct_all_reduce(Builder& b);
void doubling_all_reduce(Builder& b);
void tree_all_reduce(Builder& b);
void two_level_all_reduce(Builder& b);
void sparse_all_reduce(Builder& b);

/// Which messages of a phase travel encoded by the request's dense codec.
enum class Coding { kNever, kBetweenNodes, kAlways };
/// Of an exchange among ranks of several nodes; and of one inside a node.
Coding flat_coding(const Builder& b);
bool travels_encoded(const Builder& b, Rank a, Rank c, Coding coding);

// Their phases over some of the ranks. All members call them with the same spans, in the same
// order.

/// All-reduces `span` among `m` by a ring over pieces; encoded: every hop, by the dense codec.
void ring_phase(Builder& b, const Members& m, Span span, From from, bool is_encoded = false);
/// Whether a ring is the better way for an encoded buffer of so many bytes (before the codec).
bool suits_encoded_ring(uint64_t bytes, int members);
/// What an owner has been told last of each piece of its sum, if the sum can go straight back to who told it: steps of
/// receive_reduce_answering() for direct_all_gather() to follow. Empty: it can't.
using Answers = std::vector<uint32_t>;
/// What follows a reduce-scatter and so changes how its last contributions come. answers: direct_all_gather() sends the
/// sums (with the average's division, where the result is not empty). addends: a sparse encode of the result, that can
/// add these steps' contributions itself.
struct Afterwards {
  Answers* answers = nullptr;
  std::vector<uint32_t>* addends = nullptr;
};
/// Rank at place j ends with the reduction of shards[j] in its output, in a fixed order: its own
/// contribution, then those of the places before it, backwards round the ring. The output begins
/// with element `output_begin`.
void direct_reduce_scatter(Builder& b, const Members& m, const std::vector<Span>& shards, From from,
                           Coding coding, uint64_t output_begin = 0,
                           const Afterwards& afterwards = {});
/// Place j's shards[j] of the output goes to all members. Where any message is encoded, all ranks
/// end with what the decoded encoding is, the owner too.
void direct_all_gather(Builder& b, const Members& m, const std::vector<Span>& shards, Coding coding,
                       const Answers& answers = {});
/// Both, over `span`, with the average's division between them.
void direct_phase(Builder& b, const Members& m, Span span, From from, Coding coding);

// Other collectives.
void chain_broadcast(Builder& b);
void tree_broadcast(Builder& b);
void ring_all_gather(Builder& b);
void direct_all_gather_blocks(Builder& b);
void two_level_all_gather(Builder& b);
void ring_reduce_scatter(Builder& b);
void direct_reduce_scatter_blocks(Builder& b);
void two_level_reduce_scatter(Builder& b);
void all_to_all(Builder& b);
void barrier(Builder& b);
void chain_reduce(Builder& b);
void tree_reduce(Builder& b);
void gather(Builder& b);
void scatter(Builder& b);

/// One rank: the output is a copy of the input.
void alone(Builder& b);

/// Runs the algorithm (never kAuto) of the request's collective; false: not offered.
bool emit(Builder& b, Algorithm algorithm);

}  // namespace paceline::plan
