#include "wire/router.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace paceline::wire {
namespace {

constexpr std::size_t kSelfPiece =
    256 * 1024;  // sinks get a message to oneself in pieces that stay in the cache
// A far channel that is silent costs a system call to ask: while near messages come and go in microseconds it is
// asked only so often. Its descriptor keeps what arrives meanwhile, so nothing is missed.
constexpr Time kFarQuiet = kMillisecond;
constexpr Time kFarPause = 10 * kMicrosecond;

}  // namespace

Router::Router(RouterOptions options)
    : rank_(options.rank),
      size_(options.size),
      near_(std::move(options.near)),
      far_(std::move(options.far)) {
  is_near_.resize(static_cast<std::size_t>(size_));
  for (Rank r : options.near_ranks) {
    if (near_ && r >= 0 && r < size_ && r != rank_) is_near_[static_cast<std::size_t>(r)] = true;
  }
  std::vector<int> fds;
  bool all_have = true;
  for (Channel* c : {near_.get(), far_.get()}) {
    if (c == nullptr) continue;
    if (c->poll_fd() >= 0) fds.push_back(c->poll_fd());
    if (c->poll_fd() < 0) all_have = false;
  }
  if (fds.empty() && all_have) {
    waker_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    poll_fd_ = waker_;
  } else if (fds.size() == 1 && all_have) {
    poll_fd_ = fds[0];
  } else if (all_have) {
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    for (int fd : fds) {
      epoll_event event{};
      event.events = EPOLLIN;
      ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
    }
    poll_fd_ = epoll_;
  }
}

Router::~Router() {
  if (epoll_ >= 0) ::close(epoll_);
  if (waker_ >= 0) ::close(waker_);
}

Channel* Router::way(Rank peer) const {
  if (peer < 0 || peer >= size_ || peer == rank_) return nullptr;
  return is_near_[static_cast<std::size_t>(peer)] ? near_.get() : far_.get();
}

bool Router::refuse(Rank peer, uint64_t cookie) {
  Status why = aborted_;
  if (peer < 0 || peer >= size_) {
    why = {Code::kInvalidArgument, fmt::format("rank {} in a job of {} ranks", peer, size_)};
  } else if (peer != rank_) {
    if (way(peer) != nullptr) return false;
    why = {Code::kUnavailable, fmt::format("no way leads to rank {}", peer)};
  }
  if (why.is_ok()) return false;
  end_self(cookie, 0, why);
  return true;
}

void Router::end_self(uint64_t cookie, uint64_t bytes, const Status& status) {
  events_.completions.push_back({cookie, bytes, status});
}

void Router::send(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
                  uint64_t cookie) {
  send_with_answer(peer, tag, digest, data, cookie, {});
}

void Router::send_with_answer(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
                              uint64_t cookie, const Answer& answer) {
  if (refuse(peer, cookie)) return;
  if (peer != rank_) {
    Channel* c = way(peer);
    if (c == far_.get()) far_used_ = true;
    c->send_with_answer(peer, tag, digest, data, cookie, answer);
    return;
  }
  if (!self_sends_.try_emplace(tag, SelfSend{digest, data, cookie}).second) {
    end_self(
        cookie, 0,
        {Code::kInvalidArgument, fmt::format("two sends to this rank itself with tag {:#x}", tag)});
    return;
  }
  match_self(tag);
}

void Router::receive(Rank peer, Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) {
  if (refuse(peer, cookie)) return;
  if (peer != rank_) {
    Channel* c = way(peer);
    if (c == far_.get()) far_used_ = true;
    c->receive(peer, tag, digest, inbox, cookie);
    return;
  }
  if (!self_receives_.try_emplace(tag, SelfReceive{digest, inbox, cookie}).second) {
    end_self(cookie, 0,
             {Code::kInvalidArgument,
              fmt::format("two receives from this rank itself with tag {:#x}", tag)});
    return;
  }
  match_self(tag);
}

