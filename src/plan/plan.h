// A plan is data: what one rank does, step by step, to carry out one collective.
//
// Builders (ring.cc, tree.cc, two_level.cc, sparse.cc …) are pure functions of a PlanRequest and a
// rank. From agreed metadata all ranks build matching plans: the k-th message from a to b in a's
// plan is the k-th message from a in b's plan. A plan prints, compares, and predicts its bytes and
// time; it knows no framework and no socket. The engine's executor walks it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/packets.h"
#include "base/status.h"
#include "base/types.h"

namespace paceline::plan {

enum class Collective : uint8_t {
  kAllReduce = 0,
  kBroadcast = 1,
  kAllGather = 2,      ///< uneven: counts[r] elements from rank r, concatenated
  kReduceScatter = 3,  ///< uneven: counts[r] elements end on rank r
  kAllToAll = 4,       ///< uneven: see PlanRequest::send_counts, receive_counts
  kBarrier = 5,
  kReduce = 6,
  kGather = 7,
  kScatter = 8,
};
const char* collective_name(Collective c);

enum class Algorithm : uint8_t {
  kAuto = 0,
  kRing = 1,      ///< bandwidth-optimal: 2 (n-1)/n of the buffer each way, 2 (n-1) hops
  kDoubling = 2,  ///< recursive doubling: log2 n hops of the whole buffer
  kTree = 3,      ///< binomial tree up and down
  kDirect = 4,    ///< reduce-scatter and all-gather by direct exchange: ring's bytes, 2 hops
  kTwoLevel = 5,  ///< inner reduce-scatter, outer all-reduce per shard, inner all-gather
  kSparse = 6,    ///< two-level with top-k of each shard between nodes
};
const char* algorithm_name(Algorithm a);

/// How elements travel between nodes. (Inside a node they travel as they are.)
enum class Codec : uint8_t { kNone = 0, kFp16 = 1, kBf16 = 2, kTopK = 3 };
const char* codec_name(Codec c);

struct CodecSpec {
  Codec codec = Codec::kNone;
  double ratio = 0.01;       ///< kTopK: fraction of the elements kept
  bool fp16_values = false;  ///< kTopK: values travel as fp16
  double scale = 1.0;        ///< kFp16: multiply before the cast, divide after
  bool inside_node =
      false;  ///< dense: also between ranks of one node; top-k: every rank encodes, no inner level
  bool operator==(const CodecSpec&) const = default;
};

/// The most bytes that `elements` elements of `dtype` travel as: what plans reserve and send. Dense
/// codecs: exact. Top-k: the format's bound (see codec/topk_format.h).
uint64_t coded_bytes(const CodecSpec& spec, DType dtype, uint64_t elements);

/// Which ranks share a node, in group numbering.
struct GroupShape {
  Rank size = 1;
  std::vector<int32_t> node_of;  ///< [size]; any numbers, equal where ranks share a node
  [[nodiscard]] int node_count() const;
  /// Ranks by node: nodes in order of their first rank, ranks ascending.
  [[nodiscard]] std::vector<std::vector<Rank>> nodes() const;
  bool operator==(const GroupShape&) const = default;
};

struct PlanRequest {
  Collective collective = Collective::kAllReduce;
  Algorithm algorithm = Algorithm::kAuto;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  uint64_t count = 0;            ///< elements (all-reduce, broadcast, reduce)
  std::vector<uint64_t> counts;  ///< per rank (all-gather, reduce-scatter, gather, scatter)
  /// All-to-all: what this rank sends to each, [size], blocks one after the other in the input; or,
  /// for every rank, [size*size] with row r for what r sends (receive_counts stays empty then).
  std::vector<uint64_t> send_counts;
  std::vector<uint64_t> receive_counts;  ///< all-to-all: what this rank receives from each, [size]
  Rank root = 0;
  /// Input and output are the same memory; a plan then uses kOutput alone. All-gather: this rank's
  /// block is at its place in the output already. Reduce-scatter: the output is the whole input
  /// buffer, the result is left in this rank's block of it, the other blocks are overwritten.
  /// Gather, scatter and all-to-all: not offered. It is a rank's own affair: messages don't depend
  /// on it.
  bool in_place = false;
  /// All-reduce and reduce-scatter; dense codecs on float32, top-k (all-reduce alone) on float32
  /// sums and averages. Recursive doubling and trees carry short buffers, and ignore it.
  CodecSpec codec;
  GroupShape shape;
  int inner_size =
      0;  ///< two-level and sparse: inner groups of so many consecutive ranks; 0: nodes
  int lanes = 1;
  uint64_t piece_bytes = 512 * 1024;  ///< the largest message; big buffers are cut and pipelined
  bool operator==(const PlanRequest&) const = default;
};

enum class Buffer : uint8_t { kInput = 0, kOutput = 1, kScratch = 2 };
struct Range {
  Buffer buffer = Buffer::kScratch;
  uint64_t offset = 0;  ///< bytes
  uint64_t bytes = 0;
  bool operator==(const Range&) const = default;
};

enum class StepKind : uint8_t {
  kCopy = 0,    ///< dst = src
  kReduce = 1,  ///< dst = op(dst, src)
  kScale = 2,   ///< dst = dst / divisor (average)
  /// dst = codec(src); sparse: src is the gradient, a range of kInput or kOutput, so that its
  /// offset tells which elements of the operation it holds; their residual is updated.
  kEncode = 3,
  kDecode = 4,         ///< dst = codec⁻¹(src), dense codecs
  kDecodeReduce = 5,   ///< dst = op(dst, codec⁻¹(src)), dense codecs
  kZero = 6,           ///< dst = 0
  kSend = 7,           ///< src → peer
  kReceive = 8,        ///< peer → dst
  kReceiveReduce = 9,  ///< dst = op(left, message), piece by piece as it arrives; left: src, or dst
                       ///< if src is empty
  kReceiveDecodeReduce =
      10,  ///< dst = op(left, codec⁻¹(message)), piece by piece (dense codecs); left as above
  kReceiveDecode = 11,  ///< dst = codec⁻¹(message), piece by piece (dense codecs)
  kNothing = 12,        ///< joins dependencies
  kDecodeSum = 13,      ///< sparse: dst = Σ codec⁻¹(codes) / divisor, in the codes' order
};
const char* step_kind_name(StepKind k);
/// "64 MiB", "1.5 KiB", "12 B".
std::string size_text(uint64_t bytes);

inline constexpr uint32_t kNoStep = UINT32_MAX;

/// A sparse encoding: where it is, at most, and the step that tells its length (an encode or a receive).
struct Coded {
  Range range;
  uint32_t bytes_from = kNoStep;
  bool operator==(const Coded&) const = default;
};

struct Step {
  StepKind kind = StepKind::kNothing;
  uint8_t lane = 0;
  Rank peer = -1;     ///< in group numbering, for sends and receives
  uint32_t slot = 0;  ///< numbers the messages from one rank to another within the plan
  Range src;
  Range dst;
  /// For messages whose length is known only at run time (sparse): the step that determines it (an
  /// encode or a receive, for its sends and decodes); src.bytes is then the upper bound. Such a
  /// receive has no bytes_from: its message may be shorter than dst.bytes, as the flag below says.
  uint32_t bytes_from = kNoStep;
  bool short_message = false;  ///< receives: dst.bytes is an upper bound
  double divisor = 1.0;        ///< kScale; kReceiveReduce and kDecodeSum: of what comes out
  std::vector<Coded> codes;    ///< kDecodeSum; src spans them all
  /// kReceiveReduce: what comes may stay where its sender has it, for the sparse kEncode that names this step: it adds it
  /// as it reads dst, which is then what it was before.
  bool may_be_held = false;
  std::vector<uint32_t> addends;  ///< kEncode: such receives
  /// kReceive: it brings what all ranks' contributions came to. So it can't come before what this rank has sent towards
  /// it has arrived, and does not wait for those sends of the same memory, whose ends are told later, behind all that the
  /// peer sends.
  bool brings_sum = false;
  /// Inside a node, where one rank's kReceiveReduce makes of a message what it later sends back: kSend: where this rank
  /// will receive that, in one message of the same length. The other rank may write it there at once.
  Range answer;
  bool answers = false;          ///< kReceiveReduce: what comes out may be written to the sender
  uint32_t answer_of = kNoStep;  ///< kSend: what that step may have brought already
  std::vector<uint32_t> after;   ///< indices of earlier steps that must have completed
  bool operator==(const Step&) const = default;
};

struct Plan {
  PlanRequest request;
  Rank me = 0;
  Algorithm algorithm = Algorithm::kRing;  ///< as chosen
  uint64_t scratch_bytes = 0;
  std::vector<Step> steps;  ///< topologically ordered: `after` points backwards only

