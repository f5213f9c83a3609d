#include "wire/shm/shm_channel.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "wire/shm/connector.h"
#include "wire/shm/conversation.h"

namespace paceline::wire::shm {
namespace {

// What epoll says about a descriptor; from kLinkKey on: the rank whose link it belongs to.
constexpr uint64_t kBellKey = 0;
constexpr uint64_t kConnectorKey = 1;
constexpr uint64_t kLinkKey = 2;

/// While the caller spins, sockets are looked at this often: a system call per round would cost
/// more than a short message does.
constexpr Time kSocketPeriod = 200 * kMicrosecond;

/// Looks at what a peer left behind in its ring: each takes a few hundred records.
constexpr int kLastTurns = 1000;

class Impl final : public ShmChannel {
 public:
  Impl(ShmOptions options, Listener listener, Fd bell, Fd epoll)
      : bell_(std::move(bell)), epoll_(std::move(epoll)) {
    if (options.allocator == nullptr) {
      AllocatorOptions own;
      own.sources = options.sources;
      options.allocator = std::make_shared<ShmAllocator>(own);
    }
    options.chunk_bytes = std::max(kPieceAlign, options.chunk_bytes / kPieceAlign * kPieceAlign);
    options.slot_bytes = std::max(kPieceAlign, options.slot_bytes / kPieceAlign * kPieceAlign);
    options.ring_bytes =
        round_up(std::clamp(options.ring_bytes, kRingLeast, kRingMost), page_size());
    // A record must fit, whatever ring the peer could make.
    options.eager_limit = std::min(options.eager_limit, kRingLeast / 4);
    shared_.scratch.resize(options.chunk_bytes);
    shared_.options = std::move(options);
    peers_.resize(static_cast<std::size_t>(shared_.options.size));
    watch(bell_.get(), kBellKey);
    connector_ = std::make_unique<Connector>(shared_.options, std::move(listener), bell_.get(),
                                             epoll_.get(), kConnectorKey);
  }

  [[nodiscard]] std::string address() const override { return connector_->address(); }
  [[nodiscard]] const std::shared_ptr<ShmAllocator>& allocator() const override {
    return shared_.options.allocator;
  }
  void set_peer(Rank rank, const std::string& address, const std::string& host) override {
    connector_->set_address(rank, address);
    peers_[static_cast<std::size_t>(rank)] =
        std::make_unique<Conversation>(rank, fmt::format("rank {} (host {})", rank, host), shared_);
  }

  void send(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
            uint64_t cookie) override {
    send_with_answer(peer, tag, digest, data, cookie, {});
  }
  void send_with_answer(Rank peer, Tag tag, uint32_t digest, std::span<const std::byte> data,
                        uint64_t cookie, const Answer& answer) override {
    if (auto* with = reach(peer, cookie)) with->send(tag, digest, data, cookie, answer);
  }
  void receive(Rank peer, Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) override {
    if (auto* with = reach(peer, cookie)) with->receive(tag, digest, inbox, cookie);
  }
  std::span<const std::byte> open_held(Rank peer, uint64_t held) override {
    auto* with = find(peer);
    return with == nullptr ? std::span<const std::byte>() : with->open_held(held);
  }
  bool close_held(Rank peer, uint64_t held) override {
    auto* with = find(peer);
    return with != nullptr && with->close_held(held);
  }
  void post_note(Rank peer, std::span<const std::byte> bytes) override {
    auto* with = find(peer);
    if (with == nullptr || losses_.contains(peer) || bytes.size() > kNoteLimit) return;
    want_link(peer, *with);
    with->post_note(bytes);
  }

  void set_workers(Workers* workers) override { shared_.workers = workers; }
  void set_interlude(Interlude* interlude) override { shared_.interlude = interlude; }

  [[nodiscard]] bool notes_waiting() const override {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const auto& peer) { return peer && peer->notes_waiting(); });
  }

