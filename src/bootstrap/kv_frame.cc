#include "bootstrap/kv_frame.h"

#include <algorithm>

#include "base/bytes.h"

namespace paceline::bootstrap {
namespace {

Status corrupted() { return {Code::kCorrupted, "bytes that no rank of this job sends"}; }

template <std::size_t N>
void read_array(ByteReader& in, std::array<std::byte, N>& into) {
  auto bytes = in.get_bytes(N);
  if (bytes.size() == N) std::copy(bytes.begin(), bytes.end(), into.begin());
}

Mac proof(std::string_view label, std::span<const std::byte> secret, const Nonce& server,
          const Nonce& client) {
  return hmac_sha256(secret, {std::as_bytes(std::span(label)), server, client});
}

}  // namespace

void append_frame(const KvFrame& frame, std::vector<std::byte>& out) {
  ByteWriter body;
  body.put(static_cast<uint8_t>(frame.kind));
  switch (frame.kind) {
    case FrameKind::kChallenge:
      body.put_bytes(frame.nonce);
      break;
    case FrameKind::kProof:
      body.put_bytes(frame.nonce);
      body.put_bytes(frame.mac);
      break;
    case FrameKind::kWelcome:
      body.put_bytes(frame.mac);
      break;
    case FrameKind::kPut:
    case FrameKind::kValue:
      body.put_string(frame.key);
      body.put_string(frame.value);
      break;
    case FrameKind::kGet:
      body.put_string(frame.key);
      break;
    case FrameKind::kRefused:
      body.put_string(frame.value);
      break;
  }
  ByteWriter header;
  header.put(static_cast<uint32_t>(body.bytes().size()));
  out.insert(out.end(), header.bytes().begin(), header.bytes().end());
  out.insert(out.end(), body.bytes().begin(), body.bytes().end());
}

Result<std::optional<KvFrame>> take_frame(std::vector<std::byte>& in) {
  if (in.size() < 4) return std::optional<KvFrame>();
  auto length = ByteReader(in).get<uint32_t>();
  if (length < 1 || length > kFrameLimit) return corrupted();
  if (in.size() < 4 + length) return std::optional<KvFrame>();
  ByteReader reader(std::span<const std::byte>(in).subspan(4, length));
  KvFrame frame;
  auto kind = reader.get<uint8_t>();
  if (kind < 1 || kind > static_cast<uint8_t>(FrameKind::kRefused)) return corrupted();
  frame.kind = static_cast<FrameKind>(kind);
  switch (frame.kind) {
    case FrameKind::kChallenge:
      read_array(reader, frame.nonce);
      break;
    case FrameKind::kProof:
      read_array(reader, frame.nonce);
      read_array(reader, frame.mac);
      break;
    case FrameKind::kWelcome:
      read_array(reader, frame.mac);
      break;
    case FrameKind::kPut:
    case FrameKind::kValue:
      frame.key = reader.get_string(kKeyLimit);
      frame.value = reader.get_string(kValueLimit);
      break;
    case FrameKind::kGet:
      frame.key = reader.get_string(kKeyLimit);
      break;
    case FrameKind::kRefused:
      frame.value = reader.get_string(kValueLimit);
      break;
  }
  if (!reader.ok() || reader.remaining() != 0) return corrupted();
  in.erase(in.begin(), in.begin() + 4 + length);
  return std::optional<KvFrame>(std::move(frame));
}

Mac client_proof(std::span<const std::byte> secret, const Nonce& server, const Nonce& client) {
  return proof("kv client", secret, server, client);
}
Mac server_proof(std::span<const std::byte> secret, const Nonce& server, const Nonce& client) {
  return proof("kv server", secret, server, client);
}

}  // namespace paceline::bootstrap
