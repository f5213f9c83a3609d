// What a plan costs on the links.
#include <algorithm>
#include <cmath>

#include "plan/algorithms.h"

namespace paceline::plan {
namespace {

// What is counted: bytes as `tc -s qdisc` reports them at the node's shaped interface, that is
// every packet's Ethernet, IP and TCP headers (of each segment, where the kernel hands down a
// batch), without preamble, gap and checksum (the 24 bytes that tbf's `overhead` adds when it
// meters, but not when it counts).

// Our own wire (src/wire/frame.h, protocol.h): a header for each piece of a message; and for a
// message longer than the eager limit two frames the other way, "ready" and "done".
constexpr uint64_t kFrameHeader = 64;
constexpr uint64_t kWirePiece = 256 * 1024;
constexpr uint64_t kEagerLimit = 64 * 1024;
constexpr uint64_t kAnswers = 2;
// A receiver acknowledges about once per batch that the kernel hands up.
constexpr uint64_t kBatch = 64 * 1024;

struct Traffic {
  uint64_t payload = 0;
  uint64_t wire = 0;     ///< with our headers
  uint64_t answers = 0;  ///< frames that go the other way for it
};

class NodeTraffic final : public MessageSink {
 public:
  explicit NodeTraffic(const GroupShape& shape) {
    auto nodes = shape.nodes();
    node_.resize(static_cast<std::size_t>(shape.size));
    for (std::size_t g = 0; g < nodes.size(); ++g) {
      for (Rank r : nodes[g]) node_[static_cast<std::size_t>(r)] = g;
    }
    sent.resize(nodes.size());
    received.resize(nodes.size());
  }
  void message(Rank from, Rank to, uint64_t bytes) override {
    std::size_t a = node_[static_cast<std::size_t>(from)];
    std::size_t b = node_[static_cast<std::size_t>(to)];
    if (a == b) return;
    for (Traffic* t : {&sent[a], &received[b]}) {
      t->payload += bytes;
      t->wire +=
          bytes + kFrameHeader * std::max<uint64_t>((bytes + kWirePiece - 1) / kWirePiece, 1);
      t->answers += bytes > kEagerLimit ? kAnswers : 0;
    }
  }
  std::vector<Traffic> sent;
  std::vector<Traffic> received;

 private:
  std::vector<std::size_t> node_;
};

// Bytes that one direction carries: its own messages, and what answers the other direction's.
uint64_t on_link(const Traffic& own, const Traffic& other, const Packets& cut) {
  uint64_t stream = own.wire + other.answers * kFrameHeader;
  uint64_t packets = (stream + cut.payload - 1) / cut.payload;
  uint64_t acknowledgements = (other.wire + kBatch - 1) / kBatch;
  return stream + (packets + acknowledgements) * cut.headers;
}

void collect(const PlanRequest& request, Rank me, Algorithm algorithm, NodeTraffic& traffic) {
  Builder b(request, me, &traffic);
  emit(b, algorithm);
}

}  // namespace

Result<Prediction> predict(const PlanRequest& request, double bits_per_second,
                           const Packets& packets, Rank me) {
  PACELINE_RETURN_IF_ERROR(validate(request, me));
  if (!(bits_per_second > 0))
    return Status(Code::kInvalidArgument, "bits_per_second must be positive");
  if (packets.payload == 0) return Status(Code::kInvalidArgument, "packets must carry something");
  Algorithm algorithm = choose(request).algorithm;
  NodeTraffic traffic(request.shape);
  bool own_counts_only =
      request.collective == Collective::kAllToAll && !request.receive_counts.empty();
  for (Rank r = 0; r < request.shape.size; ++r) {
    if (!own_counts_only || r == me) collect(request, r, algorithm, traffic);
  }
  Prediction p;
  for (std::size_t g = 0; g < traffic.sent.size(); ++g) {
    p.payload_bytes =
        std::max({p.payload_bytes, traffic.sent[g].payload, traffic.received[g].payload});
    p.link_bytes = std::max({p.link_bytes, on_link(traffic.sent[g], traffic.received[g], packets),
                             on_link(traffic.received[g], traffic.sent[g], packets)});
  }
  p.seconds = static_cast<double>(p.link_bytes) * 8 / bits_per_second;
  return p;
}

}  // namespace paceline::plan