  bool progress(Time now, Events& events) override;
  [[nodiscard]] Time next_timer() const override { return connector_->next_timer(); }
  [[nodiscard]] int poll_fd() const override { return epoll_.get(); }
  bool prepare_wait() override;
  void wake() override {
    const uint64_t one = 1;
    while (::write(bell_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  void drop_peer(Rank peer, const Status& why) override {
    if (find(peer) != nullptr) end(peer, why);
  }
  void abort(const Status& why) override {
    if (!shared_.aborted.is_ok()) return;
    shared_.aborted = why;
    for (auto& peer : peers_) {
      if (peer) peer->abort(why);
    }
  }

  [[nodiscard]] Counters counters() const override { return shared_.counters; }
  [[nodiscard]] std::string describe() const override;

 private:
  Conversation* find(Rank peer) const {
    const auto at = static_cast<std::size_t>(peer);
    return peer < 0 || at >= peers_.size() ? nullptr : peers_[at].get();
  }
  Conversation* reach(Rank peer, uint64_t cookie);
  void want_link(Rank peer, Conversation& with) {
    if (with.link() == nullptr) connector_->connect(peer);
  }
  void watch(int fd, uint64_t key) const;
  /// Whether there is something for the connector.
  bool look_at_sockets();
  void connect(Time now, Events& events);
  bool exchange(Events& events);
  bool transfer();
  void fall_silent(Rank rank) {
    if (std::find(silent_.begin(), silent_.end(), rank) == silent_.end()) silent_.push_back(rank);
  }
  void lose(Rank peer, const Status& why, Events& events);
  void end(Rank peer, const Status& why);
  void hand_out(Events& events);

  Fd bell_;
  Fd epoll_;
  Shared shared_;
  std::unique_ptr<Connector> connector_;
  std::vector<std::unique_ptr<Conversation>> peers_;  ///< by rank; null: not of this node
  std::vector<Rank> linked_;
  std::vector<Rank> silent_;  ///< their socket or process is at its end
  std::unordered_map<Rank, Status> losses_;
  Time next_look_ = 0;
  bool waited_ = false;
};

void Impl::watch(int fd, uint64_t key) const {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0 && errno == EEXIST) {
    (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
  }
}

/// The conversation for a request, or nullptr after the request was failed.
Conversation* Impl::reach(Rank peer, uint64_t cookie) {
  auto fail = [&](Status why) {
    shared_.done.push_back({cookie, 0, std::move(why)});
    return nullptr;
  };
  if (!shared_.aborted.is_ok()) return fail(shared_.aborted);
  auto* with = find(peer);
  if (with == nullptr) {
    return fail({Code::kInvalidArgument,
                 fmt::format("rank {} can't be reached through shared memory by rank {}", peer,
                             shared_.options.rank)});
  }
  if (auto lost = losses_.find(peer); lost != losses_.end()) return fail(lost->second);
  want_link(peer, *with);
  return with;
}

bool Impl::progress(Time now, Events& events) {
  if (waited_) {
    waited_ = false;
    next_look_ = now;
    for (Rank rank : linked_) find(rank)->link()->stay_awake();
  }
  bool moved = exchange(events);
  if (now >= next_look_ || connector_->busy()) {
    next_look_ = after(now, kSocketPeriod);
    const bool called = look_at_sockets();
    if (called || connector_->busy() || now >= connector_->next_timer()) connect(now, events);
  }
  moved = transfer() || moved;
  for (Rank rank : std::exchange(silent_, {})) {
    // What the peer published before its end still counts: it may have left because of another's.
    bool more = !find(rank)->ended();
    for (int turn = 0; more && turn < kLastTurns; ++turn) {
      more = false;
      if (!find(rank)->exchange(more).is_ok()) break;
    }
    lose(rank,
         {Code::kPeerLost, fmt::format("{} is gone: its process ended or closed its connection",
                                       find(rank)->name())},
         events);
  }
  hand_out(events);
  return moved || !events.empty();
}

void Impl::hand_out(Events& events) {
  auto append = [](auto& to, auto& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
    from.clear();
  };
  append(events.completions, shared_.done);
  append(events.notes, shared_.notes);
}

bool Impl::look_at_sockets() {
  bool called = false;
  std::array<epoll_event, 64> ready;
  const int count = ::epoll_wait(epoll_.get(), ready.data(), ready.size(), 0);
  for (int i = 0; i < count; ++i) {
    const uint64_t key = ready[static_cast<std::size_t>(i)].data.u64;
    if (key == kBellKey) {
      uint64_t rings = 0;
      (void)!::read(bell_.get(), &rings, sizeof(rings));
    } else if (key >= kLinkKey) {
      const auto rank = static_cast<Rank>(key - kLinkKey);
      auto* link = find(rank)->link();
      if (link != nullptr && (!link->read_socket() || !link->alive())) fall_silent(rank);
    } else {
      called = true;
    }
  }
  return called;
}

void Impl::connect(Time now, Events& events) {
  std::vector<Connector::Outcome> outcomes;
  connector_->progress(now, outcomes);
  for (auto& outcome : outcomes) {
    auto* with = find(outcome.rank);
    if (with == nullptr || with->ended()) continue;
    if (outcome.link == nullptr) {
      lose(outcome.rank,
           {outcome.status.code(), fmt::format("{} can't be reached through shared memory: {}",
                                               with->name(), outcome.status.message())},
           events);
      continue;
    }
    watch(outcome.link->socket(), kLinkKey + static_cast<uint64_t>(outcome.rank));
    if (outcome.link->pidfd() >= 0) {
      watch(outcome.link->pidfd(), kLinkKey + static_cast<uint64_t>(outcome.rank));
    }
    if (!shared_.aborted.is_ok()) outcome.link->revoke();
    with->attach(std::move(outcome.link));
    linked_.push_back(outcome.rank);
  }
}

bool Impl::exchange(Events& events) {
  bool moved = false;
  for (std::size_t i = 0; i < linked_.size();) {
    const Rank rank = linked_[i];
    Status status = find(rank)->exchange(moved);
    if (!status.is_ok()) lose(rank, status, events);
    if (i < linked_.size() && linked_[i] == rank) ++i;
  }
  return moved;
}

/// A chunk per peer and round, so that all peers and both directions move; what several threads read at once they share.
bool Impl::transfer() {
  uint64_t total = 0;
  shared_.readers = static_cast<uint64_t>(std::count_if(
      linked_.begin(), linked_.end(), [this](Rank rank) { return find(rank)->has_pulls(); }));
  for (bool moved = true; moved && total < shared_.options.progress_bytes;) {
    moved = false;
    for (std::size_t i = 0; i < linked_.size();) {
      const Rank rank = linked_[i];
      auto* with = find(rank);
      if (with->has_transfers()) {
        Status status;
        const uint64_t bytes = with->transfer(status);
        total += bytes;
        moved = moved || bytes != 0;
        if (!status.is_ok()) fall_silent(rank);
      }
      ++i;
    }
  }
  return total != 0;
}

bool Impl::prepare_wait() {
  if (!shared_.done.empty() || !shared_.notes.empty() || !silent_.empty()) return false;
  for (Rank rank : linked_) {
    if (find(rank)->has_pulls()) return false;
  }
  waited_ = true;
  bool quiet = true;
  for (Rank rank : linked_) {
    auto& with = *find(rank);
    with.link()->fall_asleep(with.starved());
    // Everything that this side waits for is looked at after the fence in fall_asleep(): records,
    // and room for what is queued here (by trying to write it).
    if (with.link()->has_more() || with.write_waiting()) quiet = false;
  }
  if (quiet && shared_.done.empty()) return true;
  for (Rank rank : linked_) find(rank)->link()->stay_awake();
  waited_ = false;
  return false;
}

void Impl::lose(Rank peer, const Status& why, Events& events) {
  if (find(peer)->ended()) return;
  end(peer, why);
  events.losses.push_back({peer, why});
}

void Impl::end(Rank peer, const Status& why) {
  auto& with = *find(peer);
  if (with.ended()) return;
  if (auto* link = with.link()) {
    // Closing is not enough where a forked child holds the descriptors too.
    (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link->socket(), nullptr);
    if (link->pidfd() >= 0) (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link->pidfd(), nullptr);
  }
  with.end(why);
  connector_->forget(peer);
  losses_.emplace(peer, why);
  std::erase(linked_, peer);
}

std::string Impl::describe() const {
  std::string why;
  for (Rank rank : linked_) {
    const auto& reason = find(rank)->link()->no_vm_read();
    if (!reason.empty()) why = reason;
  }
  if (linked_.empty()) return "shared memory";
  if (why.empty()) return "shared memory (process_vm_readv)";
  return fmt::format("shared memory (copies, no process_vm_readv: {})", why);
}

}  // namespace

Result<std::unique_ptr<ShmChannel>> ShmChannel::create(ShmOptions options) {
  if (options.rank < 0 || options.rank >= options.size) {
    return Status(Code::kInvalidArgument,
                  fmt::format("rank {} of a job of {}", options.rank, options.size));
  }
  PACELINE_ASSIGN(Listener listener, Listener::open(options.socket_directory));
  Fd bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!bell || !epoll) {
    return Status(
        Code::kResourceExhausted,
        fmt::format("no descriptors for shared memory: {} (ulimit -n)", std::strerror(errno)));
  }
  // Is there memory for one connection at all? Better known now than at the first message.
  auto trial = SharedMemory::create(segment_bytes(kRingLeast), SharedMemory::Pages::kReserve,
                                    options.sources);
  if (!trial.is_ok()) return trial.status();
  return std::unique_ptr<ShmChannel>(std::make_unique<Impl>(std::move(options), std::move(listener),
                                                            std::move(bell), std::move(epoll)));
}

}  // namespace paceline::wire::shm
