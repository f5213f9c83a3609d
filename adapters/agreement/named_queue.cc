#include "named_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/bytes.h"
#include "message.h"

namespace paceline::agreement {
namespace {

constexpr uint32_t kTag = 1;
constexpr uint64_t kMessageLimit = 64 * 1024 * 1024;
/// Control messages wait as long as the job computes: the deadlines are those of the operations that they speak of.
constexpr double kPatience = 1e9;
/// Rank 0 answers every report within the time-out. A rank that has waited for twice that, and this many seconds more
/// for messages under way, is not answered at all.
constexpr double kGrace = 10;
constexpr int kBatch = 64;

/// comm.h's codecs.
constexpr int32_t kExact = 0;
constexpr int32_t kSettings = -1;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

/// The conversation with one rank. A message is its length (8 bytes), then its items.
struct NamedQueue::Peer {
  explicit Peer(int32_t r) : rank(r) {}
  int32_t rank;
  ByteWriter outbox;
  std::vector<std::byte> sending;
  uint64_t sending_bytes = 0;
  int sends_in_flight = 0;
  bool silent = false;  ///< it has said goodbye
  uint64_t incoming_bytes = 0;
  std::vector<std::byte> incoming;
};

NamedQueue::NamedQueue(paceline_comm* comm, const paceline_identity& identity, double timeout_s)
    : comm_(comm),
      rank_(identity.rank),
      size_(identity.size),
      timeout_s_(timeout_s),
      table_(identity.size) {}

std::unique_ptr<NamedQueue> NamedQueue::create(paceline_comm* comm, double timeout_s,
                                               Outcome& error) {
  paceline_identity identity{};
  identity.struct_size = sizeof(identity);
  error.code = paceline_comm_identity(comm, &identity);
  if (error.code != PACELINE_OK) {
    error.text = paceline_error(comm);
    return nullptr;
  }
  std::unique_ptr<NamedQueue> queue(new NamedQueue(comm, identity, timeout_s));
  error = queue->make_groups();
  if (error.code != PACELINE_OK) {
    queue->closed_ = true;
    return nullptr;
  }
  {
    std::unique_lock lock(queue->mutex_);
    if (identity.rank == 0) {
      for (int32_t r = 1; r < identity.size; ++r)
        queue->peers_.push_back(std::make_unique<Peer>(r));
    } else {
      queue->peers_.push_back(std::make_unique<Peer>(0));
    }
    for (auto& peer : queue->peers_) queue->listen(*peer);
  }
  queue->thread_ = std::thread([q = queue.get()] { q->serve(); });
  return queue;
}

Outcome NamedQueue::make_groups() {
  std::vector<int32_t> ranks(static_cast<std::size_t>(size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  for (uint32_t* group : {&control_, &data_}) {
    const auto code = paceline_group_create(comm_, ranks.data(), ranks.size(), group);
    if (code != PACELINE_OK) return {code, paceline_error(comm_)};
  }
  return {};
}

// NOLINTNEXTLINE(bugprone-exception-escape): where memory has run out the process ends
NamedQueue::~NamedQueue() { close(); }

void NamedQueue::close() {
  {
    std::unique_lock lock(mutex_);
    if (stop_) return;
    closing_ = true;
    if (!closed_ && failed_.code == PACELINE_OK) {
      if (rank_ == 0) {
        note_bye(0);
      } else {
        post(*peers_[0], {kBye, PACELINE_OK, {}, {}});
      }
    }
    closed_changed_.wait_for(lock, std::chrono::duration<double>(close_timeout_s),
                             [&] { return closed_ || failed_.code != PACELINE_OK; });
    stop_ = true;
    const Outcome why{PACELINE_ABORTED,
                      "Paceline was shut down before this operation was ready on all ranks"};
    if (closed_) {
      fail_pending(why);
    } else {
      // Receives are posted into memory of this queue, and the others may still send: end them before it is freed.
      const std::string reason =
          failed_.code != PACELINE_OK
              ? failed_.text
              : fmt::format("it shut down, and waited {:.4g} s for the others to do so",
                            close_timeout_s);
      fail_all(why);
      (void)paceline_comm_abort(comm_, reason.c_str());
    }
    run_callbacks(lock);
  }
  if (thread_.joinable()) thread_.join();
}

void NamedQueue::enqueue(Request request) {
  std::unique_lock lock(mutex_);
  if (failed_.code != PACELINE_OK || closing_) {
    Outcome why = failed_;
    if (why.code == PACELINE_OK) why = {PACELINE_ABORTED, "Paceline was shut down"};
    finish(std::move(request), std::move(why));
    return run_callbacks(lock);
  }
  const std::string name = request.name;
  const std::string signature = request.signature;
  if (name.size() > kTextLimit || signature.size() > kTextLimit) {
    finish(std::move(request),
           {PACELINE_INVALID_ARGUMENT, "the operation's name is longer than 4,096 bytes"});
    return run_callbacks(lock);
  }
  request.since = now();
  pending_[name].push_back(std::move(request));
  report(name, signature);
  run_callbacks(lock);
}

std::vector<std::string> NamedQueue::waiting() {
  std::lock_guard lock(mutex_);
  return table_.waiting();
}

// ---- decisions (all under the lock)

void NamedQueue::report(const std::string& name, const std::string& signature) {
  if (rank_ != 0) return post(*peers_[0], {kReport, PACELINE_OK, name, signature});
  if (auto decision = table_.ready(0, name, signature, now())) decide(*decision);
}

void NamedQueue::decide(const Table::Decision& decision) {
  const auto& ranks = decision.ranks;
  auto concerns = [&ranks](int32_t rank) {
    return ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  for (auto& peer : peers_) {
    if (concerns(peer->rank)) post(*peer, {kOrder, decision.code, decision.name, decision.refusal});
  }
  if (concerns(0))
    run(decision.name, {static_cast<paceline_code>(decision.code), decision.refusal});
}

/// Rank 0 gives up what has waited too long; the others only notice when rank 0 does not do so.
void NamedQueue::check_deadlines() {
  if (failed_.code != PACELINE_OK) return;
  if (rank_ == 0) {
    for (const auto& decision : table_.expire(now(), timeout_s_)) decide(decision);
    return;
  }
  const double limit = 2 * timeout_s_ + kGrace;
  for (const auto& [name, requests] : pending_) {
    if (now() - requests.front().since < limit) continue;
    return fail_all(
        {PACELINE_TIMEOUT, fmt::format("all-reduce '{}' timed out after {:.4g} s: rank 0, which "
                                       "orders the operations, does not answer",
                                       name, limit)});
  }
}

/// Ends the oldest request of that name, or submits it. All ranks come here in the same order.
void NamedQueue::run(const std::string& name, const Outcome& refusal) {
  auto found = pending_.find(name);
  if (found == pending_.end()) {
    return fail_all(
        {PACELINE_INTERNAL, fmt::format("rank 0 ordered '{}', which is not pending here", name)});
  }
  Request request = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) pending_.erase(found);
  if (refusal.code != PACELINE_OK) return finish(std::move(request), refusal);
  paceline_op_args args{};
  args.struct_size = sizeof(args);
  args.dtype = request.dtype;
  args.reduce_op = request.reduce_op;
  args.group = data_;
  args.codec = codec_keeps_residuals && !request.one_parameter ? kExact : kSettings;
  args.fp16_values = -1;
  args.input = request.input;
  args.output = request.output;
  args.count = request.count;
  args.name = request.name.c_str();
  args.shape = request.shape.c_str();
  paceline_op op = 0;
  const auto code = paceline_submit(comm_, &args, &op);
  if (code != PACELINE_OK) return finish(std::move(request), {code, paceline_error(comm_)});
  auto shared = std::make_shared<Request>(std::move(request));
  track(op, [this, shared](const Outcome& outcome) { finish(std::move(*shared), outcome); });
}

void NamedQueue::finish(Request request, Outcome outcome) {
  ended_.emplace_back(std::move(request), std::move(outcome));
}

/// Called with the lock held; callbacks run without it, so they may enqueue.
void NamedQueue::run_callbacks(std::unique_lock<std::mutex>& lock) {
  while (!ended_.empty()) {
    auto [request, outcome] = std::move(ended_.front());
    ended_.pop_front();
    lock.unlock();
    request.done(outcome);
    lock.lock();
  }
}

void NamedQueue::note_bye(int32_t rank) {
  for (const auto& decision : table_.leave(rank)) decide(decision);
  if (++byes_ < size_) return;
  for (auto& peer : peers_) post(*peer, {kClose, PACELINE_OK, {}, {}});
  closed_ = true;
  closed_changed_.notify_all();
}

void NamedQueue::fail_all(const Outcome& why) {
  if (failed_.code == PACELINE_OK) failed_ = why;
  fail_pending(why);
  closed_changed_.notify_all();
}

void NamedQueue::fail_pending(const Outcome& why) {
  for (auto& [name, requests] : pending_) {
    for (auto& request : requests) finish(std::move(request), why);
  }
  pending_.clear();
}

// ---- control messages (all under the lock)

void NamedQueue::post(Peer& peer, const Item& item) {
  append_item(item, peer.outbox);
  flush(peer);
}

/// One message at a time; what gathers meanwhile goes together.
void NamedQueue::flush(Peer& peer) {
  if (peer.sends_in_flight > 0 || peer.outbox.bytes().empty()) return;
  peer.sending = peer.outbox.take();
  peer.outbox = ByteWriter();
  peer.sending_bytes = peer.sending.size();
  peer.sends_in_flight = 2;
  auto sent = [this, &peer](const Outcome& outcome) {
    --peer.sends_in_flight;
    if (outcome.code != PACELINE_OK) return fail_all(outcome);
    flush(peer);
  };
  if (transfer(peer, true, &peer.sending_bytes, sizeof(peer.sending_bytes), sent) == PACELINE_OK) {
    (void)transfer(peer, true, peer.sending.data(), peer.sending.size(), sent);
  }
}

void NamedQueue::listen(Peer& peer) {
  (void)transfer(peer, false, &peer.incoming_bytes, sizeof(peer.incoming_bytes),
                 [this, &peer](const Outcome& outcome) {
                   if (outcome.code != PACELINE_OK) return fail_all(outcome);
                   listen_body(peer);
                 });
}

void NamedQueue::listen_body(Peer& peer) {
  if (peer.incoming_bytes == 0 || peer.incoming_bytes > kMessageLimit) {
    return fail_all(
        {PACELINE_CORRUPTED, fmt::format("rank {} announced a control message of {} bytes",
                                         peer.rank, peer.incoming_bytes)});
  }
  peer.incoming.resize(peer.incoming_bytes);
  (void)transfer(
      peer, false, peer.incoming.data(), peer.incoming.size(),
      [this, &peer](const Outcome& outcome) {
        if (outcome.code != PACELINE_OK) return fail_all(outcome);
        if (!take(peer, peer.incoming)) {
          return fail_all({PACELINE_CORRUPTED,
                           fmt::format("rank {} sent a malformed control message", peer.rank)});
        }
        if (!closed_ && !peer.silent) listen(peer);
      });
}

bool NamedQueue::take(Peer& peer, std::span<const std::byte> message) {
  const auto items = decode_items(message);
  return items && std::all_of(items->begin(), items->end(),
                              [&](const Item& item) { return take_item(peer, item); });
}

bool NamedQueue::take_item(Peer& peer, const Item& item) {
  if (rank_ == 0 && item.kind == kReport) {
    if (auto decision = table_.ready(peer.rank, item.name, item.text, now())) decide(*decision);
    return true;
  }
  if (rank_ == 0 && item.kind == kBye) {
    peer.silent = true;
    note_bye(peer.rank);
    return true;
  }
  if (rank_ != 0 && item.kind == kOrder) {
    run(item.name, {static_cast<paceline_code>(item.code), item.text});
    return true;
  }
  if (rank_ != 0 && item.kind == kClose) {
    closed_ = true;
    closed_changed_.notify_all();
    return true;
  }
  return false;
}

paceline_code NamedQueue::transfer(Peer& peer, bool sending, void* data, uint64_t bytes,
                                   Handler handler) {
  paceline_transfer_args args{};
  args.struct_size = sizeof(args);
  args.group = control_;
  args.peer = peer.rank;
  args.tag = kTag;
  args.data = data;
  args.bytes = bytes;
  args.name = "order of named operations";
  args.timeout_s = kPatience;
  paceline_op op = 0;
  const auto code =
      sending ? paceline_send(comm_, &args, &op) : paceline_receive(comm_, &args, &op);
  if (code != PACELINE_OK) {
    fail_all({code, paceline_error(comm_)});
    return code;
  }
  track(op, std::move(handler));
  return code;
}

// ---- completions

/// The lock is held from submission to here, so serve() finds the handler even if the operation has ended already.
void NamedQueue::track(paceline_op op, Handler handler) {
  tracked_.emplace(op, std::move(handler));
  const auto code = paceline_watch(comm_, op);
  if (code == PACELINE_OK) return;
  auto found = tracked_.extract(op);
  found.mapped()(Outcome{code, paceline_error(comm_)});
}

void NamedQueue::serve() {
  std::array<paceline_result, kBatch> results{};
  for (;;) {
    for (auto& result : results) result.struct_size = sizeof(result);
    const int count = paceline_wait_any(comm_, 0.1, results.data(), kBatch);
    std::unique_lock lock(mutex_);
    for (int i = 0; i < count; ++i) {
      const auto& result = results[static_cast<std::size_t>(i)];
      Outcome outcome;
      outcome.code = result.code;
      if (result.code != PACELINE_OK) {
        outcome.text.resize(4096);
        const auto length =
            paceline_op_error(comm_, result.op, outcome.text.data(), outcome.text.size());
        outcome.text.resize(std::min(length, outcome.text.size() - 1));
      }
      auto found = tracked_.extract(result.op);
      if (!found.empty()) found.mapped()(outcome);
    }
    if (count < 0) fail_all({PACELINE_ABORTED, "the communicator is being destroyed"});
    check_deadlines();
    run_callbacks(lock);
    // Lent buffers stay with the engine until their operation has ended; goodbyes want to leave.
    if (count < 0 || (stop_ && tracked_.empty())) return;
  }
}

}  // namespace paceline::agreement
