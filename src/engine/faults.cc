// Losses, mismatches, deadlines: how an operation that can't go on ends on every rank, with one
// sentence that names who is to blame.
//
// The first failure that a rank learns of ends its engine; the rank passes it on along the control
// tree, and to everybody whom it was waiting for or, in small jobs, to everybody: so that a tree
// with dead or stopped ranks in it still reaches all others.
#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"
#include "engine/engine_impl.h"

namespace paceline::engine {
namespace {

constexpr Time kStallAfter = kSecond;
constexpr Time kAnswerWithin = 500 * kMillisecond;
constexpr Time kInquiryAtMost = 1500 * kMillisecond;
// Up to so many ranks a failure is told to every one directly.
constexpr Rank kTellAll = 32;
// A rank that has met the end of a peer listens so long for why that peer left: one that ended because of
// another's end, or of a mismatch, told so before it left. One that aborted lives, and its note is on its way.
constexpr Time kHearWithin = 100 * kMillisecond;
constexpr Time kHearAbortedWithin = kSecond;
// The other way round: so long a failed rank keeps its caller (who may end the process) until its notes have left.
constexpr Time kTellWithin = 200 * kMillisecond;

std::string seconds(Time t) { return fmt::format("{:g} s", static_cast<double>(t) / kSecond); }

}  // namespace

void EngineImpl::post(Rank peer, const ControlNote& note) {
  if (gone_[static_cast<std::size_t>(peer)]) return;
  channel_.post_note(peer, encode_note(note));
}

void EngineImpl::fail(const Status& why, Rank told_by) {
  if (!failure_) return;
  failure_ = why;
  std::vector<Rank> tell;
  const Rank size = topology_.size();
  const Rank me = topology_.rank;
  if (size <= kTellAll) {
    for (Rank r = 0; r < size; ++r) tell.push_back(r);
  } else {
    tell = control_neighbours(me, size);
    if (me > 0 && control_parent(me) > 0) tell.push_back(control_parent(control_parent(me)));
    for (Rank child : control_neighbours(me, size)) {
      if (child < me) continue;
      for (Rank grandchild : control_neighbours(child, size)) tell.push_back(grandchild);
    }
    for (auto slot : active_) {
      for (Rank r : blockers(*records_[slot])) tell.push_back(r);
    }
  }
  std::sort(tell.begin(), tell.end());
  tell.erase(std::unique(tell.begin(), tell.end()), tell.end());
  ControlNote note;
  note.kind = NoteKind::kFailure;
  note.failure = why;
  for (Rank r : tell) {
    if (r != me && r != told_by) post(r, note);
  }
  channel_.abort(why);
  channel_aborted_ = true;
  tell_until_ = after(now_, kTellWithin);
}

void EngineImpl::abort(const Status& why) {
  if (!failure_) return;
  fail({why.code(),
        fmt::format("{} ended the job: {}", topology_.name(topology_.rank), why.message())},
       -1);
}

void EngineImpl::adopt(const Status& failure) {
  if (!failure) fail(failure, -1);
}

// The wire's sentence may name the peer already; the host it may not know.
void EngineImpl::fail_with_peer(Rank peer, const Status& why) {
  auto name = topology_.name(peer);
  auto code = why.is_ok() ? Code::kPeerLost : why.code();
  fail({code, why.message().find(name) != std::string::npos
                  ? why.message()
                  : fmt::format("{} is lost: {}", name, why.message())},
       peer);
}

// The first one stands: what follows may follow from it.
void EngineImpl::suspect(Rank peer, const Status& why) {
  if (!failure_ || suspicion_.peer >= 0) return;
  const bool lives = why.code() == Code::kAborted;
  suspicion_ = {peer, why, after(now_, lives ? kHearAbortedWithin : kHearWithin)};
}

void EngineImpl::on_loss(const wire::Loss& loss) {
  if (loss.peer < 0 || loss.peer >= topology_.size()) return;
  auto& gone = gone_[static_cast<std::size_t>(loss.peer)];
  const bool said_goodbye =
      farewell_ || std::find(goodbyes_.begin(), goodbyes_.end(), loss.peer) != goodbyes_.end();
  gone = 1;
  std::erase(unseen_, loss.peer);
  if (farewell_) return;
  bool waited_for = false;
  for (auto slot : active_) {
    auto on = blockers(*records_[slot]);
    waited_for |= std::find(on.begin(), on.end(), loss.peer) != on.end();
  }
  if (said_goodbye && !waited_for) return;
  suspect(loss.peer, loss.status);
}

void EngineImpl::on_note(const wire::Note& wire_note, Time now) {
  if (wire_note.peer < 0 || wire_note.peer >= topology_.size()) return;
  auto note = decode_note(wire_note.bytes);
  if (!note) {
    if (log::first("engine-bad-note"))
      log::warning("{} sent a control message that can't be read; ignored",
                   topology_.name(wire_note.peer));
    return;
  }
  switch (note->kind) {
    case NoteKind::kHello:
      break;
    case NoteKind::kFailure:
      if (!farewell_) fail(note->failure, wire_note.peer);
      break;
    case NoteKind::kInquiry:
      on_inquiry(wire_note.peer, *note, now);
      break;
    case NoteKind::kAnswer:
      on_answer(wire_note.peer, *note);
      break;
    case NoteKind::kGoodbye:
      on_goodbye(wire_note.peer);
      break;
    case NoteKind::kFarewell:
      on_farewell();
      break;
    case NoteKind::kFarewellSeen:
      std::erase(unseen_, wire_note.peer);
      break;
  }
}

std::vector<Rank> EngineImpl::blockers(const Record& r) const {
  if (r.state != Record::State::kRunning) return {};
  if (r.transfer) return {r.peer};
  return r.executor->blockers();
}

std::string EngineImpl::waiting_for(OpId id) const {
  const Record* r = find(id);
  if (r == nullptr) return "the operation has ended";
  std::string names;
  for (Rank p : blockers(*r)) names += (names.empty() ? "" : ", ") + topology_.name(p);
  return fmt::format("{} waits for {}", r->description.title(),
                     names.empty() ? "others before it" : names + ", which may wait for others");
}

Record* EngineImpl::find_active(const OpKey& key) {
  for (auto slot : active_) {
    if (records_[slot]->key == key) return records_[slot].get();
  }
  return nullptr;
}

std::string EngineImpl::last_of_stream(uint64_t stream) const {
  const Description* last = nullptr;
  uint64_t highest = 0;
  auto look = [&](const OpKey& key, const Description& d) {
    if (key.stream == stream && (last == nullptr || key.sequence >= highest)) {
      last = &d;
      highest = key.sequence;
    }
  };
  for (const auto& m : remembered_) look(m.key, m.description);
  for (auto slot : active_) look(records_[slot]->key, records_[slot]->description);
  return last == nullptr ? std::string() : last->title();
}

// The counts between this rank and `peer` in an all-to-all; false where there are none.
bool EngineImpl::add_pair_counts(const Record& r, Rank peer, Description& d) const {
  const Group* g = group(r.group);
  if (g == nullptr || r.send_counts.empty()) return false;
  auto at = std::find(g->ranks.begin(), g->ranks.end(), peer);
  if (at == g->ranks.end()) return false;
  auto index = static_cast<std::size_t>(at - g->ranks.begin());
  d.pair_send = r.send_counts[index];
  d.pair_receive = r.receive_counts[index];
  return true;
}

// Asks those whom the operation waits for: what of it?
void EngineImpl::start_inquiry(Record& r, Reason reason, Time now) {
  ControlNote note;
  note.kind = NoteKind::kInquiry;
  note.key = r.key;
  note.reason = reason;
  note.description = r.description;
  auto on = blockers(r);
  for (Rank peer : on) {
    add_pair_counts(r, peer, note.description);
    post(peer, note);
  }
  if (reason != Reason::kDeadline || r.inquiry_over_at != kNever) return;
  r.asked = std::move(on);
  r.held.clear();
  r.inquiry_silent_at = after(now, kAnswerWithin);
  r.inquiry_over_at = after(now, kInquiryAtMost);
  next_check_ = std::min(next_check_, r.inquiry_silent_at);
}

// The wire found two different operations in one place: tell the other rank ours; it knows both,
// and so does this one once the other's comes.
void EngineImpl::on_mismatch(Record& r, Rank peer, Time now) {
  if (r.inquiry_over_at != kNever) return;
  ControlNote note;
  note.kind = NoteKind::kInquiry;
  note.key = r.key;
  note.reason = Reason::kMismatch;
  note.description = r.description;
  add_pair_counts(r, peer, note.description);
  post(peer, note);
  r.asked = {peer};
  r.inquiry_over_at = after(now, kAnswerWithin);
  r.deadline = std::min(r.deadline, r.inquiry_over_at);
  r.outcome.status = {
      Code::kMismatch,
      fmt::format("{}: {} and {} do not run the same operation", r.description.title(),
                  topology_.name(topology_.rank), topology_.name(peer))};
  next_check_ = std::min(next_check_, r.inquiry_over_at);
}

void EngineImpl::on_inquiry(Rank from, const ControlNote& note, Time now) {
  if (!failure_) {
    ControlNote reply;
    reply.kind = NoteKind::kFailure;
    reply.failure = failure_;
    return post(from, reply);
  }
  Record* active = find_active(note.key);
  const Description* mine = active != nullptr ? &active->description : nullptr;
  uint32_t digest = active != nullptr ? active->digest : 0;
  if (mine == nullptr) {
    for (const auto& m : remembered_) {
      if (m.key == note.key) {
        mine = &m.description;
        digest = m.digest;
      }
    }
  }
  ControlNote reply;
  reply.kind = NoteKind::kAnswer;
  reply.key = note.key;
  if (mine == nullptr) {
    // Held up in an earlier operation of the same stream: not this rank is to blame, but whoever holds it up.
    Record* earlier = nullptr;
    for (auto slot : active_) {
      Record& r = *records_[slot];
      if (r.key.stream == note.key.stream && r.key.sequence < note.key.sequence &&
          (earlier == nullptr || r.key.sequence < earlier->key.sequence))
        earlier = &r;
    }
    if (earlier != nullptr && note.reason == Reason::kDeadline) {
      reply.answer = Answer::kWaiting;
      post(from, reply);
      if (earlier->inquiry_over_at == kNever) start_inquiry(*earlier, Reason::kDeadline, now);
      return;
    }
    if (const char* why = held_.load(std::memory_order_relaxed); why != nullptr && !finishing_) {
      reply.answer = Answer::kWaiting;
      reply.detail = why;
      return post(from, reply);
    }
    reply.answer = finishing_ ? Answer::kLeaving : Answer::kNotSubmitted;
    reply.detail = last_of_stream(note.key.stream);
    return post(from, reply);
  }
  if (Description pair; active != nullptr && digest == digest_of(note.description) &&
                        add_pair_counts(*active, from, pair)) {
    auto report = [&](Rank sender, uint64_t sent, Rank receiver, uint64_t expected) {
      fail({Code::kMismatch,
            fmt::format("{}: {} sends {} elements to {}, which expects {}", mine->title(),
                        topology_.name(sender), sent, topology_.name(receiver), expected)},
           -1);
    };
    if (pair.pair_receive != note.description.pair_send)
      return report(from, note.description.pair_send, topology_.rank, pair.pair_receive);
    if (pair.pair_send != note.description.pair_receive)
      return report(topology_.rank, pair.pair_send, from, note.description.pair_receive);
  }
  if (digest != digest_of(note.description) || note.reason == Reason::kMismatch) {
    const bool first = topology_.rank < from;
    auto my_name = topology_.name(topology_.rank);
    auto other = topology_.name(from);
    return fail({Code::kMismatch, first ? disagreement(*mine, my_name, note.description, other)
                                        : disagreement(note.description, other, *mine, my_name)},
                -1);
  }
  reply.answer = active != nullptr ? Answer::kWaiting : Answer::kEnded;
  post(from, reply);
  // Whoever holds this rank up holds the other one up as well: join in.
  if (note.reason == Reason::kDeadline && active != nullptr && active->inquiry_over_at == kNever)
    start_inquiry(*active, Reason::kDeadline, now);
}

void EngineImpl::on_answer(Rank from, const ControlNote& note) {
  Record* r = find_active(note.key);
  if (!failure_ || r == nullptr) return;
  std::erase(r->asked, from);
  if (note.answer == Answer::kWaiting && !note.detail.empty())
    r->held.emplace_back(from, note.detail);
  if (note.answer == Answer::kLeaving) {
    return fail(
        {Code::kPeerLost,
         fmt::format(
             "{}: {} has ended its communicator without it{}", r->description.title(),
             topology_.name(from),
             note.detail.empty() ? "" : fmt::format(" (its last operation was {})", note.detail))},
        -1);
  }
  // It expected nothing (another count would have met ours on the wire). Twice, for the first answer may have
  // overtaken the last message.
  Description pair;
  if (note.answer == Answer::kEnded && add_pair_counts(*r, from, pair) && pair.pair_send > 0) {
    auto on = blockers(*r);
    if (std::find(on.begin(), on.end(), from) == on.end()) return;
    if (r->ended_once != from) {
      r->ended_once = from;
      return;
    }
    return fail(
        {Code::kMismatch,
         fmt::format("{}: {} sends {} elements to {}, which expects 0", r->description.title(),
                     topology_.name(topology_.rank), pair.pair_send, topology_.name(from))},
        -1);
  }
  if (note.answer == Answer::kNotSubmitted && r->inquiry_over_at != kNever) {
    fail({Code::kTimeout,
          fmt::format("{} timed out after {}: {} has not submitted it{}", r->description.title(),
                      seconds(r->timeout), topology_.name(from),
                      note.detail.empty()
                          ? " (nor any other operation of this group)"
                          : fmt::format(" (its last operation was {})", note.detail))},
         -1);
  }
}

void EngineImpl::check_timers(Time now) {
  next_check_ = kNever;
  for (std::size_t i = 0; i < active_.size() && failure_; ++i) {
    Record& r = *records_[active_[i]];
    if (r.inquiry_over_at != kNever) {
      if (now >= r.inquiry_silent_at && !r.asked.empty()) {
        std::string names;
        for (Rank p : r.asked) names += (names.empty() ? "" : ", ") + topology_.name(p);
        fail({Code::kTimeout,
              fmt::format("{} timed out after {}: {} {} not answer", r.description.title(),
                          seconds(r.timeout), names, r.asked.size() == 1 ? "does" : "do")},
             -1);
      } else if (now >= r.inquiry_over_at) {
        if (!r.outcome.status) {
          fail(r.outcome.status, -1);
        } else {
          std::string names;
          for (Rank p : blockers(r)) {
            names += (names.empty() ? "" : ", ") + topology_.name(p);
            for (const auto& [held, why] : r.held) {
              if (held == p) names += ", which " + why;
            }
          }
          fail({Code::kTimeout,
                fmt::format("{} timed out after {} on {}, waiting for {}", r.description.title(),
                            seconds(r.timeout), topology_.name(topology_.rank),
                            names.empty() ? "scratch memory" : names)},
               -1);
        }
      }
      next_check_ = std::min({next_check_, r.inquiry_over_at,
                              now >= r.inquiry_silent_at ? kNever : r.inquiry_silent_at});
      continue;
    }
    if (now >= r.deadline) {
      start_inquiry(r, Reason::kDeadline, now);
      next_check_ = std::min(next_check_, r.inquiry_silent_at);
      continue;
    }
    // An operation that rests may have met another one: ranks out of step find each other in a
    // second, not at the deadline.
    auto ask_at = after(r.last_move, kStallAfter << std::min(2 * r.stall_asked, 12));
    if (r.state == Record::State::kRunning && now >= ask_at) {
      start_inquiry(r, Reason::kStall, now);
      ++r.stall_asked;
      ask_at = after(now, kStallAfter << std::min(2 * r.stall_asked, 12));
    }
    next_check_ = std::min({next_check_, r.deadline, std::max(ask_at, after(now, kMillisecond))});
  }
}

}  // namespace paceline::engine
