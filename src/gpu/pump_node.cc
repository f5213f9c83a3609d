// Where the ranks of a node meet: before gradients that they have given to each other are added up, and before results that
// are in place are read.
#include "gpu/pump_track.h"

namespace paceline::gpu {

using For = NodePage::For;

/// What streams have given or put in place may be met for. A piece that has come will be in place soon: the thread looks
/// hard meanwhile.
bool Pump::has_streamed() {
  const uint32_t given = Flags::load(options_.flags.given());
  const uint32_t done = Flags::load(options_.flags.done());
  const bool moved = given != given_seen_ || done != done_seen_;
  given_seen_ = given;
  done_seen_ = done;
  if (moved) meet();
  return come_.exchange(false, std::memory_order_relaxed) || moved;
}

/// Whom the page shows to be there need not be heard of over the wire.
bool Pump::look_at_page() {
  if (options_.page == nullptr) return false;
  bool moved = false;
  for (const auto what : NodePage::kAll) {
    auto& meeting = meetings_[what];
    const uint64_t through = options_.page->through(what);
    if (through == meeting.seen) continue;
    meeting.seen = through;
    moved = true;
    const std::lock_guard lock(mutex_);
    for (const auto& o : meeting.asked) o->met[what] = o->met[what] || o->sequence <= through;
    pass(what);
  }
  return moved;
}

/// Operations to which the node's ranks have come, as far as all before them. With the mutex held.
void Pump::pass(For what) {
  auto& meeting = meetings_[what];
  const auto& flags = options_.flags;
  auto* flag = what == For::kGiven ? flags.brought() : flags.met();
  for (auto& asked = meeting.asked; !asked.empty() && asked.front()->met[what]; asked.pop_front()) {
    auto& o = *asked.front();
    if (failure_) Flags::store(flag, static_cast<uint32_t>(o.sequence));
    if (what == For::kInPlace) arrived(o);
  }
  meeting.awaits.store(!meeting.asked.empty(), std::memory_order_relaxed);
}

/// Asks the node's ranks to meet for what this one has come to, in the order of submission: one thread at a time, and the
/// others need not wait for it (a wire's thread may be inside, or may come here while it is).
void Pump::meet() {
  if (meeting_.fetch_add(1) > 0) return;
  int seen = 1;
  do {
    seen = meeting_.load();
    for (const auto what : NodePage::kAll) {
      while (ask_next(what)) {
      }
    }
  } while (meeting_.fetch_sub(seen) != seen);
}

/// Whether this rank has. With the mutex held.
bool Pump::has_come(For what, const Operation& o) const {
  const auto sequence = static_cast<uint32_t>(o.sequence);
  if (what == For::kGiven) return reached(Flags::load(options_.flags.given()), sequence);
  const bool in_place = reached(Flags::load(options_.flags.done()), sequence);
  return o.until_meeting <= 0 && (!o.copies || in_place);
}

bool Pump::ask_next(For what) {
  auto& meeting = meetings_[what];
  Shared o;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_ || meeting.to_ask.empty() || !has_come(what, *meeting.to_ask.front()))
      return false;
    o = std::move(meeting.to_ask.front());
    meeting.to_ask.pop_front();
    meeting.asked.push_back(o);
    meeting.awaits.store(true, std::memory_order_relaxed);
    if (options_.page != nullptr) options_.page->put(options_.local_rank, what, o->sequence);
  }
  const auto meet = [&](const Wire& wire, Notice notice) {
    return wire.meet(options_.node_groups[what], o->name.c_str(), notice);
  };
  const auto index = static_cast<size_t>(what);
  if (auto status = track(wires_.front(), o, index, Kind::kMeeting, meet); !status) {
    fail_soon(status);
    return false;
  }
  return true;
}

}  // namespace paceline::gpu
