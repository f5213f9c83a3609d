// The wire format between our key-value server and its clients, and its parser.
//
//   server → client: kChallenge with a nonce of 32 bytes
//   client → server: kProof with its nonce and HMAC(secret, "kv client", server's nonce, client's)
//   server → client: kWelcome with HMAC(secret, "kv server", server's nonce, client's)
//   client → server: kPut with key and value, kGet with a key (answered once the key is there)
//   server → client: kValue with key and value
//   server → client: kRefused with a sentence
//
// Every frame: length of what follows (32 bits, at most kFrameLimit), kind (8 bits), fields. The
// MACs prove that both sides know the job's secret; what follows is not encrypted.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/hmac.h"
#include "base/status.h"
#include "bootstrap/kv.h"

namespace paceline::bootstrap {

enum class FrameKind : uint8_t {
  kChallenge = 1,
  kProof = 2,
  kWelcome = 3,
  kPut = 4,
  kGet = 5,
  kValue = 6,
  kRefused = 7,
};
inline constexpr std::size_t kFrameLimit = 1 + 8 + kKeyLimit + kValueLimit;
using Nonce = std::array<std::byte, 32>;

struct KvFrame {
  FrameKind kind = FrameKind::kGet;
  Nonce nonce{};
  Mac mac{};
  std::string key;
  std::string value;  ///< kRefused: the sentence
};

void append_frame(const KvFrame& frame, std::vector<std::byte>& out);
/// Takes the first whole frame off `in`. nullopt: more bytes are needed. kCorrupted: these are not
/// ours.
Result<std::optional<KvFrame>> take_frame(std::vector<std::byte>& in);

Mac client_proof(std::span<const std::byte> secret, const Nonce& server, const Nonce& client);
Mac server_proof(std::span<const std::byte> secret, const Nonce& server, const Nonce& client);

}  // namespace paceline::bootstrap
