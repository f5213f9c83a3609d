// The join as a state machine, sans-IO: key-value space, channel and time are handed in, so that
// the same code runs over TCP and, with a thousand ranks in one process, over the simulated wire.
//
//   publish my record → fence → read my parent's record → greet it ─┐
//   every child has greeted me and sent its subtree's table ────────┴→ send mine up → the table
//   comes down
//                                                                      → hand it to my children →
//                                                                      done
//
// Rounds: the depth of the tree up and down. Memory: the table, once. A failure anywhere floods
// along the tree and stands in the key-value space, so that also ranks without a connection learn
// it.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "bootstrap/join.h"
#include "bootstrap/members.h"
#include "wire/frame.h"

namespace paceline::bootstrap {

struct JoinSpec {
  Rank rank = 0;
  Rank size = 1;
  Member self;         ///< host, node_id, pid, address
  std::string prefix;  ///< of all keys
  std::string build;
  uint32_t wire_version = wire::kWireVersion;
  SettingTexts settings;  ///< that must agree
  Time deadline = kNever;
  Time timeout = 0;  ///< as it was asked for, for messages
};

class JoinMachine {
 public:
  /// Tells the channel where a rank is; see wire::TcpChannel::set_peer.
  using SetPeer = std::function<Status(Rank, const std::string& address, const std::string& host)>;

  JoinMachine(JoinSpec spec, KeyValue& space, wire::Channel& channel, SetPeer set_peer);

  /// Moves what can be moved; true once it has ended, well or not (see status()).
  bool progress(Time now);
  [[nodiscard]] const Status& status() const { return status_; }
  /// The address of the rank whose record, as the space has it, contradicts this rank or the one that told it of that;
  /// empty where the end has another reason. The record may be of a start that is over.
  [[nodiscard]] const std::string& contradicted_by() const { return contradicted_by_; }
  /// The end is one that the space told of; who put it there may be of a start that is over, too.
  [[nodiscard]] bool is_hearsay() const { return is_hearsay_; }
  /// By when progress() must be called again: the space has to be asked from time to time.
  [[nodiscard]] Time next_timer() const;
  /// After the end, once.
  Topology take_topology() { return std::move(topology_); }
  /// What the channel brought that was not for bootstrap: the engine of a faster rank speaks
  /// already.
  wire::Events take_early() { return std::move(early_); }

 private:
  enum class State { kPublish, kAsk, kGather, kTable, kHandOut, kDiagnose, kFlush, kEnded };
  struct Child {
    Rank rank = -1;
    bool greeted = false;
    bool gathered = false;
    std::vector<std::byte> table;
    std::string name;
  };

  void step(Time now);
  void publish();
  void ask_for_parent();
  void gather();
  void hand_out();
  void handle(const wire::Note& note);
  void hello(Child& child, const JoinNote& note);
  void receive_from(Rank peer, std::vector<std::byte>& into, uint64_t bytes, Rank most);
  void complete(const wire::Completion& completion);
  void take_child_table(Child& child);
  void take_whole_table();
  void look_for_failure(Time now);
  void begin_diagnosis(Time now);
  void diagnose(Time now);
  void fail(Status why);
  void lost(Rank peer, const Status& why);
  void name_lost_child();
  void tell(const JoinNote& note);
  void contradicted(const std::string& address, std::string sentence);
  void heard(const JoinNote& failure);
  void end_flush(Time now);
  Child* child(Rank rank);
  [[nodiscard]] std::string key(const std::string& name) const { return spec_.prefix + name; }
  [[nodiscard]] std::string record_key(Rank rank) const { return key("r" + std::to_string(rank)); }
  [[nodiscard]] std::string own_name() const;
  [[nodiscard]] std::string waiting_for() const;
  [[nodiscard]] bool knows_whom() const;

  JoinSpec spec_;
  KeyValue& space_;
  wire::Channel& channel_;
  SetPeer set_peer_;
  TreeNeighbours tree_;
  State state_ = State::kPublish;
  Status status_;
  std::string contradicted_by_;
  bool is_hearsay_ = false;
  std::vector<Child> children_;
  std::vector<Member> members_;      ///< of my subtree; then of the job
  std::vector<std::byte> outgoing_;  ///< my subtree's table; then the job's
  std::vector<std::byte> incoming_;
  bool table_arrived_ = false;
  std::size_t sends_left_ = 0;
  std::string parent_name_;
  std::string parent_address_;
  wire::Events events_;
  wire::Events early_;
  Topology topology_;
  Time now_ = 0;
  Time ask_at_ = 0;
  Time ask_pause_ = 0;
  Time failure_check_at_ = 0;
  Time diagnosis_ends_ = kNever;
  State waited_in_ = State::kPublish;  ///< when the patience ended
  Time waited_ = 0;                    ///< so long
  Time flush_ends_ = kNever;
  Child* lost_child_ = nullptr;  ///< before it said where it runs
  Status loss_;
  Time named_by_ = kNever;
  std::set<Rank> unseen_;  ///< diagnosis: ranks whose record was not found
};

}  // namespace paceline::bootstrap
