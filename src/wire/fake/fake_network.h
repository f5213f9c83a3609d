// A packet network with a virtual clock, in one process, and the Channel over it: the real protocol
// (wire/protocol.h) under loss, repetition, reordering, delay, corruption, partitions and killed
// ranks.
//
// Deterministic: the same seed and the same calls give the same packets at the same times, on every
// machine.
//
// A simulation turns it like this:
//
//   FakeNetwork network(options);
//   auto channel = network.join(rank, size, "host-a");      // one per rank, lazily connected,
//   O(peers used) state … while (!done) {
//     Time next = min(network.next_event_time(), every engine's (or channel's) next_timer());
//     for (Rank r : network.advance(next)) woken.insert(r);  // packets have arrived there
//     for each woken rank, and each whose timer is due:  engine.progress(network.now(), …);
//   }
//
// next_event_time() is the earliest arrival; a channel's own time-outs are in its next_timer().
// After send(), receive() and the like next_timer() is 0 ("now") until progress() has let the
// packets out. One frame is one packet, of any size. poll_fd() is -1.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "wire/channel.h"
#include "wire/protocol.h"

namespace paceline::wire {

struct FakeOptions {
  uint64_t seed = 1;
  Time latency = 50 * kMicrosecond;  ///< one way, at least 1 ns
  Time jitter = 0;                   ///< uniform, on top; reorders by itself
  double bytes_per_second = 0;       ///< of each rank's way out; 0: unlimited
  double loss = 0;                   ///< probabilities, per packet
  double duplicate = 0;
  double reorder = 0;  ///< held back by up to 8 latencies
  double corrupt = 0;  ///< one to three bits flipped anywhere
  double delay = 0;    ///< held back by up to `long_delay`
  Time long_delay = 20 * kMillisecond;
  bool kill_is_noticed = true;  ///< who sends to a killed rank hears so after a round trip (as a
                                ///< TCP reset); false: silence, as when the host dies
  ProtocolOptions protocol = defaults();

  static ProtocolOptions defaults() {
    ProtocolOptions p;
    p.piece_bytes = 8 * 1024;
    p.eager_limit = 2 * 1024;
    p.eager_budget = 64 * 1024;
    p.minimum_rto = 2 * kMillisecond;
    p.maximum_rto = 500 * kMillisecond;
    p.acknowledge_after = kMillisecond;
    p.peer_timeout = 10 * kSecond;
    return p;
  }
};

/// What was injected, in packets.
struct FakeCounts {
  uint64_t sent = 0;
  uint64_t delivered = 0;
  uint64_t lost = 0;
  uint64_t duplicated = 0;
  uint64_t reordered = 0;
  uint64_t corrupted = 0;
  uint64_t delayed = 0;
  uint64_t partitioned = 0;  ///< dropped by a partition
  uint64_t killed = 0;       ///< dropped because an end was dead
  uint64_t kills = 0;        ///< ranks
  uint64_t refused = 0;      ///< packets that a receiver dropped as corrupt
};

class FakeChannel;

class FakeNetwork {
 public:
  explicit FakeNetwork(FakeOptions options);
  ~FakeNetwork();
  FakeNetwork(const FakeNetwork&) = delete;
  FakeNetwork& operator=(const FakeNetwork&) = delete;

  /// The channel of `rank`; the network must outlive it. Peers may join in any order, also after
  /// the first packets to them were sent (those are lost).
  std::unique_ptr<FakeChannel> join(Rank rank, Rank size, const std::string& host);

  [[nodiscard]] Time now() const { return clock_.now(); }
  [[nodiscard]] const VirtualClock& clock() const { return clock_; }
  /// The earliest arrival or scheduled fault; kNever: none.
  [[nodiscard]] Time next_event_time() const;
  /// Moves the clock to `to` and delivers everything due by then; the ranks that got something,
  /// ascending.
  std::vector<Rank> advance(Time to);

