#include "wire/fake/fake_network.h"

#include <algorithm>
#include <utility>

#include "base/crc32c.h"

namespace paceline::wire {

FakeNetwork::FakeNetwork(FakeOptions options) : options_(options), state_(options.seed) {
  options_.latency = std::max<Time>(options_.latency, 1);
  options_.protocol.lossy = true;
  options_.protocol.payload_sum = true;
}

FakeNetwork::~FakeNetwork() = default;

// SplitMix64 (Steele, Lea, Flood 2014): small, and the same everywhere.
uint64_t FakeNetwork::random() {
  uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

bool FakeNetwork::chance(double probability) {
  if (probability <= 0) return false;
  return static_cast<double>(random() >> 11) * 0x1p-53 < probability;
}

std::unique_ptr<FakeChannel> FakeNetwork::join(Rank rank, Rank size, const std::string& host) {
  std::unique_ptr<FakeChannel> channel(new FakeChannel(*this, rank, size, host));
  channels_[rank] = channel.get();
  return channel;
}

Time FakeNetwork::next_event_time() const { return packets_.empty() ? kNever : packets_.top().at; }

bool FakeNetwork::is_cut(Rank a, Rank b) const {
  for (const auto& p : partitions_) {
    if (now() >= p.from && now() < p.until && p.side.contains(a) != p.side.contains(b)) return true;
  }
  return false;
}

void FakeNetwork::partition(std::set<Rank> side, Time from, Time until) {
  partitions_.push_back({std::move(side), from, until});
}

void FakeNetwork::kill(Rank rank, Time at) {
  if (killed_at_.try_emplace(rank, at).second) ++counts_.kills;
}

bool FakeNetwork::is_dead(Rank rank) const {
  auto it = killed_at_.find(rank);
  return it != killed_at_.end() && now() >= it->second;
}

void FakeNetwork::enqueue(Packet packet) {
  packet.order = order_++;
  packets_.push(std::move(packet));
}

void FakeNetwork::transmit(Rank from, Rank to, std::vector<std::byte> bytes) {
  ++counts_.sent;
  if (is_dead(from)) {
    ++counts_.killed;
    return;
  }
  Time leaves = now();
  if (options_.bytes_per_second > 0) {
    Time& free = free_at_[from];
    free = std::max(free, now()) +
           static_cast<Time>(static_cast<double>(bytes.size()) * 1e9 / options_.bytes_per_second);
    leaves = free;
  }
  auto held_back = [&](Time bound) {
    return bound > 0 ? static_cast<Time>(random() % static_cast<uint64_t>(bound)) : 0;
  };
  if (chance(options_.loss)) {
    ++counts_.lost;
    return;
  }
  const auto send_copy = [&](std::vector<std::byte> copy) {
    Packet p;
    p.at = leaves + options_.latency + held_back(options_.jitter);
    if (chance(options_.reorder)) {
      ++counts_.reordered;
      p.at += held_back(8 * options_.latency);
    }
    if (chance(options_.delay)) {
      ++counts_.delayed;
      p.at += held_back(options_.long_delay);
    }
    p.from = from;
    p.to = to;
    p.bytes = std::move(copy);
    if (chance(options_.corrupt)) {
      ++counts_.corrupted;
      for (uint64_t flips = 1 + random() % 3; flips > 0; --flips) {
        uint64_t bit = random() % (p.bytes.size() * 8);
        p.bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      }
    }
    enqueue(std::move(p));
  };
  if (chance(options_.duplicate)) {
    ++counts_.duplicated;
    send_copy(bytes);
  }
  send_copy(std::move(bytes));
}

void FakeNetwork::deliver(Packet packet, std::set<Rank>& touched) {
  if (is_cut(packet.from, packet.to)) {
    ++counts_.partitioned;
    return;
  }
  if (is_dead(packet.to) || (is_dead(packet.from) && !packet.is_reset)) {
    ++counts_.killed;
    if (is_dead(packet.to) && !packet.is_reset && options_.kill_is_noticed) {
      Packet reset;
      reset.at = now() + options_.latency;
      reset.from = packet.to;
      reset.to = packet.from;
      reset.is_reset = true;
      enqueue(std::move(reset));
    }
    return;
  }
  auto it = channels_.find(packet.to);
  if (it == channels_.end()) return;
  ++counts_.delivered;
  fingerprint_ = fingerprint_ * 0x100000001B3U ^
                 crc32c(packet.bytes, static_cast<uint32_t>(packet.at)) ^
                 static_cast<uint64_t>(packet.to) << 40;
  touched.insert(packet.to);
  it->second->arrivals_.push_back({packet.from, packet.is_reset, std::move(packet.bytes)});
}

std::vector<Rank> FakeNetwork::advance(Time to) {
  std::set<Rank> touched;
  while (!packets_.empty() && packets_.top().at <= to) {
    Packet packet = std::move(
        const_cast<Packet&>(packets_.top()));  // popped at once: its order is not looked at again
    packets_.pop();
    clock_.advance_to(packet.at);
    deliver(std::move(packet), touched);
  }
  if (to != kNever) clock_.advance_to(to);
  return {touched.begin(), touched.end()};
}

}  // namespace paceline::wire
