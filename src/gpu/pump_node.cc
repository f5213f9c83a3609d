// Where the ranks of a node meet: before gradients that they have given to each other are added up, and before results that
// are in place are read.
#include "gpu/pump_track.h"

namespace paceline::gpu {

/// What streams have put in place may be met for. A piece that has come will be soon: the thread looks hard meanwhile.
bool Pump::in_place() {
  const uint32_t done = Flags::load(options_.flags.done());
  const bool moved = done != done_seen_;
  done_seen_ = done;
  if (moved) meet();
  return come_.exchange(false, std::memory_order_relaxed) || moved;
}

/// Whom the page shows to be there need not be heard of over the wire.
bool Pump::look_at_page() {
  if (options_.page == nullptr) return false;
  const uint64_t given = options_.page->through(NodePage::For::kGiven);
  const uint64_t through = options_.page->through(NodePage::For::kInPlace);
  if (given == given_seen_ && through == page_seen_) return false;
  given_seen_ = given;
  page_seen_ = through;
  const std::lock_guard lock(mutex_);
  for (const auto& o : brings_) o->brought = o->brought || o->sequence <= given;
  pass_brought();
  for (const auto& o : meets_) o->met = o->met || o->sequence <= through;
  pass_met();
  return true;
}

/// The same for what they give each other, before it is added up. With the mutex held.
void Pump::pass_brought() {
  while (!brings_.empty() && brings_.front()->brought) {
    if (failure_)
      Flags::store(options_.flags.brought(), static_cast<uint32_t>(brings_.front()->sequence));
    brings_.pop_front();
  }
  awaits_parts_.store(!brings_.empty(), std::memory_order_relaxed);
}

/// What this rank's stream has given to the node's others: they are told, and asked for theirs.
bool Pump::given() {
  const uint32_t given = Flags::load(options_.flags.given());
  bool moved = false;
  while (!to_bring_.empty() && reached(given, static_cast<uint32_t>(to_bring_.front()->sequence))) {
    const Shared o = std::move(to_bring_.front());
    to_bring_.pop_front();
    moved = true;
    {
      const std::lock_guard lock(mutex_);
      if (!failure_) return true;
      brings_.push_back(o);
      awaits_parts_.store(true, std::memory_order_relaxed);
    }
    if (options_.page != nullptr)
      options_.page->put(options_.local_rank, NodePage::For::kGiven, o->sequence);
    const auto meet = [&](const Wire& wire, Notice notice) {
      return wire.meet(options_.bring_group, o->name.c_str(), notice);
    };
    if (auto status = track(wires_.front(), o, 0, Kind::kBringing, meet); !status) {
      fail(status);
      return true;
    }
  }
  return moved;
}

/// The node has met for these operations. With the mutex held.
void Pump::pass_met() {
  while (!meets_.empty() && meets_.front()->met) {
    const auto& o = *meets_.front();
    if (failure_) Flags::store(options_.flags.met(), static_cast<uint32_t>(o.sequence));
    arrived(*meets_.front());
    meets_.pop_front();
  }
  awaits_node_.store(!meets_.empty(), std::memory_order_relaxed);
}

/// Asks the node's ranks to meet for what has arrived here, in the order of submission: one thread at a time, and the others
/// need not wait for it (a wire's thread may be inside, or may come here while it is).
void Pump::meet() {
  if (meeting_.fetch_add(1) > 0) return;
  int seen = 1;
  do {
    seen = meeting_.load();
    while (meet_next()) {
    }
  } while (meeting_.fetch_sub(seen) != seen);
}

bool Pump::meet_next() {
  Shared o;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_ || to_meet_.empty() || to_meet_.front()->until_meeting > 0) return false;
    const auto& next = *to_meet_.front();
    if (next.copies &&
        !reached(Flags::load(options_.flags.done()), static_cast<uint32_t>(next.sequence)))
      return false;
    o = std::move(to_meet_.front());
    to_meet_.pop_front();
    meets_.push_back(o);
    awaits_node_.store(true, std::memory_order_relaxed);
    if (options_.page != nullptr)
      options_.page->put(options_.local_rank, NodePage::For::kInPlace, o->sequence);
  }
  const auto meet = [&](const Wire& wire, Notice notice) {
    return wire.meet(options_.node_group, o->name.c_str(), notice);
  };
  if (auto status = track(wires_.front(), o, 0, Kind::kMeeting, meet); !status) {
    fail_soon(status);
    return false;
  }
  return true;
}

}  // namespace paceline::gpu