  /// Message bytes that this rank sends to ranks of other nodes (upper bound for sparse).
  [[nodiscard]] uint64_t inter_node_bytes_sent() const;
  [[nodiscard]] uint64_t bytes_sent() const;
  /// One line a step, for people and for golden tests; of more steps than `most`, how many are left out.
  [[nodiscard]] std::string to_string(std::size_t most = SIZE_MAX) const;
  /// How many steps there are of each kind: "4 send, 4 receive-reduce".
  [[nodiscard]] std::string kinds() const;
  /// "two-level 2×4, direct fp16 between nodes".
  [[nodiscard]] std::string summary() const;
  bool operator==(const Plan&) const = default;
};

/// Builds rank `me`'s plan. kInvalidArgument names the field that is wrong; kUnsupported the
/// combination. Steps are listed in the order of their urgency: among steps that can run, the first
/// should.
Result<Plan> build(const PlanRequest& request, Rank me);
/// The checks of build() alone.
Status validate(const PlanRequest& request, Rank me);
/// Bytes that the message of a send or a receive has (an upper bound where the length is known at
/// run time only).
uint64_t message_bytes(const PlanRequest& request, const Step& step);
/// What kAuto becomes, the same on every rank, and why ("4 nodes, 64 MiB ≥ 256 KiB: ring").
struct Choice {
  Algorithm algorithm = Algorithm::kRing;
  std::string why;
};
Choice choose(const PlanRequest& request);

/// What a node's link carries: our frames in TCP's packets, with the acknowledgements of what goes the other way; counted as
/// `tc -s qdisc` counts at that interface.
struct LinkBytes {
  uint64_t sent = 0;
  uint64_t received = 0;
  bool operator==(const LinkBytes&) const = default;
};

/// What the plan puts on the network, and what that takes. Top-k: the format's bound, about 1 % above what is sent.
struct Prediction {
  std::vector<LinkBytes> links;  ///< by node, in the order of their first ranks
  uint64_t payload_bytes = 0;    ///< of the busiest link's busier direction
  uint64_t link_bytes = 0;       ///< what that carries for it
  int hops =
      0;  ///< messages between nodes that follow each other; 0 where the latency is not known
  /// hops × latency + link_bytes / rate: R. W. Hockney's model ("The communication challenge for MPP: Intel Paragon and
  /// Meiko CS-2", Parallel Computing 20, 1994) as MPICH's collectives were compared by it (R. Thakur, R. Rabenseifner and
  /// W. Gropp, "Optimization of collective communication operations in MPICH", 2005). What ranks compute, and what lies
  /// within a node, takes none of it.
  double seconds = 0;
};
/// `me` matters for all-to-all with this rank's counts only (its node is taken as typical then). `latency_s`: seconds from one
/// node to another of a message without length; 0: not known. Where it is, all ranks' plans are built to count hops.
Result<Prediction> predict(const PlanRequest& request, double bits_per_second,
                           const Packets& packets = {}, Rank me = 0, double latency_s = 0);

}  // namespace paceline::plan
