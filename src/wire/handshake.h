// How two ranks convince each other on a new connection, sans-IO: bytes in, bytes out.
//
//   connector                                   acceptor
//     hello: versions, job, rank, nonce a   →
//                                           ←   answer: versions, rank, nonce b, HMAC(secret,
//                                           "acceptor", hello, answer)
//     proof: HMAC(secret, "connector", …)   →
//                                           ←   accept, or refuse with a sentence
//
// Neither side proves anything over bytes that only the other chose, and the labels keep one side's
// proof from being played back as the other's. What is compared: the wire's version first (another
// version may have another hello), the job, the build, the piece size, the rank that was meant, and its
// incarnation (a process that took a dead one's port is not that one). Settings are compared by name when a job is
// joined (bootstrap/agreement.h), where the sentence can say which differs.
//
// Each message: magic "PCLN", kind, a zero byte, length of the body (16 bits, at most
// kMaxHandshakeBody), body.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/hmac.h"
#include "base/status.h"
#include "base/types.h"
#include "wire/frame.h"

namespace paceline::wire {

inline constexpr std::size_t kMaxHandshakeBody = 2048;

/// Who this process is, the same for all its connections.
struct Identity {
  std::vector<std::byte> secret;  ///< the job's; empty: connections are not authenticated (tests)
  std::string job_id;             ///< at most 128 bytes
  std::string build;              ///< version of this library, at most 64 bytes
  uint32_t piece_bytes = 0;
  Rank rank = 0;
  uint64_t incarnation = 0;  ///< random, of this channel; not 0
  std::string name;          ///< "rank 2 (host a)" for messages
  uint32_t wire_version = kWireVersion;
};

/// What a connection is for.
struct Purpose {
  bool is_control = true;
  uint8_t flow = 0;    ///< of the connector's data flows
  uint32_t count = 0;  ///< control connections that the connector has seen to this peer
};

class Handshake {
 public:
  enum class State {
    kRunning,
    kProven,  ///< acceptor: the peer is who it says; call accept() or refuse()
    kDone,
    kDuplicate,  ///< connector: refused because another connection serves; count() says how many
                 ///< there were
    kFailed,     ///< see status()
  };
  /// What a failure is about. Many have one code: a port scan's first word and another secret are both
  /// kUnauthenticated.
  enum class Complaint {
    kProtocol,  ///< no message of ours
    kOrder,     ///< a message out of its turn
    kForm,      ///< a message that can't be read
    kVersion,
    kJob,
    kSettings,
    kSecret,
    kPlace,    ///< another rank was looked for, or another process answers
    kMember,   ///< it has proven itself, and can't be that rank
    kVerdict,  ///< connector: what the other side complains of
  };

  /// `incarnation` 0: not known yet. `name` is the peer's, for messages.
  static Handshake connector(const Identity& self, Rank peer, uint64_t incarnation,
                             std::string name, Purpose purpose, std::vector<std::byte>& out);
  static Handshake acceptor(const Identity& self);

  /// Takes from `in` what belongs to the handshake, appends answers to `out`; returns how many
  /// bytes it took.
  std::size_t feed(std::span<const std::byte> in, std::vector<std::byte>& out);

  void accept(uint32_t count, std::vector<std::byte>& out);
  /// With a complaint of kMember.
  void refuse(const Status& why, bool is_duplicate, uint32_t count, std::vector<std::byte>& out);

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] const Status& status() const { return status_; }
  /// Of a kFailed one.
  [[nodiscard]] Complaint complaint() const { return complaint_; }
  /// True when kFailed speaks of the peer itself (versions, secret, another process), so that
  /// trying again is useless.
  [[nodiscard]] bool is_final() const { return final_; }
  /// True while the other side has not said anything.
  [[nodiscard]] bool is_silent() const { return buffer_.empty() && hello_.empty(); }
  [[nodiscard]] Rank peer() const { return peer_; }
  [[nodiscard]] uint64_t incarnation() const { return incarnation_; }
  [[nodiscard]] const Purpose& purpose() const { return purpose_; }
  [[nodiscard]] uint32_t count() const { return count_; }

 private:
  explicit Handshake(const Identity& self) : self_(&self) {}
  void take(uint8_t kind, std::span<const std::byte> body, std::vector<std::byte>& out);
  void on_hello(std::span<const std::byte> body, std::vector<std::byte>& out);
  void on_answer(std::span<const std::byte> body, std::vector<std::byte>& out);
  void on_proof(std::span<const std::byte> body, std::vector<std::byte>& out);
  void on_verdict(uint8_t kind, std::span<const std::byte> body);
  void fail(Complaint about, Status why, bool is_final);
  void turn_away(Complaint about, const Status& why, std::vector<std::byte>& out);
  void send_refusal(const Status& why, bool is_duplicate, uint32_t count,
                    std::vector<std::byte>& out);

  const Identity* self_;
  State state_ = State::kRunning;
  Status status_;
  Complaint complaint_ = Complaint::kProtocol;
  bool final_ = false;
  bool is_connector_ = false;
  bool answered_ = false;
  Rank peer_ = -1;
  uint64_t incarnation_ = 0;
  std::string name_;
  Purpose purpose_;
  uint32_t count_ = 0;
  std::vector<std::byte> buffer_;  ///< an incomplete message
  std::vector<std::byte> hello_;
  std::vector<std::byte> answer_;  ///< without its code
};

}  // namespace paceline::wire
