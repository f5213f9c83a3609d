// The message protocol between this rank and one peer, without sockets, threads or a clock of its
// own: the same code runs over TCP flows (tcp/) and over the simulated packet network (fake/).
//
// How a message travels:
//  - up to the eager limit: at once, as one sequenced frame; the session keeps a copy until it is
//  acknowledged. A
//    receiver that has not posted yet keeps it; how much it may have to keep is bounded by credits:
//    the sender counts bytes sent, the receiver tells how many it has matched. Without credit the
//    sender makes an offer and waits for the receive, so that no message blocks another, and the
//    message travels as a longer one does.
//  - longer: the receiver announces its posted receive (ready: tag, digest, capacity, its own
//  number for it);
//    then pieces of `piece_bytes` travel, on any flow, in any order, straight from the sender's
//    memory into the receiver's; a bitmap drops duplicates; when the last one is there the receiver
//    says done and the send completes. So a broken flow costs nothing but the pieces that it
//    carried.
//  - a sender whose long message waits offers it after a while: a receive that is too small for it,
//  and so did not
//    announce itself, is found out.
//
// Reliable links (TCP) lose frames only with their connection: flow_broken() and rewind_control()
// bring back what was not acknowledged. On lossy links every piece is acknowledged, and what stays
// unacknowledged for a retransmission time-out (RFC 6298) is sent again.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "wire/channel.h"
#include "wire/frame.h"
#include "wire/spare.h"

namespace paceline::wire {

struct ProtocolOptions {
  uint32_t piece_bytes = 256 * 1024;  ///< a multiple of kPieceAlign, the same on all ranks
  uint32_t eager_limit = 64 * 1024;   ///< longer messages wait for their receive
  uint64_t eager_budget =
      256 * 1024;               ///< bytes per peer that may lie copied here, and unmatched there
  bool lossy = false;           ///< the link may lose, repeat, reorder, corrupt single frames
  bool payload_sum = false;     ///< CRC-32C over payloads too
  uint32_t window_pieces = 64;  ///< lossy: pieces on their way to one peer
  Time minimum_rto = 5 * kMillisecond;  ///< lossy: bounds of the retransmission time-out
  Time maximum_rto = kSecond;
  Time acknowledge_after =
      20 * kMillisecond;  ///< an acknowledgement waits this long for a frame to ride on
  Time offer_after = 200 * kMillisecond;  ///< a long message waits this long before it is offered
  Time peer_timeout = 30 * kSecond;       ///< a peer silent for so long is lost
  Time heartbeat = 0;  ///< silence after which a ping is sent; 0: peer_timeout / 8
};

/// What all sessions of one channel share.
struct Shared {
  ProtocolOptions options;
  Events events;  ///< what progress() will hand out
  Counters counters;
  Time now = 0;    ///< of the current, or the last, progress()
  Time grace = 0;  ///< silence before this time counts for nothing (this process itself was asleep)
  Status aborted;  ///< not ok after abort()
  Interlude* interlude = nullptr;  ///< around long copies
  Spare spare;
};

/// Where the payload of a piece belongs.
struct Placement {
  enum class Kind {
    kDiscard,    ///< read it to nowhere: a duplicate, or its receive has ended
    kBuffer,     ///< read it to `at`
    kSink,       ///< read it to a scratch buffer and hand that to placed()
    kViolation,  ///< no correct peer sends this
  };
  Kind kind = Kind::kDiscard;
  std::byte* at = nullptr;
};

/// A piece that is leaving: header fields and where its payload lies in the caller's memory.
struct Piece {
  Frame frame;
  const std::byte* data = nullptr;
  uint32_t slot = 0;
  uint32_t generation = 0;
  bool is_repeat = false;
};

class Session {
 public:
  /// `name` is "rank 3 (host b)".
  Session(Shared& shared, Rank peer, std::string name);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // What the caller wants. Completions go to shared.events, at once where nothing has to be waited
  // for.
  void send(Tag tag, uint32_t digest, std::span<const std::byte> data, uint64_t cookie);
  void receive(Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie);
  void note(std::span<const std::byte> bytes);
  void goodbye();

  // The control stream: sequenced frames, acknowledgements, pings.
  [[nodiscard]] bool has_control() const;
  /// Appends the next frame to `out`; false when there is none.
  bool pull_control(std::vector<std::byte>& out);
  /// Everything unacknowledged leaves again.
  void rewind_control();
  /// The connection that carried it broke: besides, no timer asks for an acknowledgement until there is one again.
  void control_lost();
  void control_regained();
  /// True when no sequenced frame waits for its acknowledgement.
  [[nodiscard]] bool all_acknowledged() const { return outgoing_.empty(); }
  [[nodiscard]] bool all_control_pulled() const { return cursor_ == outgoing_.size(); }

