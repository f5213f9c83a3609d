// The state of the TCP channel. channel.cc: the Channel interface and the event loop; connect.cc:
// dialing, accepting, handshakes, broken connections.
#pragma once

#include <atomic>
#include <memory>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "wire/tcp/connection.h"
#include "wire/tcp/tcp_channel.h"

namespace paceline::wire {

/// What the channel knows of one other rank. Made at its first use.
struct TcpPeer {
  Rank rank = -1;
  std::string name;  ///< "rank 3 (host b)"
  std::unique_ptr<Session> session;
  uint64_t incarnation = 0;  ///< 0: not met yet
  Connection* control = nullptr;
  Connection* dialing = nullptr;  ///< the control connection that we are opening
  uint32_t control_count = 0;     ///< control connections so far
  Time redial_at = kNever;
  Time backoff = 0;
  std::vector<Connection*> out;      ///< data flows that we send on; nullptr: not open
  std::vector<Time> flow_redial_at;  ///< parallel to `out`
  std::vector<Connection*> in;       ///< data flows that the peer opened
  int violations = 0;
  std::string last_error;  ///< of connecting, for messages
  Time no_data_since =
      kNever;  ///< pieces wait, and no call for a data connection has been answered
  bool dirty = false;
  bool is_waiting = false;  ///< pieces that its flows do not take yet
  Time waited_at = 0;       ///< the last time
  Time timer_at = kNever;   ///< earliest entry in the timer queue
};

class TcpChannelImpl final : public TcpChannel {
 public:
  TcpChannelImpl(TcpOptions options, Endpoint local, Descriptor listener, Descriptor epoll,
                 Descriptor waker);
  ~TcpChannelImpl() override;
  TcpChannelImpl(const TcpChannelImpl&) = delete;
  TcpChannelImpl& operator=(const TcpChannelImpl&) = delete;

  void send(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
            uint64_t cookie) override;
  void receive(Rank peer, Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) override;
  void post_note(Rank peer, std::span<const std::byte> bytes) override;
  [[nodiscard]] bool notes_waiting() const override;
  bool progress(Time now, Events& events) override;
  [[nodiscard]] Time next_timer() const override;
  [[nodiscard]] int poll_fd() const override { return epoll_.get(); }
  bool prepare_wait() override;
  void wake() override;
  void drop_peer(Rank peer, const Status& why) override;
  void abort(const Status& why) override;
  void set_interlude(Interlude* interlude) override { shared_.interlude = interlude; }
  void limit_rate(uint64_t bytes_per_second) override {
    // Without a wake(): where something waits, progress() is called soon anyway.
    rate_limit_ = bytes_per_second;
  }
  [[nodiscard]] Counters counters() const override {
    Counters c = shared_.counters;
    c.network = c.wire_sent + c.wire_received;
    return c;
  }
  [[nodiscard]] Packets packets() const override { return packets_; }
  [[nodiscard]] std::string describe() const override;

  [[nodiscard]] std::string address() const override;
  Status set_peer(Rank peer, const std::string& address, const std::string& host) override;
  [[nodiscard]] uint64_t incarnation() const override { return identity_.incarnation; }
  bool break_flow(Rank peer, int flow) override;

 private:
  struct Timer {
    Time at;
    Rank peer;
    bool operator>(const Timer& other) const { return at > other.at; }
  };

  // channel.cc
  TcpPeer* use_peer(Rank rank, uint64_t cookie, bool has_cookie);
  TcpPeer& peer_state(Rank rank);
  [[nodiscard]] std::string peer_name(Rank rank) const;
  void mark(TcpPeer& peer);
  void flush_dirty();
  void flush_control(TcpPeer& peer);
  void flush_data(TcpPeer& peer);
  void feed_flows(TcpPeer& peer);
  void note_backlog(TcpPeer& peer);
  void limit_flows();
  void count_waiting();
  void run_timers();
  void schedule(TcpPeer& peer);
  [[nodiscard]] Time peer_timer(const TcpPeer& peer) const;
  void handle_event(Connection& c, uint32_t what);
  void handle_control(Connection& c, uint32_t what);
  void handle_data_in(Connection& c);
  void lose(TcpPeer& peer, const Status& why, bool announce = true);
  void stop_pieces(TcpPeer& peer);
  void collect(Events& events);
  void leave();

  // connect.cc
  Connection* add(Descriptor fd, Connection::Role role, uint32_t interest);
  void close(Connection& c);
  void ask_for_write(Connection& c, bool want);
  void accept_some();
  void evict_half_open();
  void dial(TcpPeer& peer, Purpose purpose);
  void handle_handshake(Connection& c, uint32_t what);
  [[nodiscard]] bool is_second_call(const Handshake& h) const;
  bool finish_connect(Connection& c);
  void decide(Connection& c);
  void established(Connection& c);
  void establish_control(Connection& c, TcpPeer& peer);
  void dial_failed(Connection& c, const Status& why, bool is_final);
  void data_call_failed(TcpPeer& peer, uint32_t flow);
  void broken(Connection& c, const IoResult& result);
  void violated(Connection& c, const Status& what);
  void redial_later(TcpPeer& peer, Time delay);
  void run_connection_timers(TcpPeer& peer);
  void expire_handshakes();
  [[nodiscard]] unsigned user_timeout_ms() const;

  TcpOptions options_;
  Identity identity_;
  Endpoint local_;
  Descriptor epoll_;
  Descriptor listener_;
  Descriptor waker_;
  Packets packets_;  ///< the interface's until a connection tells better
  PageLender lender_;
  Shared shared_;
  bool listener_paused_ = false;
  Time listener_resume_at_ = kNever;

  struct Known {
    std::string address;
    std::string host;
    bool lends = false;  ///< long pieces leave from the caller's pages
  };
  std::vector<Known> book_;
  std::unordered_map<Rank, std::unique_ptr<TcpPeer>> peers_;
  std::vector<TcpPeer*> dirty_;
  std::unordered_map<Connection*, std::unique_ptr<Connection>> connections_;
  std::vector<std::unique_ptr<Connection>> graveyard_;  ///< closed during this progress()
  std::vector<Connection*> half_open_;                  ///< in order of arrival
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
  Time handshake_check_at_ = kNever;
  bool leaving_ = false;
  std::atomic<uint64_t> rate_limit_{0};  ///< bytes a second of all that leaves; 0: none
  uint64_t flows_limited_to_ = 0;        ///< each, now
  int flows_in_use_ = options_.flows;    ///< of each peer's, now
  int waiting_ = 0;                      ///< peers with pieces that their flows do not take yet
  Time waits_since_ = kNever;
  Time counted_at_ = 0;
  uint64_t sharing_ = 1;  ///< peers that have waited lately
};

}  // namespace paceline::wire
