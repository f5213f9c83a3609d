// What a plan costs on the links.
#include <algorithm>
#include <utility>

#include "plan/algorithms.h"
#include "plan/hops.h"

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

/// All-to-all where others' counts are not known: where all of this rank's are equal theirs are too, as far as anybody
/// can know.
bool has_own_counts_only(const PlanRequest& q) {
  if (q.collective != Collective::kAllToAll || q.receive_counts.empty()) return false;
  const auto is_other = [&](uint64_t count) { return count != q.receive_counts.front(); };
  return std::ranges::any_of(q.send_counts, is_other) ||
         std::ranges::any_of(q.receive_counts, is_other);
}

LinkBytes on_links(const Traffic& sent, const Traffic& received, const Packets& packets) {
  return {on_link(sent, received, packets), on_link(received, sent, packets)};
}

/// By all ranks' plans.
void add_links(const PlanRequest& q, Algorithm algorithm, const Packets& packets, Prediction& p) {
  NodeTraffic traffic(q.shape);
  for (Rank r = 0; r < q.shape.size; ++r) collect(q, r, algorithm, traffic);
  for (std::size_t g = 0; g < traffic.sent.size(); ++g) {
    const Traffic &sent = traffic.sent[g], &received = traffic.received[g];
    p.payload_bytes = std::max({p.payload_bytes, sent.payload, received.payload});
    p.links.push_back(on_links(sent, received, packets));
  }
}

/// By what this rank sends and receives, which all of its node are taken to do, and all nodes.
void add_typical_links(const PlanRequest& q, Algorithm algorithm, const Packets& packets, Rank me,
                       Prediction& p) {
  const auto of_my_node = [&](const PlanRequest& request) {
    NodeTraffic traffic(q.shape);
    collect(request, me, algorithm, traffic);
    Traffic node;
    for (Traffic one : traffic.sent) {  // only this node's is anything
      node.payload += one.payload, node.wire += one.wire, node.answers += one.answers;
    }
    const auto& nodes = q.shape.node_of;
    const auto ranks =
        nodes.empty() ? 1
                      : std::count(nodes.begin(), nodes.end(), nodes[static_cast<std::size_t>(me)]);
    const auto all = static_cast<uint64_t>(ranks);
    return Traffic{node.payload * all, node.wire * all, node.answers * all};
  };
  PlanRequest other_way = q;
  std::swap(other_way.send_counts, other_way.receive_counts);
  const Traffic sent = of_my_node(q), received = of_my_node(other_way);
  p.payload_bytes = std::max(sent.payload, received.payload);
  p.links.assign(static_cast<std::size_t>(q.shape.node_count()), on_links(sent, received, packets));
}

int count_hops(const PlanRequest& q, Rank me) {
  PlanRequest in_few_pieces = q;
  in_few_pieces.piece_bytes = UINT64_MAX / 2;  // they go side by side
  in_few_pieces.algorithm = choose(q).algorithm;
  Hops hops(q.shape);
  for (Rank r = 0; r < q.shape.size; ++r) {
    if (has_own_counts_only(q) && r != me) continue;
    if (auto plan = build(in_few_pieces, r)) hops.add(*plan);
  }
  return hops.longest();
}

}  // namespace

Result<Prediction> predict(const PlanRequest& request, double bits_per_second,
                           const Packets& packets, Rank me, double latency_s) {
  PACELINE_RETURN_IF_ERROR(validate(request, me));
  if (!(bits_per_second > 0))
    return Status(Code::kInvalidArgument, "bits_per_second must be positive");
  if (!(latency_s >= 0)) return Status(Code::kInvalidArgument, "latency_s must not be negative");
  if (packets.payload == 0) return Status(Code::kInvalidArgument, "packets must carry something");
  const Algorithm algorithm = choose(request).algorithm;
  Prediction p;
  if (has_own_counts_only(request)) {
    add_typical_links(request, algorithm, packets, me, p);
  } else {
    add_links(request, algorithm, packets, p);
  }
  for (const LinkBytes& link : p.links)
    p.link_bytes = std::max({p.link_bytes, link.sent, link.received});
  if (latency_s > 0) p.hops = count_hops(request, me);
  p.seconds = p.hops * latency_s + static_cast<double>(p.link_bytes) * 8 / bits_per_second;
  return p;
}

}  // namespace paceline::plan
