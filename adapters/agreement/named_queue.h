// Collectives by name, for front ends whose ranks become ready in different orders.
//
// The C ABI asks that all ranks of a group submit in the same order. A graph executor can't promise that, so its
// operations carry names, and rank 0 decides: every rank reports the names that became ready on it; when a name
// is ready on all ranks, rank 0 tells them to run it; all ranks submit in the order of these decisions. Nobody
// blocks a thread for it: an operation's callback runs when it has ended.
//
//   rank r ──▶ rank 0   Report: (name, signature) …        what became ready on r
//   rank 0 ──▶ rank r   Order: (name, code, refusal) …     run these, in this order, or fail them
//   rank r ──▶ rank 0   Bye                                 r will report nothing more
//   rank 0 ──▶ rank r   Close                               every rank said Bye
// A signature describes what the ranks must agree on ("sum float32 [2, 3]"). Where they differ, the operation
// fails on all ranks with a sentence that holds both, and the others go on. A name may be enqueued again while
// it is pending: the k-th on one rank belongs to the k-th on the others.
//
// Nothing waits for ever: what is not ready on all ranks within the time-out fails on those where it is, by the name
// of the ranks that are missing, and at once when one of these has said Bye. Rank 0 decides this too, so that no rank
// runs what another has given up.
//
// It stands above comm.h and not in src/engine, since it needs nothing that the C ABI does not give: control
// messages are paceline_send and paceline_receive in a group of their own, data another group.
//
// Thread-safe. A communicator that a queue serves belongs to it: nobody else may call paceline_wait_any() on it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "message.h"
#include "paceline/comm.h"
#include "table.h"

namespace paceline::agreement {

struct Outcome {
  paceline_code code = PACELINE_OK;
  std::string text;
};

/// One all-reduce. Buffers belong to the caller until `done` has been called; it may be called before enqueue()
/// returns, runs under no lock, and must not block.
struct Request {
  std::string name;
  std::string signature;  ///< what ranks must agree on, for people
  std::string shape;      ///< for messages
  int32_t dtype = 0;      ///< comm.h's
  int32_t reduce_op = 0;
  const void* input = nullptr;
  void* output = nullptr;
  uint64_t count = 0;
  bool one_parameter =
      true;  ///< false: the name is no parameter's, so no residual may be kept by it
  std::function<void(const Outcome&)> done;
  double since = 0;  ///< the queue's own: seconds, when it was enqueued
};

class NamedQueue {
 public:
  /// All ranks create their queue at the same point of their program. `timeout_s`: how long an operation may wait for
  /// ranks that have not reached it; rank 0's counts. Error: the text of the failure.
  static std::unique_ptr<NamedQueue> create(paceline_comm* comm, double timeout_s, Outcome& error);
  ~NamedQueue();  ///< close()
  NamedQueue(const NamedQueue&) = delete;
  NamedQueue& operator=(const NamedQueue&) = delete;

  void enqueue(Request request);
  /// Waits (at most `close_timeout_s`) until all ranks close theirs; what is pending then fails, and so does what comes.
  /// Where they have not, or the queue has failed, the communicator is aborted, so that all buffers are given back.
  /// Afterwards the communicator is not touched any more, whoever still holds this queue. By one thread.
  void close();
  /// What rank 0 waits for and from whom; empty on other ranks.
  std::vector<std::string> waiting();

  double close_timeout_s = 10;
  /// The settings' codec keeps residuals by name: requests that are not one parameter's travel exactly.
  bool codec_keeps_residuals = false;

 private:
  struct Peer;
  using Handler = std::function<void(const Outcome&)>;

  NamedQueue(paceline_comm* comm, const paceline_identity& identity, double timeout_s);
  Outcome make_groups();
  void serve();
  void track(paceline_op op, Handler handler);
  void report(const std::string& name, const std::string& signature);
  void decide(const Table::Decision& decision);
  void check_deadlines();
  void run(const std::string& name, const Outcome& refusal);
  void post(Peer& peer, const Item& item);
  void flush(Peer& peer);
  void listen(Peer& peer);
  void listen_body(Peer& peer);
  bool take(Peer& peer, std::span<const std::byte> message);
  bool take_item(Peer& peer, const Item& item);
  void note_bye(int32_t rank);
  void fail_all(const Outcome& why);
  void fail_pending(const Outcome& why);
  paceline_code transfer(Peer& peer, bool sending, void* data, uint64_t bytes, Handler handler);
  void finish(Request request, Outcome outcome);
  void run_callbacks(std::unique_lock<std::mutex>& lock);

  paceline_comm* comm_;
  int32_t rank_;
  int32_t size_;
  double timeout_s_;
  uint32_t control_ = 0;
  uint32_t data_ = 0;

  std::mutex mutex_;
  std::condition_variable closed_changed_;
  Table table_;
  std::unordered_map<std::string, std::deque<Request>> pending_;
  std::unordered_map<paceline_op, Handler> tracked_;
  std::vector<std::unique_ptr<Peer>> peers_;  ///< rank 0: all others; others: rank 0
  std::deque<std::pair<Request, Outcome>> ended_;
  int32_t byes_ = 0;
  bool closing_ = false;
  bool closed_ = false;
  bool stop_ = false;
  Outcome failed_;
  std::thread thread_;
};

}  // namespace paceline::agreement
