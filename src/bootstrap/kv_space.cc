#include "bootstrap/kv_space.h"

#include <algorithm>

namespace paceline::bootstrap {
namespace {

constexpr std::size_t kEntryCost = 64;  // of the maps' nodes, about

}  // namespace

void KvSpace::enter(int id, const Nonce& challenge) {
  Client& client = clients_[id];
  client.challenge = challenge;
  append_frame({.kind = FrameKind::kChallenge, .nonce = challenge}, client.out);
}

void KvSpace::leave(int id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  for (const auto& key : found->second.awaited) {
    const auto waiting = waiters_.find(key);
    std::erase(waiting->second, id);
    if (waiting->second.empty()) waiters_.erase(waiting);
  }
  std::erase(told_, id);
  clients_.erase(found);
}

Status KvSpace::take(int id, std::span<const std::byte> bytes) {
  Client& client = clients_.at(id);
  client.in.insert(client.in.end(), bytes.begin(), bytes.end());
  while (true) {
    PACELINE_ASSIGN(const auto frame, take_frame(client.in));
    if (!frame) return {};
    PACELINE_RETURN_IF_ERROR(handle(id, client, *frame));
  }
}

Status KvSpace::handle(int id, Client& client, const KvFrame& frame) {
  if (!client.is_proven) return prove(client, frame);
  if (frame.kind == FrameKind::kPut) return put(frame);
  if (frame.kind == FrameKind::kGet) return get(id, client, frame.key);
  return {Code::kCorrupted, "bytes that no rank of this job sends"};
}

Status KvSpace::prove(Client& client, const KvFrame& frame) const {
  if (frame.kind != FrameKind::kProof) return {Code::kUnauthenticated, "no proof of the secret"};
  if (!equal_secret(frame.mac, client_proof(secret_, client.challenge, frame.nonce)))
    return {Code::kUnauthenticated, "another secret than this job's"};
  client.is_proven = true;
  append_frame(
      {.kind = FrameKind::kWelcome, .mac = server_proof(secret_, client.challenge, frame.nonce)},
      client.out);
  return {};
}

Status KvSpace::put(const KvFrame& frame) {
  if (entries_.contains(frame.key)) return {};
  const std::size_t cost = frame.key.size() + frame.value.size() + kEntryCost;
  if (cost > limits_.memory - memory_) return {Code::kResourceExhausted, "the space is full"};
  memory_ += cost;
  entries_[frame.key] = frame.value;
  const auto waiting = waiters_.extract(frame.key);
  if (waiting.empty()) return {};
  for (const int id : waiting.mapped()) {
    Client& other = clients_.at(id);
    std::erase(other.awaited, frame.key);
    other.is_deaf = other.is_deaf || other.out.size() > limits_.unread;
    if (!other.is_deaf)
      append_frame({.kind = FrameKind::kValue, .key = frame.key, .value = frame.value}, other.out);
    told_.push_back(id);
  }
  return {};
}

Status KvSpace::get(int id, Client& client, const std::string& key) {
  if (const auto found = entries_.find(key); found != entries_.end()) {
    if (client.out.size() > limits_.unread)
      return {Code::kResourceExhausted, "asks, but does not read"};
    append_frame({.kind = FrameKind::kValue, .key = key, .value = found->second}, client.out);
    return {};
  }
  auto& waiting = waiters_[key];
  if (std::ranges::find(waiting, id) != waiting.end()) return {};  // once asked is enough
  if (client.awaited.size() >= limits_.awaited) {
    if (waiting.empty()) waiters_.erase(key);
    return {Code::kResourceExhausted, "waits for too many keys"};
  }
  client.awaited.push_back(key);
  waiting.push_back(id);
  return {};
}

}  // namespace paceline::bootstrap