  /// Nothing passes between `side` and all others in [from, until).
  void partition(std::set<Rank> side, Time from, Time until);
  /// From `at` on nothing enters or leaves the rank.
  void kill(Rank rank, Time at);
  [[nodiscard]] bool is_dead(Rank rank) const;

  [[nodiscard]] const FakeCounts& counts() const { return counts_; }
  [[nodiscard]] const FakeOptions& options() const { return options_; }
  /// A number that differs when the order, the times or the bytes of deliveries differ: for replay
  /// tests.
  [[nodiscard]] uint64_t fingerprint() const { return fingerprint_; }

 private:
  friend class FakeChannel;
  struct Packet {
    Time at = 0;
    uint64_t order = 0;
    Rank from = -1;
    Rank to = -1;
    bool is_reset = false;
    std::vector<std::byte> bytes;
  };
  struct Later {
    bool operator()(const Packet& a, const Packet& b) const {
      return a.at != b.at ? a.at > b.at : a.order > b.order;
    }
  };
  struct Partition {
    std::set<Rank> side;
    Time from;
    Time until;
  };

  void transmit(Rank from, Rank to, std::vector<std::byte> bytes);
  void enqueue(Packet packet);
  void deliver(Packet packet, std::set<Rank>& touched);
  void leave(Rank rank) { channels_.erase(rank); }
  uint64_t random();
  bool chance(double probability);
  [[nodiscard]] bool is_cut(Rank a, Rank b) const;

  FakeOptions options_;
  VirtualClock clock_;
  uint64_t state_;
  uint64_t order_ = 0;
  uint64_t fingerprint_ = 0;
  std::priority_queue<Packet, std::vector<Packet>, Later> packets_;
  std::unordered_map<Rank, FakeChannel*> channels_;
  std::unordered_map<Rank, Time> free_at_;  ///< when a rank's way out is free again
  std::map<Rank, Time> killed_at_;
  std::vector<Partition> partitions_;
  FakeCounts counts_;
};

class FakeChannel final : public Channel {
 public:
  ~FakeChannel() override;
  FakeChannel(const FakeChannel&) = delete;
  FakeChannel& operator=(const FakeChannel&) = delete;

  void send(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
            uint64_t cookie) override;
  void receive(Rank peer, Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) override;
  void post_note(Rank peer, std::span<const std::byte> bytes) override;
  bool progress(Time now, Events& events) override;
  [[nodiscard]] Time next_timer() const override;
  [[nodiscard]] int poll_fd() const override { return -1; }
  bool prepare_wait() override;
  void wake() override {}
  void drop_peer(Rank peer, const Status& why) override;
  void abort(const Status& why) override;
  [[nodiscard]] Counters counters() const override { return shared_.counters; }
  [[nodiscard]] std::string describe() const override { return "simulated network"; }

  /// Only for messages; "rank 3 (host-3)" otherwise.
  void set_peer_host(Rank peer, const std::string& host);
  [[nodiscard]] Rank rank() const { return rank_; }
  /// Peers that this rank has state for.
  [[nodiscard]] std::size_t session_count() const { return sessions_.size(); }

 private:
  friend class FakeNetwork;
  struct Arrival {
    Rank from;
    bool is_reset;
    std::vector<std::byte> bytes;
  };
  FakeChannel(FakeNetwork& network, Rank rank, Rank size, std::string host);
  Session* use(Rank peer, uint64_t cookie, bool has_cookie);
  Session& session(Rank peer);
  void take(Arrival& arrival);
  void flush(Session& s);

  FakeNetwork& network_;
  const Rank rank_;
  const Rank size_;
  const std::string host_;
  Shared shared_;
  std::map<Rank, std::unique_ptr<Session>> sessions_;
  std::unordered_map<Rank, std::string> hosts_;
  std::set<Rank> dirty_;
  std::vector<Arrival> arrivals_;
  Time timer_ = kNever;
};

}  // namespace paceline::wire
