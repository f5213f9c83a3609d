#include "bootstrap/join_machine.h"

#include <fmt/format.h>

#include <algorithm>

#include "bootstrap/arrivals.h"

namespace paceline::bootstrap {
namespace {

constexpr Rank kArity = 4;
constexpr Time kFirstPause = kMillisecond;  // between questions to the space, doubling
constexpr Time kLongestPause = 100 * kMillisecond;
constexpr Time kFailureCheck = 500 * kMillisecond;
constexpr Time kDiagnosis = kSecond;
constexpr Time kNaming = 200 * kMillisecond;  // of a lost child, by its record
constexpr Time kNamePause = 5 * kMillisecond;
constexpr Time kFlush = 300 * kMillisecond;  // for notices of failure to leave

// Cookies: the peer and the direction. Tags: one a direction, for (sender, receiver, tag) is unique
// then.
constexpr uint64_t kSendUp = 1ULL << 32;
constexpr uint64_t kSendDown = 2ULL << 32;
constexpr uint64_t kReceiveUp = 3ULL << 32;
constexpr uint64_t kReceiveDown = 4ULL << 32;
constexpr wire::Tag kUpTag = kBootstrapTags | 1;
constexpr wire::Tag kDownTag = kBootstrapTags | 2;

Rank subtree_size(Rank root, Rank size) {
  Rank count = 0;
  for (int64_t first = root, last = root; first < size;
       first = first * kArity + 1, last = last * kArity + kArity) {
    count += static_cast<Rank>(std::min<int64_t>(last, size - 1) - first + 1);
  }
  return count;
}

}  // namespace

TreeNeighbours tree_neighbours(Rank rank, Rank size) {
  TreeNeighbours tree;
  if (rank > 0) tree.parent = (rank - 1) / kArity;
  for (int64_t c = static_cast<int64_t>(rank) * kArity + 1;
       c <= static_cast<int64_t>(rank) * kArity + kArity && c < size; ++c) {
    tree.children.push_back(static_cast<Rank>(c));
  }
  return tree;
}

JoinMachine::JoinMachine(JoinSpec spec, KeyValue& space, wire::Channel& channel, SetPeer set_peer)
    : spec_(std::move(spec)),
      space_(space),
      channel_(channel),
      set_peer_(std::move(set_peer)),
      tree_(tree_neighbours(spec_.rank, spec_.size)) {
  spec_.self.rank = spec_.rank;
  members_.push_back(spec_.self);
  for (Rank c : tree_.children) {
    children_.push_back({.rank = c, .name = fmt::format("rank {}", c)});
  }
  ask_pause_ = kFirstPause;
}

std::string JoinMachine::own_name() const {
  return fmt::format("rank {} (host {})", spec_.rank, spec_.self.host);
}

JoinMachine::Child* JoinMachine::child(Rank rank) {
  auto found =
      std::find_if(children_.begin(), children_.end(), [&](auto& c) { return c.rank == rank; });
  return found == children_.end() ? nullptr : &*found;
}

Time JoinMachine::next_timer() const {
  switch (state_) {
    case State::kEnded:
      return now_;
    case State::kFlush:
      return std::min(channel_.next_timer(), flush_ends_);
    case State::kDiagnose:
      return std::min(channel_.next_timer(), ask_at_);
    default:
      break;
  }
  Time next = std::min({spec_.deadline, channel_.next_timer(), failure_check_at_});
  if (state_ == State::kPublish || state_ == State::kAsk) next = std::min(next, ask_at_);
  if (lost_child_ != nullptr) next = std::min(next, after(now_, kNamePause));
  return next;
}

bool JoinMachine::progress(Time now) {
  now_ = now;
  if (state_ == State::kEnded) return true;
  auto polled = space_.poll(now);
  // Who has its parent's record needs the space no more; but that parent may be of a start that is over (starts.h).
  const bool matters = state_ < State::kGather || polled.code() == Code::kAborted;
  if (!polled.is_ok() && matters) fail(polled);
  for (int round = 0; round < 8 && state_ != State::kEnded; ++round) {
    auto before = state_;
    events_.clear();
    bool moved = channel_.progress(now, events_);
    for (auto& note : events_.notes) {
      if (is_join_note(note.bytes)) {
        handle(note);
      } else {
        early_.notes.push_back(std::move(note));
      }
    }
    for (auto& completion : events_.completions) complete(completion);
    for (auto& loss : events_.losses) {
      if (state_ < State::kFlush && (loss.peer == tree_.parent || child(loss.peer) != nullptr)) {
        lost(loss.peer, loss.status);
      } else {
        early_.losses.push_back(std::move(loss));
      }
    }
    step(now);
    if (!moved && state_ == before) break;
  }
  return state_ == State::kEnded;
}

void JoinMachine::step(Time now) {
  if (state_ < State::kFlush && now >= spec_.deadline) begin_diagnosis(now);
  if (state_ < State::kFlush) look_for_failure(now);
  if (state_ < State::kFlush && lost_child_ != nullptr) name_lost_child();
  switch (state_) {
    case State::kPublish:
      publish();
      break;
    case State::kAsk:
      ask_for_parent();
      break;
    case State::kGather:
      gather();
      break;
    case State::kTable:
      if (table_arrived_) take_whole_table();
      break;
    case State::kHandOut:
      if (sends_left_ == 0) state_ = State::kEnded;
      break;
    case State::kDiagnose:
      diagnose(now);
      break;
    case State::kFlush:
      end_flush(now);
      break;
    case State::kEnded:
      break;
  }
}

void JoinMachine::publish() {
  Record record{.build = spec_.build,
                .wire = spec_.wire_version,
                .size = spec_.size,
                .host = spec_.self.host,
                .address = spec_.self.address};
  auto put = space_.put(record_key(spec_.rank), encode_record(record));
  if (put.is_ok()) put = space_.fence();
  if (!put.is_ok()) return fail(put);
  state_ = tree_.parent < 0 ? State::kGather : State::kAsk;
}

void JoinMachine::ask_for_parent() {
  if (now_ < ask_at_) return;
  auto value = space_.get(record_key(tree_.parent));
  if (!value) return fail(value.status());
  if (!*value) {
    ask_at_ = after(now_, ask_pause_);
    ask_pause_ = std::min(2 * ask_pause_, kLongestPause);
    return;
  }
  auto record = decode_record(**value);
  if (!record) return fail(record.status());
  parent_name_ = fmt::format("rank {} (host {})", tree_.parent, record->host);
  parent_address_ = record->address;
  if (record->build != spec_.build || record->wire != spec_.wire_version) {
    return contradicted(record->address,
                        fmt::format("{} runs Paceline {} (wire {}) but {} runs {} (wire {}): "
                                    "install the same version on all hosts",
                                    own_name(), spec_.build, spec_.wire_version, parent_name_,
                                    record->build, record->wire));
  }
  if (record->size != spec_.size) {
    return contradicted(
        record->address,
        fmt::format(
            "the ranks differ in the size of the job: {} was started with {} and {} with {}. "
            "Start all ranks with the same size (WORLD_SIZE; -np of mpirun and `paceline run`)",
            own_name(), spec_.size, parent_name_, record->size));
  }
  auto known = set_peer_(tree_.parent, record->address, record->host);
  if (!known.is_ok()) return fail(known);
  channel_.post_note(tree_.parent, encode_note({.kind = NoteKind::kHello,
                                                .host = spec_.self.host,
                                                .address = spec_.self.address,
                                                .build = spec_.build,
                                                .settings = spec_.settings}));
  state_ = State::kGather;
}

void JoinMachine::gather() {
  if (!std::all_of(children_.begin(), children_.end(), [](auto& c) { return c.gathered; })) return;
  std::sort(members_.begin(), members_.end(), [](auto& a, auto& b) { return a.rank < b.rank; });
  outgoing_ = encode_members(members_);
  if (tree_.parent < 0) {
    incoming_ = std::move(outgoing_);
    return take_whole_table();
  }
  members_.clear();
  channel_.post_note(tree_.parent,
                     encode_note({.kind = NoteKind::kGather, .bytes = outgoing_.size()}));
  channel_.send(tree_.parent, kUpTag, 0, outgoing_, kSendUp | static_cast<uint64_t>(tree_.parent));
  ++sends_left_;
  state_ = State::kTable;
}

void JoinMachine::handle(const wire::Note& note) {
  Child* from = child(note.peer);
  if (state_ >= State::kFlush || (from == nullptr && note.peer != tree_.parent)) return;
  auto decoded = decode_note(note.bytes);
  if (!decoded) return fail(decoded.status());
  switch (decoded->kind) {
    case NoteKind::kHello:
      if (from != nullptr && !from->greeted) hello(*from, *decoded);
      break;
    case NoteKind::kGather:
      if (from != nullptr && from->greeted && from->table.empty()) {
        receive_from(note.peer, from->table, decoded->bytes, subtree_size(note.peer, spec_.size));
      }
      break;
    case NoteKind::kTable:
      if (note.peer == tree_.parent && incoming_.empty()) {
        receive_from(note.peer, incoming_, decoded->bytes, spec_.size);
      }
      break;
    case NoteKind::kFailed:
      heard(*decoded);
      break;
    case NoteKind::kImpatient:
      begin_diagnosis(now_);
      break;
  }
}

void JoinMachine::hello(Child& from, const JoinNote& note) {
  from.greeted = true;
  from.name = fmt::format("rank {} (host {})", from.rank, note.host);
  auto known = set_peer_(from.rank, note.address, note.host);
  if (!known.is_ok()) return fail(known);
  if (note.build != spec_.build) {
    return fail({Code::kMismatch,
                 fmt::format("{} runs Paceline {} but {} runs {}: install the same version",
                             from.name, note.build, own_name(), spec_.build)});
  }
  auto differs = difference(spec_.settings, own_name(), note.settings, from.name);
  if (!differs.empty()) {
    fail({Code::kMismatch,
          fmt::format("the ranks' settings differ: {}. Give all ranks the same", differs)});
  }
}

void JoinMachine::receive_from(Rank peer, std::vector<std::byte>& into, uint64_t bytes, Rank most) {
  if (bytes < 8 || bytes > 8 + kMaxMemberBytes * static_cast<uint64_t>(most)) {
    return fail(
        {Code::kCorrupted, fmt::format("rank {} announces a table of {} bytes", peer, bytes)});
  }
  into.resize(bytes);
  bool down = peer == tree_.parent;
  channel_.receive(peer, down ? kDownTag : kUpTag, 0, {.into = into.data(), .capacity = bytes},
                   (down ? kReceiveDown : kReceiveUp) | static_cast<uint64_t>(peer));
}

void JoinMachine::complete(const wire::Completion& completion) {
  auto what = completion.cookie & ~0xffff'ffffULL;
  auto peer = static_cast<Rank>(completion.cookie & 0xffff'ffffULL);
  if (what == kSendUp || what == kSendDown) --sends_left_;
  if (state_ >= State::kFlush) return;
  if (!completion.status.is_ok()) {
    return completion.status.code() == Code::kPeerLost ? lost(peer, completion.status)
                                                       : fail(completion.status);
  }
  if (what == kReceiveUp) {
    auto& from = *child(peer);
    from.table.resize(completion.bytes);
    take_child_table(from);
  } else if (what == kReceiveDown) {
    incoming_.resize(completion.bytes);
    table_arrived_ = true;
  }
}

void JoinMachine::take_child_table(Child& from) {
  auto members = decode_members(from.table, spec_.size);
  if (members &&
      (members->empty() || members->front().rank != from.rank ||
       members->size() != static_cast<std::size_t>(subtree_size(from.rank, spec_.size)))) {
    members = Status(Code::kCorrupted, fmt::format("{} sent a table of other ranks", from.name));
  }
  if (!members) return fail(members.status());
  from.gathered = true;
  from.table = std::vector<std::byte>();  // `= {}` would keep its memory
  members_.insert(members_.end(), std::make_move_iterator(members->begin()),
                  std::make_move_iterator(members->end()));
}

void JoinMachine::take_whole_table() {
  auto members = decode_members(incoming_, spec_.size);
  if (members && members->size() != static_cast<std::size_t>(spec_.size)) {
    members = Status(Code::kCorrupted,
                     fmt::format("the table has {} of {} ranks", members->size(), spec_.size));
  }
  if (!members) return fail(members.status());
  topology_.rank = spec_.rank;
  topology_.members = std::move(*members);
  number_nodes(topology_);
  members_ = std::vector<Member>();
  for (const auto& member : topology_.members) {
    if (member.rank == spec_.rank) continue;
    auto known = set_peer_(member.rank, member.address, member.host);
    if (!known.is_ok()) return fail(known);
  }
  hand_out();
}

void JoinMachine::hand_out() {
  for (auto& to : children_) {
    channel_.post_note(to.rank, encode_note({.kind = NoteKind::kTable, .bytes = incoming_.size()}));
    channel_.send(to.rank, kDownTag, 0, incoming_, kSendDown | static_cast<uint64_t>(to.rank));
    ++sends_left_;
  }
  state_ = State::kHandOut;
}

void JoinMachine::look_for_failure(Time now) {
  if (now < failure_check_at_ || state_ == State::kPublish) return;
  failure_check_at_ = after(now, kFailureCheck);
  // At once, too: a space of rank 0's ends with it, but whoever has asked there is told before.
  auto value = space_.get(key("failed"));
  if (!value || !*value) return;  // a space that is gone matters only where its answer is needed
  auto note = decode_note(std::as_bytes(std::span(**value)));
  if (!note || note->kind != NoteKind::kFailed) return;
  note->is_hearsay = true;
  heard(*note);
}

void JoinMachine::heard(const JoinNote& failure) {
  contradicted_by_ = failure.address;
  is_hearsay_ = failure.is_hearsay;
  fail({failure.code, failure.text});
}

void JoinMachine::begin_diagnosis(Time now) {
  if (state_ == State::kDiagnose) return;
  waited_in_ = state_;
  waited_ = std::clamp<Time>(now - (spec_.deadline - spec_.timeout), 0, spec_.timeout);
  diagnosis_ends_ = after(now, kDiagnosis);
  ask_at_ = now;
  ask_pause_ = kFirstPause;
  for (Rank r = 0; r < spec_.size; ++r) {
    if (r != spec_.rank) unseen_.insert(r);
  }
  state_ = State::kDiagnose;
  // Whoever lacks a child knows more than those that wait for the table; its own patience may last longer.
  tell({.kind = NoteKind::kImpatient});
}

bool JoinMachine::knows_whom() const {
  return waited_in_ <= State::kAsk ||
         std::any_of(children_.begin(), children_.end(), [](auto& c) { return !c.greeted; });
}

std::string JoinMachine::waiting_for() const {
  if (waited_in_ <= State::kAsk) return fmt::format("rank {}", tree_.parent);
  std::string text;
  for (const auto& c : children_) {
    if (c.gathered) continue;
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", c.name,
                        c.greeted ? " (which waits for others)" : " (which has not connected)");
  }
  return text.empty() ? parent_name_ : text;
}

void JoinMachine::diagnose(Time now) {
  if (now < ask_at_) return;
  ask_at_ = after(now, ask_pause_);
  ask_pause_ = std::min(2 * ask_pause_, kLongestPause);
  for (auto rank = unseen_.begin(); rank != unseen_.end();) {
    auto value = space_.get(record_key(*rank));
    if (!value || !*value) {
      const bool here = space_.announced(here_key(spec_.prefix, *rank)).value_or(false);
      rank = here ? unseen_.erase(rank) : std::next(rank);
      continue;
    }
    auto record = decode_record(**value);
    if (auto* c = child(*rank); c != nullptr && record)
      c->name = fmt::format("rank {} (host {})", *rank, record->host);
    rank = unseen_.erase(rank);
  }
  // A neighbour's finding may still come.
  if (!(unseen_.empty() && knows_whom()) && now < diagnosis_ends_) return;
  if (!unseen_.empty()) return fail(never_came(waited_, unseen_, spec_.size, space_));
  fail({Code::kTimeout, fmt::format("after {:g} s {} still waits for {}: all ranks have started, "
                                    "so one has ended (see what it "
                                    "printed) or a connection fails (firewall? wrong interface? "
                                    "see PACELINE_INTERFACE; other hosts' messages may tell)",
                                    shown_seconds(waited_), own_name(), waiting_for())});
}

void JoinMachine::contradicted(const std::string& address, std::string sentence) {
  contradicted_by_ = address;
  fail({Code::kMismatch, std::move(sentence)});
}

// The teller is named, too: where a link is cut, either end may be the one that is cut off.
void JoinMachine::lost(Rank peer, const Status& why) {
  if (lost_child_ != nullptr) return;
  loss_ = {
      why.code(),
      fmt::format("{} (found by {} while the job formed; what the lost rank printed may tell why)",
                  why.message(), own_name())};
  auto* from = child(peer);
  if (from == nullptr || from->greeted) return fail(loss_);
  lost_child_ = from;
  named_by_ = after(now_, kNaming);
  name_lost_child();
}

void JoinMachine::name_lost_child() {
  auto value = space_.get(record_key(lost_child_->rank));
  if (value && !*value && now_ < named_by_) return;
  auto record = value && *value ? decode_record(**value) : Result<Record>(loss_);
  if (!record) return fail(loss_);
  fail({loss_.code(), fmt::format("rank {} (host {}) was lost before its greeting came: {}",
                                  lost_child_->rank, record->host, loss_.message())});
}

void JoinMachine::fail(Status why) {
  if (state_ >= State::kFlush) return;
  status_ = std::move(why);
  state_ = State::kFlush;
  flush_ends_ = after(now_, kFlush);
  const JoinNote note{.kind = NoteKind::kFailed,
                      .address = contradicted_by_,
                      .code = status_.code(),
                      .text = status_.message(),
                      .is_hearsay = is_hearsay_};
  tell(note);
  // Time-outs come to everyone by themselves, and each names what it waited for.
  if (status_.code() != Code::kTimeout) {
    auto bytes = encode_note(note);
    [[maybe_unused]] auto put =
        space_.put(key("failed"), {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
}

void JoinMachine::tell(const JoinNote& note) {
  auto bytes = encode_note(note);
  for (auto& c : children_) {
    if (c.greeted) channel_.post_note(c.rank, bytes);
  }
  if (!parent_name_.empty()) channel_.post_note(tree_.parent, bytes);
}

void JoinMachine::end_flush(Time now) {
  if (now < flush_ends_ && spec_.size > 1) return;
  channel_.abort(status_);  // before the buffers go
  wire::Events last;
  channel_.progress(now, last);
  state_ = State::kEnded;
}

}  // namespace paceline::bootstrap
