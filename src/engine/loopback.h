// For tests: channels between ranks of one process that deliver at once and lose nothing, but let a
// test kill or freeze a rank. The simulated network with faults is wire/fake/.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "base/bytes.h"
#include "wire/channel.h"

namespace paceline::engine {

class LoopbackNetwork;

class LoopbackChannel final : public wire::Channel {
 public:
  LoopbackChannel(LoopbackNetwork& network, Rank me) : network_(network), me_(me) {}
  void send(Rank peer, wire::Tag tag, uint32_t digest, std::span<const std::byte> data,
            uint64_t cookie) override;
  void receive(Rank peer, wire::Tag tag, uint32_t digest, wire::Inbox inbox,
               uint64_t cookie) override;
  std::span<const std::byte> open_held(Rank peer, uint64_t held) override;
  bool close_held(Rank peer, uint64_t held) override;
  void post_note(Rank peer, std::span<const std::byte> bytes) override;
  bool progress(Time now, wire::Events& events) override;
  [[nodiscard]] Time next_timer() const override { return kNever; }
  [[nodiscard]] int poll_fd() const override { return -1; }
  bool prepare_wait() override { return true; }
  void wake() override {}
  void drop_peer(Rank, const Status&) override {}
  void abort(const Status& why) override { aborted_ = why; }
  [[nodiscard]] wire::Counters counters() const override;
  [[nodiscard]] Packets packets() const override { return packets_; }
  void set_packets(const Packets& packets) { packets_ = packets; }
  [[nodiscard]] std::string describe() const override { return "loopback"; }

 private:
  friend class LoopbackNetwork;
  LoopbackNetwork& network_;
  Rank me_;
  wire::Events inbox_;
  wire::Counters counters_;
  Packets packets_;
  Status aborted_;
  bool frozen_ = false;
};

/// Thread-safe, so that ranks may run in threads of their own.
class LoopbackNetwork {
 public:
  explicit LoopbackNetwork(Rank size) {
    for (Rank r = 0; r < size; ++r)
      channels_.push_back(std::make_unique<LoopbackChannel>(*this, r));
    dead_.resize(static_cast<std::size_t>(size));
  }
  LoopbackChannel& channel(Rank r) { return *channels_[static_cast<std::size_t>(r)]; }

  /// The rank is gone: everyone else hears of its loss.
  void kill(Rank rank) {
    std::lock_guard lock(mutex_);
    dead_[static_cast<std::size_t>(rank)] = 1;
    for (auto& c : channels_) {
      if (c->me_ == rank) continue;
      Status why(Code::kPeerLost, "killed by the test");
      for (auto it = sends_.begin(); it != sends_.end();) {
        auto [from, to, tag] = it->first;
        bool hit = (from == c->me_ && to == rank);
        if (hit) c->inbox_.completions.push_back({it->second.cookie, 0, why});
        it = hit ? sends_.erase(it) : std::next(it);
      }
      for (auto it = receives_.begin(); it != receives_.end();) {
        auto [from, to, tag] = it->first;
        bool hit = (to == c->me_ && from == rank);
        if (hit) c->inbox_.completions.push_back({it->second.cookie, 0, why});
        it = hit ? receives_.erase(it) : std::next(it);
      }
      c->inbox_.losses.push_back({rank, why});
    }
  }
  /// As under SIGSTOP: the rank hears nothing and says nothing, until it is let go on.
  void freeze(Rank rank, bool frozen = true) {
    std::lock_guard lock(mutex_);
    channel(rank).frozen_ = frozen;
  }
  /// What these two tell each other stays under way until they are let go on.
  void hold_between(Rank a, Rank b, bool held = true) {
    std::lock_guard lock(mutex_);
    const auto pair = std::minmax(a, b);
    if (held) {
      held_.insert(pair);
      return;
    }
    held_.erase(pair);
    std::vector<Key> waiting;
    for (const auto& [key, send] : sends_) waiting.push_back(key);
    for (const auto& key : waiting) match(key);
  }
  /// Receivers see senders' memory, as ranks of a node may: what can be held stays where it is.
  void lend() {
    std::lock_guard lock(mutex_);
    lends_ = true;
  }
  /// The next message that is longer than `bytes` arrives without its last `bytes`, as from a peer that lies about
  /// what it sends.
  void cut_next(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    cut_ = bytes;
  }

