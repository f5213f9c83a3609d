// A channel whose first events arrived before its owner listened: a rank that joined earlier may
// already speak to the engine while bootstrap still reads here.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "wire/channel.h"

namespace paceline::bootstrap {

class EarlyChannel final : public wire::Channel {
 public:
  EarlyChannel(std::unique_ptr<wire::Channel> below, wire::Events early)
      : below_(std::move(below)), early_(std::move(early)) {}

  void send(Rank peer, wire::Tag tag, uint32_t digest, std::span<const std::byte> data,
            uint64_t cookie) override {
    below_->send(peer, tag, digest, data, cookie);
  }
  void send_with_answer(Rank peer, wire::Tag tag, uint32_t digest, std::span<const std::byte> data,
                        uint64_t cookie, const wire::Answer& answer) override {
    below_->send_with_answer(peer, tag, digest, data, cookie, answer);
  }
  void receive(Rank peer, wire::Tag tag, uint32_t digest, wire::Inbox inbox,
               uint64_t cookie) override {
    below_->receive(peer, tag, digest, inbox, cookie);
  }
  void post_note(Rank peer, std::span<const std::byte> bytes) override {
    below_->post_note(peer, bytes);
  }
  [[nodiscard]] bool notes_waiting() const override { return below_->notes_waiting(); }
  void set_interlude(Interlude* interlude) override { below_->set_interlude(interlude); }
  void set_workers(Workers* workers) override { below_->set_workers(workers); }
  bool progress(Time now, wire::Events& events) override {
    bool had = !early_.empty();
    for (auto& note : early_.notes) events.notes.push_back(std::move(note));
    for (auto& loss : early_.losses) events.losses.push_back(std::move(loss));
    early_.clear();
    return below_->progress(now, events) || had;
  }
  [[nodiscard]] Time next_timer() const override {
    return early_.empty() ? below_->next_timer() : 0;
  }
  [[nodiscard]] int poll_fd() const override { return below_->poll_fd(); }
  bool prepare_wait() override { return early_.empty() && below_->prepare_wait(); }
  void wake() override { below_->wake(); }
  void drop_peer(Rank peer, const Status& why) override { below_->drop_peer(peer, why); }
  void abort(const Status& why) override { below_->abort(why); }
  void limit_rate(uint64_t bytes_per_second) override { below_->limit_rate(bytes_per_second); }
  [[nodiscard]] Packets packets() const override { return below_->packets(); }
  [[nodiscard]] wire::Counters counters() const override { return below_->counters(); }
  [[nodiscard]] std::string describe() const override { return below_->describe(); }

 private:
  std::unique_ptr<wire::Channel> below_;
  wire::Events early_;
};

}  // namespace paceline::bootstrap