  // Pieces.
  [[nodiscard]] bool has_pieces() const;
  /// The next piece, to leave on `flow` (0 … kMaxFlows - 1).
  bool pull_piece(uint32_t flow, Piece& piece);
  /// The caller's memory is not read any more for this piece. Once for each piece that was pulled.
  void piece_written(const Piece& piece);
  /// Pieces that `flow` carried and that are not known to have arrived leave again.
  void flow_broken(uint32_t flow);

  // What came. A status that is not ok: the peer broke the protocol.
  Status take_control(const Frame& frame, std::span<const std::byte> payload);
  [[nodiscard]] Placement place(const Frame& frame);
  /// The payload is complete: in the buffer that place() named, or (for a sink) in `scratch`.
  Status placed(const Frame& frame, std::span<const std::byte> scratch);
  /// Any sign of life from the peer.
  void heard() { heard_at_ = shared_.now; }

  // Time.
  [[nodiscard]] Time next_timer() const;
  /// Does what is due at shared.now; not ok: the peer has been silent for too long.
  Status on_timer();

  // The end.
  /// Completes every request with `why`; the session goes on (abort of the caller).
  void cancel_all(const Status& why);
  /// Completes every request, present and later, with `why`. Adds a Loss if `announce`.
  void lose(const Status& why, bool announce);
  [[nodiscard]] const Status& lost() const { return lost_; }
  [[nodiscard]] bool departed() const { return departed_; }
  /// True while the caller waits for this peer.
  [[nodiscard]] bool has_requests() const {
    return !sends_.empty() || !started_.empty() || !receives_.empty();
  }
  /// True while pieces of a long message have left, or may have, that the peer has not confirmed.
  [[nodiscard]] bool has_started_sends() const { return !started_.empty(); }
  /// True while a flow reads the caller's memory.
  [[nodiscard]] bool is_writing() const { return writing_ != 0; }
  [[nodiscard]] Rank peer() const { return peer_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  /// Its host became known after its first words.
  void rename(std::string name) { name_ = std::move(name); }
  [[nodiscard]] Time heard_at() const { return heard_at_; }
  static constexpr uint32_t kMaxFlows = 64;

 private:
  struct SendOp {
    Tag tag = 0;
    uint32_t digest = 0;
    std::span<const std::byte> data;
    uint64_t cookie = 0;
    uint64_t message = 0;  ///< the receiver's number; 0: waits for its receive
    uint32_t generation = 0;
    uint32_t pieces = 0;
    uint32_t next = 0;     ///< pieces before this one have left at least once
    uint32_t writing = 0;  ///< pulled, not yet written
    uint32_t fresh = 0;    ///< of these, those that leave for the first time
    bool used = false;
    bool offered = false;
    bool queued = false;          ///< in ready_
    std::optional<Status> end;    ///< ends so as soon as no flow reads it
    std::vector<uint8_t> where;   ///< per piece: kNowhere, kArrived or 1 + flow
    std::vector<uint32_t> again;  ///< pieces to send once more
  };
  struct ReceiveOp {
    Tag tag = 0;
    uint32_t digest = 0;
    Inbox inbox;
    uint64_t cookie = 0;
    uint32_t generation = 0;
    bool used = false;
    bool announced = false;  ///< a kReady was sent
    bool total_known = false;
    uint64_t total = 0;
    uint32_t missing = 0;        ///< pieces
    std::vector<uint64_t> seen;  ///< bitmap of pieces
  };
  struct Announced {  ///< a kReady whose send is not posted yet
    uint64_t message = 0;
    uint64_t capacity = 0;
    uint32_t digest = 0;
  };
  struct Unexpected {  ///< an eager message or an offer whose receive is not posted yet
    bool is_offer = false;
    uint32_t digest = 0;
    uint64_t total = 0;
    std::vector<std::byte> payload;
  };
  struct Outgoing {
    Frame frame;
    std::vector<std::byte> payload;
  };
  struct Flying {
    uint32_t slot = 0;
    uint32_t generation = 0;
    uint32_t index = 0;
    Time sent = 0;
    bool repeated = false;
  };
  struct Waiting {
    uint32_t slot = 0;
    uint32_t generation = 0;
    Time since = 0;
  };
  static constexpr uint8_t kNowhere = 0;
  static constexpr uint8_t kArrived = 255;

  // protocol.cc
  void complete(uint64_t cookie, uint64_t bytes, Status status);
  void push(Frame frame, std::span<const std::byte> payload = {});
  void push_reject(Tag tag, uint64_t message, const Status& why);
  [[nodiscard]] Status mismatch(Tag tag, std::string what) const;
  [[nodiscard]] Time retransmission_timeout() const { return rto_; }
  void sample_round_trip(Time rtt);
  void acknowledged_up_to(uint64_t sequence, uint32_t freed);
  void schedule_acknowledgement(bool soon);
  [[nodiscard]] bool refuse_request(uint64_t cookie);
  Status process(const Frame& frame, std::span<const std::byte> payload);
  Status on_reject(const Frame& frame, std::span<const std::byte> payload);

  // protocol_send.cc
  uint32_t new_send(Tag tag, uint32_t digest, std::span<const std::byte> data, uint64_t cookie);
  /// Short, and there is credit.
  [[nodiscard]] bool may_be_eager(uint64_t bytes) const;
  void send_eager(Tag tag, uint32_t digest, std::span<const std::byte> data, uint64_t cookie);
  void start_send(uint32_t slot, const Announced& to);
  void end_send(uint32_t slot, Status status);
  void queue_send(uint32_t slot, bool first);
  void offer(uint32_t slot);
  Status on_ready(const Frame& frame);
  Status on_done(const Frame& frame);
  Status on_withdraw(const Frame& frame);
  void on_piece_ack(const Frame& frame);
  [[nodiscard]] uint32_t piece_length(const SendOp& op, uint32_t index) const;
  void forget_landed_pieces();
  void resend_overdue_pieces();
  [[nodiscard]] static uint64_t eager_cost(uint64_t bytes) { return bytes + 128; }
  [[nodiscard]] Status fits(Tag tag, uint32_t mine, uint32_t theirs, uint64_t length,
                            uint64_t capacity) const;

  // protocol_receive.cc
  void announce(uint32_t slot);
  void end_receive(uint32_t slot, uint64_t bytes, Status status);
  Status on_eager(const Frame& frame, std::span<const std::byte> payload);
  Status on_offer(const Frame& frame);
  void deliver_short(ReceiveOp& op, std::span<const std::byte> payload);
  ReceiveOp* find_receive(uint64_t message, uint32_t* slot = nullptr);

  Shared& shared_;
  const Rank peer_;
  std::string name_;
  Status lost_;
  bool departed_ = false;

  // Sequenced frames out: outgoing_[i] has sequence number first_ + i; those before cursor_ have
  // left.
  std::deque<Outgoing> outgoing_;
  uint64_t first_ = 1;
  std::size_t cursor_ = 0;
  uint64_t sent_up_to_ = 0;  ///< highest sequence number that ever left
  Time control_sent_at_ =
      0;  ///< lossy: when the oldest unacknowledged frame left, or last progress
  std::vector<std::vector<std::byte>> spare_;  ///< payload buffers for reuse
  bool want_ping_ = false;
  bool want_pong_ = false;
  std::deque<Frame> piece_acks_;

  // Sequenced frames in.
  uint64_t taken_ = 0;  ///< all up to this number were processed
  std::map<uint64_t, std::pair<Frame, std::vector<std::byte>>>
      early_frames_;             ///< lossy: out of order
  uint32_t unacknowledged_ = 0;  ///< frames taken since the last acknowledgement left
  Time acknowledge_at_ = kNever;
  bool connected_ = true;  ///< false from control_lost() to control_regained()

  // Eager credit.
  uint64_t eager_sent_ = 0;
  uint64_t eager_matched_by_peer_ = 0;
  uint64_t eager_matched_ = 0;
  uint64_t eager_told_ = 0;
  uint64_t eager_held_ = 0;  ///< bytes of unexpected messages kept here

  std::vector<SendOp> send_ops_;
  std::vector<uint32_t> free_sends_;
  std::unordered_map<Tag, uint32_t> sends_;         ///< waiting for their receive
  std::unordered_map<uint64_t, uint32_t> started_;  ///< by the receiver's number
  std::unordered_map<Tag, Announced> announced_;
  std::deque<Waiting> ready_;
  std::deque<Waiting> to_offer_;
  std::deque<Flying> flying_;  ///< lossy
  uint32_t flying_count_ = 0;
  uint64_t writing_ = 0;

  std::vector<ReceiveOp> receive_ops_;
  std::vector<uint32_t> free_receives_;
  std::unordered_map<Tag, uint32_t> receives_;
  std::unordered_map<Tag, Unexpected> unexpected_;

  Time heard_at_ = 0;
  Time pinged_at_ = 0;
  Time round_trip_ = 0;
  Time variation_ = 0;
  Time rto_ = 0;
};

}  // namespace paceline::wire
