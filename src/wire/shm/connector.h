// Makes connections: listens, connects, and moves the handshake (handshake.h) until each yields a
// Link.
//
// Both ranks of a pair may begin at once. The connection that the lower rank began wins: the lower
// rank refuses the other one as a duplicate, the higher rank gives its own up when the lower's
// arrives. So exactly one stays. A refused rank asks again after a while: the lower rank may have
// died before its own connection came.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "wire/shm/handshake.h"
#include "wire/shm/link.h"
#include "wire/shm/options.h"
#include "wire/shm/packet.h"

namespace paceline::wire::shm {

class Connector {
 public:
  /// A connection that stands, or why a rank can't be reached.
  struct Outcome {
    Rank rank = -1;
    std::unique_ptr<Link> link;
    Status status;
  };

  /// `bell`: this process's eventfd, `epoll`: watches the sockets (with `epoll_key`).
  Connector(const ShmOptions& options, Listener listener, int bell, int epoll, uint64_t epoll_key);

  [[nodiscard]] const std::string& address() const { return listener_.name(); }
  void set_address(Rank rank, std::string name);
  /// Begins, unless a connection stands, is under way or is waited for.
  void connect(Rank rank);
  /// Refuses the rank from now on.
  void forget(Rank rank);
  void progress(Time now, std::vector<Outcome>& outcomes);
  [[nodiscard]] bool busy() const { return !incoming_.empty() || outgoing_count_ > 0; }
  [[nodiscard]] Time next_timer() const;

 private:
  enum class State { kNone, kConnecting, kReady, kGone };
  struct Outgoing {
    Fd socket;
    Hello hello;
    SharedMemory memory;
    uint64_t ring_bytes = 0;
    bool proved = false;
    Time retry_at = 0;
  };
  struct Incoming {
    Fd socket;
    std::optional<Hello> hello;
    Nonce nonce{};
    Time deadline = 0;
    bool done = false;
  };
  struct Candidate {
    std::string address;
    State state = State::kNone;
    pid_t pid = 0;  ///< kReady: of the process at the other end; 0: this namespace can't name it
    std::unique_ptr<Outgoing> outgoing;
  };

  void listen_for(uint32_t events) const;
  void stop_listening(Time now);
  void accept_all(Time now);
  void step_incoming(Incoming& in, Time now, std::vector<Outcome>& outcomes);
  void take_hello(Incoming& in, const Hello& hello);
  void take_proof(Incoming& in, const Proof& proof, Packet& packet, std::vector<Outcome>& outcomes);
  void refuse(Incoming& in, RefusalReason reason, const std::string& text);
  void step_outgoing(Rank rank, Time now, std::vector<Outcome>& outcomes);
  void begin(Rank rank, Time now, std::vector<Outcome>& outcomes);
  Status take_challenge(Rank rank, const Challenge& challenge);
  void take_welcome(Rank rank, const Welcome& welcome, Packet& packet,
                    std::vector<Outcome>& outcomes);
  void take_refusal(Rank rank, const Refusal& refusal, Time now, std::vector<Outcome>& outcomes);
  void fail(Rank rank, Status why, std::vector<Outcome>& outcomes);
  void drop_outgoing(Rank rank);
  Result<SharedMemory> make_rings(uint64_t& ring_bytes) const;
  std::string vm_reason(pid_t pid, const Probe& probe) const;
  void watch(int fd) const;
  Candidate& of(Rank rank) { return candidates_[static_cast<std::size_t>(rank)]; }

  const ShmOptions& options_;
  Listener listener_;
  Time listen_again_at_ = kNever;  ///< kNever: it is listened to
  int bell_;
  int epoll_;
  uint64_t epoll_key_;
  Fd pidfd_;  ///< of this process
  ProbeToken token_{};
  std::vector<Candidate> candidates_;
  std::vector<Rank> active_;  ///< ranks with an Outgoing
  std::size_t outgoing_count_ = 0;
  std::list<Incoming> incoming_;
};

}  // namespace paceline::wire::shm
