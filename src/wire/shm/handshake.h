// What two processes say to each other before they share memory: who they are, and that both know
// the job's secret. Pure functions over bytes; connector.cc moves them.
//
//   connecting                              accepting
//     Hello {versions, ranks, nonce c}  ──▶
//                                       ◀──  Challenge {nonce a, mac("accept", c, a, ranks)}
//     Proof {mac("connect", a, c, ranks),
//            ring, probe} + memory, bell ──▶
//                                       ◀──  Welcome {probe} + bell
// A descriptor is sent only to a peer that has proved itself, and looked at only after the proof
// was checked. Either side may answer Refusal instead and close. The nonces are fresh, so nothing
// can be replayed; the words differ, so that no answer can be reflected.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/hmac.h"
#include "base/status.h"
#include "base/types.h"
#include "wire/shm/vm_read.h"

namespace paceline::wire::shm {

using Nonce = std::array<std::byte, 32>;

struct Hello {
  Rank from = -1;
  Rank to = -1;
  int32_t size = 0;     ///< ranks of the job
  std::string version;  ///< of wire, build and settings: must be equal
  Nonce nonce{};
};
struct Challenge {
  Nonce nonce{};
  Mac mac{};
};
struct Probe {
  uint64_t address = 0;
  ProbeToken token{};
};
struct Proof {
  Mac mac{};
  uint64_t ring_bytes = 0;
  bool has_pidfd = false;
  Probe probe;
};
struct Welcome {
  bool has_pidfd = false;
  Probe probe;
};
/// kDuplicate is no failure: the other connection of the pair is used.
enum class RefusalReason : uint8_t {
  kDuplicate = 0,
  kSecret = 1,
  kVersion = 2,
  kMember = 3,
  kMemory = 4
};
struct Refusal {
  RefusalReason reason = RefusalReason::kMember;
  std::string text;
};
/// After the handshake: this process's memory of ShmAllocator, by descriptor.
struct Arena {
  uint64_t bytes = 0;
};

using Message = std::variant<Hello, Challenge, Proof, Welcome, Refusal, Arena>;

std::vector<std::byte> encode(const Message& message);
/// kCorrupted: not a message of this protocol.
Result<Message> decode(std::span<const std::byte> bytes);

/// The code that one side proves its knowledge of the secret with.
enum class ProofBy { kAccepting, kConnecting };
Mac prove(std::string_view secret, ProofBy by, const Hello& hello, const Nonce& accepting);

inline constexpr std::size_t kVersionLimit = 256;
inline constexpr std::size_t kRefusalLimit = 512;
inline constexpr uint64_t kRingLeast = 64 * 1024;
inline constexpr uint64_t kRingMost = 64 * 1024 * 1024;

}  // namespace paceline::wire::shm