 private:
  friend class LoopbackChannel;
  using Key = std::tuple<Rank, Rank, wire::Tag>;  // from, to, tag
  struct Send {
    std::span<const std::byte> data;
    uint32_t digest;
    uint64_t cookie;
  };
  struct Receive {
    wire::Inbox inbox;
    uint32_t digest;
    uint64_t cookie;
  };
  void match(const Key& key) {
    auto s = sends_.find(key);
    auto r = receives_.find(key);
    if (s == sends_.end() || r == receives_.end()) return;
    auto [from, to, tag] = key;
    if (held_.contains(std::minmax(from, to))) return;
    auto& sender = channel(from);
    auto& receiver = channel(to);
    Status status;
    if (cut_ > 0 && s->second.data.size() > cut_) {
      s->second.data = s->second.data.first(s->second.data.size() - cut_);
      cut_ = 0;
    }
    if (s->second.digest != r->second.digest && s->second.digest != 0 && r->second.digest != 0) {
      status = Status(Code::kMismatch, "digests differ");
    } else if (s->second.data.size() > r->second.inbox.capacity) {
      status = Status(Code::kMismatch, "message too long");
    } else if (lends_ && r->second.inbox.hold) {
      lent_.emplace(++last_lent_, std::pair(from, s->second));
      receiver.inbox_.completions.push_back(
          {r->second.cookie, s->second.data.size(), status, 0, last_lent_});
      sends_.erase(s);
      receives_.erase(r);
      return;
    } else {
      deliver(s->second.data, r->second.inbox);
      sender.counters_.payload_sent += s->second.data.size();
      receiver.counters_.payload_received += s->second.data.size();
    }
    sender.inbox_.completions.push_back({s->second.cookie, s->second.data.size(), status});
    receiver.inbox_.completions.push_back({r->second.cookie, s->second.data.size(), status});
    sends_.erase(s);
    receives_.erase(r);
  }
  static void deliver(std::span<const std::byte> data, const wire::Inbox& inbox) {
    if (inbox.sink == nullptr) {
      if (!data.empty()) std::memcpy(inbox.into, data.data(), data.size());
      return;
    }
    // Pieces from the back, so that nobody gets used to an order.
    constexpr std::size_t kPiece = 64 * 5;
    for (std::size_t end = data.size(); end > 0;) {
      auto begin = (end - 1) / kPiece * kPiece;
      inbox.sink->consume(begin, data.subspan(begin, end - begin));
      end = begin;
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<LoopbackChannel>> channels_;
  std::vector<uint8_t> dead_;
  std::size_t cut_ = 0;
  std::map<Key, Send> sends_;
  std::map<Key, Receive> receives_;
  std::set<std::pair<Rank, Rank>> held_;
  bool lends_ = false;
  uint64_t last_lent_ = 0;
  std::map<uint64_t, std::pair<Rank, Send>> lent_;  ///< with who sent it
};

inline void LoopbackChannel::send(Rank peer, wire::Tag tag, uint32_t digest,
                                  std::span<const std::byte> data, uint64_t cookie) {
  std::lock_guard lock(network_.mutex_);
  if (!aborted_ || network_.dead_[static_cast<std::size_t>(peer)])
    return inbox_.completions.push_back({cookie, 0, Status(Code::kPeerLost, "gone")});
  auto key = LoopbackNetwork::Key{me_, peer, tag};
  if (!network_.sends_.emplace(key, LoopbackNetwork::Send{data, digest, cookie}).second)
    return inbox_.completions.push_back(
        {cookie, 0, Status(Code::kInternal, "the same tag was sent twice")});
  network_.match(key);
}

inline void LoopbackChannel::receive(Rank peer, wire::Tag tag, uint32_t digest, wire::Inbox inbox,
                                     uint64_t cookie) {
  std::lock_guard lock(network_.mutex_);
  if (!aborted_ || network_.dead_[static_cast<std::size_t>(peer)])
    return inbox_.completions.push_back({cookie, 0, Status(Code::kPeerLost, "gone")});
  auto key = LoopbackNetwork::Key{peer, me_, tag};
  if (!network_.receives_.emplace(key, LoopbackNetwork::Receive{inbox, digest, cookie}).second)
    return inbox_.completions.push_back(
        {cookie, 0, Status(Code::kInternal, "the same tag was awaited twice")});
  network_.match(key);
}

inline std::span<const std::byte> LoopbackChannel::open_held(Rank, uint64_t held) {
  std::lock_guard lock(network_.mutex_);
  auto found = network_.lent_.find(held);
  if (found == network_.lent_.end()) return {};
  return found->second.second.data;
}

inline bool LoopbackChannel::close_held(Rank, uint64_t held) {
  std::lock_guard lock(network_.mutex_);
  auto found = network_.lent_.find(held);
  if (found == network_.lent_.end()) return false;
  const auto [from, send] = found->second;
  network_.lent_.erase(found);
  auto& sender = network_.channel(from);
  sender.counters_.payload_sent += send.data.size();
  counters_.payload_received += send.data.size();
  counters_.held += send.data.size();
  sender.inbox_.completions.push_back({send.cookie, send.data.size(), Status::ok()});
  return true;
}

inline void LoopbackChannel::post_note(Rank peer, std::span<const std::byte> bytes) {
  std::lock_guard lock(network_.mutex_);
  network_.channel(peer).inbox_.notes.push_back({me_, {bytes.begin(), bytes.end()}});
}

inline wire::Counters LoopbackChannel::counters() const {
  std::lock_guard lock(network_.mutex_);
  return counters_;
}

inline bool LoopbackChannel::progress(Time, wire::Events& events) {
  std::lock_guard lock(network_.mutex_);
  if (frozen_) return false;
  if (!aborted_) {
    for (auto it = network_.sends_.begin(); it != network_.sends_.end();) {
      bool hit = std::get<0>(it->first) == me_;
      if (hit) inbox_.completions.push_back({it->second.cookie, 0, aborted_});
      it = hit ? network_.sends_.erase(it) : std::next(it);
    }
    for (auto it = network_.receives_.begin(); it != network_.receives_.end();) {
      bool hit = std::get<1>(it->first) == me_;
      if (hit) inbox_.completions.push_back({it->second.cookie, 0, aborted_});
      it = hit ? network_.receives_.erase(it) : std::next(it);
    }
    for (auto it = network_.lent_.begin(); it != network_.lent_.end();) {
      bool hit = it->second.first == me_;
      if (hit) inbox_.completions.push_back({it->second.second.cookie, 0, aborted_});
      it = hit ? network_.lent_.erase(it) : std::next(it);
    }
  }
  bool any = !inbox_.empty();
  std::swap(events.completions, inbox_.completions);
  std::swap(events.notes, inbox_.notes);
  std::swap(events.losses, inbox_.losses);
  inbox_.clear();
  return any;
}

}  // namespace paceline::engine