void Router::match_self(Tag tag) {
  auto s = self_sends_.find(tag);
  auto r = self_receives_.find(tag);
  if (s == self_sends_.end() || r == self_receives_.end()) return;
  SelfSend from = s->second;
  SelfReceive to = r->second;
  self_sends_.erase(s);
  self_receives_.erase(r);
  Status status;
  if (from.digest != 0 && to.digest != 0 && from.digest != to.digest) {
    status = {Code::kMismatch,
              fmt::format("message {:#x} to this rank itself: send and receive belong to different "
                          "operations (digests {:#x} and {:#x})",
                          tag, from.digest, to.digest)};
  } else if (from.data.size() > to.inbox.capacity) {
    status = {Code::kMismatch,
              fmt::format("message {:#x} to this rank itself has {} bytes, its receive takes {}",
                          tag, from.data.size(), to.inbox.capacity)};
  } else if (to.inbox.sink != nullptr) {
    for (std::size_t at = 0; at < from.data.size(); at += kSelfPiece) {
      to.inbox.sink->consume(at,
                             from.data.subspan(at, std::min(kSelfPiece, from.data.size() - at)));
    }
  } else if (!from.data.empty()) {
    std::memmove(to.inbox.into, from.data.data(), from.data.size());
  }
  uint64_t bytes = status.is_ok() ? from.data.size() : 0;
  self_.payload_sent += bytes;
  self_.payload_received += bytes;
  end_self(from.cookie, bytes, status);
  end_self(to.cookie, bytes, status);
}

void Router::post_note(Rank peer, std::span<const std::byte> bytes) {
  if (peer == rank_) {
    events_.notes.push_back({peer, {bytes.begin(), bytes.end()}});
  } else if (Channel* c = way(peer)) {
    if (c == far_.get()) far_used_ = true;
    c->post_note(peer, bytes);
  }
}

bool Router::progress(Time now, Events& events) {
  bool any = false;
  if (waker_ >= 0) {
    uint64_t drained;
    [[maybe_unused]] auto n = ::read(waker_, &drained, sizeof drained);
  }
  if (near_) any |= near_->progress(now, events);
  if (far_) {
    bool is_quiet =
        near_ && !far_used_ && now - far_active_at_ > kFarQuiet && now < far_->next_timer();
    if (!is_quiet || now - far_polled_at_ >= kFarPause) {
      far_polled_at_ = now;
      far_used_ = false;
      if (far_->progress(now, events)) {
        far_active_at_ = now;
        any = true;
      }
    }
  }
  if (!events_.empty()) {
    any = true;
    for (auto& c : events_.completions) events.completions.push_back(std::move(c));
    for (auto& n : events_.notes) events.notes.push_back(std::move(n));
    events_.clear();
  }
  return any;
}

Time Router::next_timer() const {
  Time t = kNever;
  if (near_) t = std::min(t, near_->next_timer());
  if (far_) t = std::min(t, far_->next_timer());
  return t;
}

bool Router::prepare_wait() {
  if (!events_.empty()) return false;
  if (near_ && !near_->prepare_wait()) return false;
  return !far_ || far_->prepare_wait();
}

void Router::wake() {
  if (far_ && far_->poll_fd() >= 0) {
    far_->wake();
  } else if (near_) {
    near_->wake();
  } else if (far_) {
    far_->wake();
  } else {
    uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(waker_, &one, sizeof one);
  }
}

void Router::drop_peer(Rank peer, const Status& why) {
  if (Channel* c = way(peer)) c->drop_peer(peer, why);
}

void Router::abort(const Status& why) {
  if (!aborted_.is_ok()) return;
  aborted_ = why;
  for (auto& [tag, s] : self_sends_) end_self(s.cookie, 0, why);
  for (auto& [tag, r] : self_receives_) end_self(r.cookie, 0, why);
  self_sends_.clear();
  self_receives_.clear();
  if (near_) near_->abort(why);
  if (far_) far_->abort(why);
}

Counters Router::counters() const {
  Counters sum = self_;
  for (const Channel* c : {near_.get(), far_.get()}) {
    if (c == nullptr) continue;
    Counters x = c->counters();
    sum.payload_sent += x.payload_sent;
    sum.payload_received += x.payload_received;
    sum.wire_sent += x.wire_sent;
    sum.wire_received += x.wire_received;
    sum.network += x.network;
    sum.lent += x.lent;
    sum.repeats += x.repeats;
    sum.held += x.held;
  }
  return sum;
}

std::string Router::describe() const {
  auto near_count = std::count(is_near_.begin(), is_near_.end(), true);
  bool has_far = far_ && near_count < size_ - 1;
  if (near_count == 0) return has_far ? far_->describe() : "this process alone";
  if (!has_far) return near_->describe();
  return fmt::format("{} in the node, {} between nodes", near_->describe(), far_->describe());
}

}  // namespace paceline::wire
