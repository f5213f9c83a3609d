// The path of one all-reduce of device memory, as data: who holds which shard, how it is cut into pieces, where their
// encodings lie, and what goes over the link.
//
//   reduce-scatter in the node (copies or NCCL) → per piece: encode, copy out, exchange, copy in, combine → all-gather
//
// One hop: every node's encoding of a piece goes to every other node, and each rank adds them. Two nodes, top-k, and
// what is short.
// Two hops: a piece is cut into a part per node; the encodings of part j go to node j, which adds them, encodes the sum
// and sends that to all others. 2 (n-1)/n of the piece each way instead of n-1, one more round trip through the host.
//
// Either way all ranks add the same decoded values in the order of the nodes, so they end bit-equal.
//
// By rows: of a buffer of rows (an embedding's gradient) only those travel that are not zero. Shards and pieces are cut at
// the rows' borders; an encoding has room for all rows of its piece, and messages are as long as what it holds, so what a
// node has never exceeds what was planned. One hop. The plan states a bound; it pays as long as each rank of a node has at
// most `paying_rows`.
//
// The other collectives are parts of this. Reduce-scatter: NCCL in the node, then the first of two hops, each rank's peers
// send it their sums of its block. All-gather: a rank's block goes to its peers, and NCCL spreads what came in the node.
// Broadcast: from the root to its peers, from each of them in its node. What only moves counts bytes.
//
// A pure function of the request: it prints, compares and predicts, and needs no GPU. The executor walks it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/cuda/codec.h"

namespace paceline::gpu {

struct PathShape {
  int nodes = 2;
  int local_size = 1;  ///< the same on all nodes
  int node = 0;
  int local_rank = 0;
  bool operator==(const PathShape&) const = default;
};

enum class PathKind : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast };

struct PathRequest {
  PathShape shape;
  device::cuda::WireFormat format;
  /// All-reduce: elements of the buffer. Reduce-scatter: of a rank's block. All-gather, broadcast: bytes of a rank's
  /// block, of the buffer.
  uint64_t count = 0;
  uint64_t piece_bytes = 4U << 20;  ///< of the encoding, more or less
  int lanes = 1;
  PathKind kind = PathKind::kAllReduce;
  int root_node = 0, root_local_rank = 0;  ///< broadcast
  uint64_t row_elements = 0;               ///< all-reduce by rows of so many elements; 0: dense
};
bool same(const PathRequest& a, const PathRequest& b);

/// Elements of the buffer.
struct Span {
  uint64_t first = 0;
  uint64_t elements = 0;
  bool operator==(const Span&) const = default;
};

/// Offsets are bytes from the beginning of the operation's pinned memory; -1: not used.
struct PathPiece {
  Span span;
  int lane = 0;             ///< `lanes`: the gather stream itself, for an operation of one piece
  uint64_t slot_bytes = 0;  ///< from one encoding to the next
  /// Where each node gets something else (scatters()): what goes out, one slot per node (this node's own is not used).
  uint64_t out_offset = UINT64_MAX;
  /// What comes in, one slot per node; this rank's own encoding is copied to its slot, and sent from there where all get
  /// the same. A broadcast has one slot.
  uint64_t in_offset = 0;
  /// Two hops: the encoded sums, one slot per node.
  uint64_t back_offset = UINT64_MAX;
};

struct PathPlan {
  PathRequest request;
  int hops = 1;
  uint64_t shard = 0;  ///< elements that each rank of the node reduces and gathers
  Span own;            ///< this rank's shard; the node's last rank has the tail too
  Span tail;           ///< elements that don't divide: NCCL adds and broadcasts them apart
  std::vector<PathPiece> pieces;
  uint64_t host_bytes = 0;  ///< pinned memory
  uint64_t wire_bytes = 0;  ///< this rank hands to the wire
  uint64_t node_bytes = 0;  ///< all ranks of the node together do
  // By rows; the bytes above are bounds then.
  uint64_t own_rows = 0;     ///< of this rank's shard: it sends no more to each other node
  uint64_t paying_rows = 0;  ///< with at most so many on every rank fewer bytes travel than dense
  uint64_t dense_bytes = 0;  ///< of a node's ranks together, dense

