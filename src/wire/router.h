// One Channel over several ways: ranks of the same node by the near channel (shared memory), all others by the far
// one (TCP), and messages to oneself by a copy.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "wire/channel.h"

namespace paceline::wire {

struct RouterOptions {
  Rank rank = 0;
  Rank size = 1;
  std::unique_ptr<Channel> near;  ///< may be null
  std::vector<Rank> near_ranks;   ///< peers that `near` reaches; this rank itself is ignored
  std::unique_ptr<Channel> far;   ///< may be null when `near` reaches everybody
};

class Router final : public Channel {
 public:
  explicit Router(RouterOptions options);
  ~Router() override;
  Router(const Router&) = delete;
  Router& operator=(const Router&) = delete;

  void send(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
            uint64_t cookie) override;
  void send_with_answer(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
                        uint64_t cookie, const Answer& answer) override;
  void receive(Rank peer, Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) override;
  std::span<const std::byte> open_held(Rank peer, uint64_t held) override {
    return way(peer)->open_held(peer, held);
  }
  bool close_held(Rank peer, uint64_t held) override { return way(peer)->close_held(peer, held); }
  void post_note(Rank peer, std::span<const std::byte> bytes) override;
  [[nodiscard]] bool notes_waiting() const override {
    return (near_ && near_->notes_waiting()) || (far_ && far_->notes_waiting());
  }
  bool progress(Time now, Events& events) override;
  [[nodiscard]] Time next_timer() const override;
  [[nodiscard]] int poll_fd() const override { return poll_fd_; }
  bool prepare_wait() override;
  void wake() override;
  void drop_peer(Rank peer, const Status& why) override;
  void abort(const Status& why) override;
  void set_interlude(Interlude* interlude) override {
    if (near_) near_->set_interlude(interlude);
    if (far_) far_->set_interlude(interlude);
  }
  void set_workers(Workers* workers) override {
    if (near_) near_->set_workers(workers);
    if (far_) far_->set_workers(workers);
  }
  void limit_rate(uint64_t bytes_per_second) override {
    if (far_) far_->limit_rate(bytes_per_second);
  }
  [[nodiscard]] Counters counters() const override;
  [[nodiscard]] Packets packets() const override { return far_ ? far_->packets() : Packets{}; }
  [[nodiscard]] std::string describe() const override;

 private:
  struct SelfSend {
    uint32_t digest = 0;
    std::span<const std::byte> data;
    uint64_t cookie = 0;
  };
  struct SelfReceive {
    uint32_t digest = 0;
    Inbox inbox;
    uint64_t cookie = 0;
  };
  [[nodiscard]] Channel* way(Rank peer) const;
  bool refuse(Rank peer, uint64_t cookie);
  void match_self(Tag tag);
  void end_self(uint64_t cookie, uint64_t bytes, const Status& status);

  Rank rank_;
  Rank size_;
  std::unique_ptr<Channel> near_;
  std::unique_ptr<Channel> far_;
  std::vector<bool> is_near_;
  int poll_fd_ = -1;
  int epoll_ = -1;  ///< over both channels' descriptors, where there are two
  int waker_ = -1;  ///< where no channel has a descriptor
  Status aborted_;
  Events events_;  ///< of messages to oneself
  Counters self_;
  std::unordered_map<Tag, SelfSend> self_sends_;
  std::unordered_map<Tag, SelfReceive> self_receives_;
  Time far_polled_at_ = 0;
  Time far_active_at_ = 0;
  bool far_used_ = false;
};

}  // namespace paceline::wire
