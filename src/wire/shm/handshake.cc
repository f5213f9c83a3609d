#include "wire/shm/handshake.h"

#include "base/bytes.h"

namespace paceline::wire::shm {
namespace {

constexpr uint32_t kMagic = 0x48534c50;  // "PLSH"
constexpr uint16_t kWireVersion = 2;

template <std::size_t N>
void put_array(ByteWriter& out, const std::array<std::byte, N>& bytes) {
  out.put_bytes(bytes);
}
template <std::size_t N>
std::array<std::byte, N> get_array(ByteReader& in) {
  std::array<std::byte, N> result{};
  auto bytes = in.get_bytes(N);
  if (bytes.size() == N) std::memcpy(result.data(), bytes.data(), N);
  return result;
}

void put_probe(ByteWriter& out, const Probe& probe) {
  out.put(probe.address);
  put_array(out, probe.token);
}
Probe get_probe(ByteReader& in) {
  Probe probe;
  probe.address = in.get<uint64_t>();
  probe.token = get_array<32>(in);
  return probe;
}

void put_body(ByteWriter& out, const Hello& m) {
  out.put(m.from);
  out.put(m.to);
  out.put(m.size);
  put_array(out, m.nonce);
  out.put_string(std::string_view(m.version).substr(0, kVersionLimit));
}
void put_body(ByteWriter& out, const Challenge& m) {
  put_array(out, m.nonce);
  put_array(out, m.mac);
}
void put_body(ByteWriter& out, const Proof& m) {
  put_array(out, m.mac);
  out.put(m.ring_bytes);
  out.put(static_cast<uint8_t>(m.has_pidfd));
  put_probe(out, m.probe);
}
void put_body(ByteWriter& out, const Welcome& m) {
  out.put(static_cast<uint8_t>(m.has_pidfd));
  put_probe(out, m.probe);
}
void put_body(ByteWriter& out, const Refusal& m) {
  out.put(static_cast<uint8_t>(m.reason));
  out.put_string(shortened(m.text, kRefusalLimit));
}
void put_body(ByteWriter& out, const Arena& m) { out.put(m.bytes); }

Hello get_hello(ByteReader& in) {
  Hello m;
  m.from = in.get<Rank>();
  m.to = in.get<Rank>();
  m.size = in.get<int32_t>();
  m.nonce = get_array<32>(in);
  m.version = in.get_string(kVersionLimit);
  return m;
}
Challenge get_challenge(ByteReader& in) {
  Challenge m;
  m.nonce = get_array<32>(in);
  m.mac = get_array<kMacBytes>(in);
  return m;
}
Proof get_proof(ByteReader& in) {
  Proof m;
  m.mac = get_array<kMacBytes>(in);
  m.ring_bytes = in.get<uint64_t>();
  m.has_pidfd = in.get<uint8_t>() == 1;
  m.probe = get_probe(in);
  return m;
}
Welcome get_welcome(ByteReader& in) {
  Welcome m;
  m.has_pidfd = in.get<uint8_t>() == 1;
  m.probe = get_probe(in);
  return m;
}
Refusal get_refusal(ByteReader& in) {
  Refusal m;
  m.reason = static_cast<RefusalReason>(in.get<uint8_t>());
  m.text = in.get_string(kRefusalLimit);
  return m;
}
Arena get_arena(ByteReader& in) { return {in.get<uint64_t>()}; }

/// The values that no honest peer sends.
bool plausible(const Message& message) {
  if (const auto* proof = std::get_if<Proof>(&message)) {
    return proof->ring_bytes >= kRingLeast && proof->ring_bytes <= kRingMost &&
           proof->ring_bytes % 4096 == 0;
  }
  if (const auto* refusal = std::get_if<Refusal>(&message)) {
    return refusal->reason <= RefusalReason::kMemory;
  }
  if (const auto* arena = std::get_if<Arena>(&message)) return arena->bytes != 0;
  return true;
}

}  // namespace

std::vector<std::byte> encode(const Message& message) {
  ByteWriter out;
  out.put(kMagic);
  out.put(kWireVersion);
  out.put(static_cast<uint8_t>(message.index()));
  std::visit([&](const auto& m) { put_body(out, m); }, message);
  return out.take();
}

Result<Message> decode(std::span<const std::byte> bytes) {
  const Status bad(Code::kCorrupted, "not a packet of Paceline's shared-memory handshake");
  ByteReader in(bytes);
  if (in.get<uint32_t>() != kMagic || in.get<uint16_t>() != kWireVersion) return bad;
  Message message;
  switch (in.get<uint8_t>()) {
    case 0:
      message = get_hello(in);
      break;
    case 1:
      message = get_challenge(in);
      break;
    case 2:
      message = get_proof(in);
      break;
    case 3:
      message = get_welcome(in);
      break;
    case 4:
      message = get_refusal(in);
      break;
    case 5:
      message = get_arena(in);
      break;
    default:
      return bad;
  }
  if (!in.ok() || in.remaining() != 0 || !plausible(message)) return bad;
  return message;
}

Mac prove(std::string_view secret, ProofBy by, const Hello& hello, const Nonce& accepting) {
  const std::string_view role =
      by == ProofBy::kAccepting ? "paceline shm accept" : "paceline shm connect";
  ByteWriter who;
  who.put(hello.from);
  who.put(hello.to);
  who.put(hello.size);
  auto bytes = [](std::string_view text) {
    return std::as_bytes(std::span(text.data(), text.size()));
  };
  return hmac_sha256(bytes(secret), {bytes(role), hello.nonce, accepting, who.bytes()});
}

}  // namespace paceline::wire::shm