  [[nodiscard]] bool by_rows() const { return request.row_elements > 0; }
  [[nodiscard]] device::cuda::RowFormat row_format(const PathPiece& piece) const;
  /// Whether each node gets another part of what this rank has.
  [[nodiscard]] bool scatters() const {
    return hops == 2 || request.kind == PathKind::kReduceScatter;
  }
  /// Whether numbers are encoded, so that an Inf or NaN is reported.
  [[nodiscard]] bool reports() const {
    return request.kind == PathKind::kAllReduce || request.kind == PathKind::kReduceScatter;
  }
  /// Whether `node`'s rank sends on the first hop.
  [[nodiscard]] bool sends(int node) const {
    return request.kind != PathKind::kBroadcast || node == request.root_node;
  }
  /// What is reduced or moved, in words that ranks compare: an all-reduce of [100] of float32 as fp16.
  [[nodiscard]] std::string describe_data() const;
  /// Lanes that lead to the gather stream: those from 0 on.
  [[nodiscard]] size_t lanes_used() const {
    const bool none = pieces.size() == 1 && pieces[0].lane == request.lanes;
    return none ? 0 : std::min(pieces.size(), static_cast<size_t>(request.lanes));
  }
  /// From the first slot to `node`'s.
  [[nodiscard]] uint64_t slot(const PathPiece& piece, int node) const {
    return request.kind == PathKind::kBroadcast ? 0
                                                : static_cast<uint64_t>(node) * piece.slot_bytes;
  }
  /// The part of a piece that `node` sums up; one hop: all of it.
  [[nodiscard]] Span part(const PathPiece& piece, int node) const;
  /// Bytes of the encoding of `node`'s part, by rows at most; 0 for an empty part.
  [[nodiscard]] uint64_t part_bytes(const PathPiece& piece, int node) const;
  /// Seconds that the node's bytes take on its link, headers of TCP over Ethernet included.
  [[nodiscard]] double seconds(double bits_per_second) const;
  /// "2 nodes × 4: NCCL in the node, fp16 in one hop between nodes, 3 pieces; 12.5 MB out of each node".
  [[nodiscard]] std::string summary() const;
  /// The summary and a line a piece.
  [[nodiscard]] std::string to_string() const;
};

/// Where this rank's report word lies in the pinned memory.
inline constexpr uint64_t kReportOffset = 0;
/// Pieces and slots begin at multiples of this.
inline constexpr uint64_t kHostAlign = 256;
/// Pieces are cut at multiples of so many elements.
inline constexpr uint64_t kPieceGranule = 4096;
/// Parts too; a multiple of what int8's blocks and 16-byte loads need.
inline constexpr uint64_t kPartGranule = 512;
/// A piece holds at most so many times piece_bytes of gradient.
inline constexpr double kMostGradient = 16;

/// Whether rows of these can travel by themselves: one of them is no longer than a piece.
bool takes_rows(const PathRequest& request);
/// Elements at whose multiples an operation may be cut in two.
uint64_t cut_granule(const PathRequest& request);

/// kUnsupported: one node (NCCL alone is best there); kInvalidArgument: a value out of its range.
Result<PathPlan> build_path(const PathRequest& request);

/// Elements (bytes of what only moves) of the largest piece. What a reduce-scatter encodes for all nodes has room where
/// an all-reduce's piece has.
uint64_t piece_elements(const PathRequest& request);
/// The `piece_bytes` for an all-reduce that nothing else is overlapped with: an eighth of a rank's shard, kLeastPrompt at
/// least and request.piece_bytes at most. What has residuals is cut as it was, for they depend on it.
uint64_t prompt_piece_bytes(const PathRequest& request);
/// Shorter ones cost more than they overlap: a third of a millisecond at 25 Gb/s, and four slices for the wires.
inline constexpr uint64_t kLeastPrompt = 1U << 20;
/// The most scratch that top-k takes for a piece, whatever its ratio and types.
uint64_t most_selection_bytes(PathRequest request);
const char* kind_name(PathKind kind);
const char* codec_name(device::cuda::WireCodec codec);
/// Whether what it leaves out is added to the next step's.
bool has_residual(device::cuda::WireCodec codec);

}  // namespace paceline::gpu
