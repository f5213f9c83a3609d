// The orderly end. Goodbyes gather up the control tree: a rank says goodbye to its parent once it
// wants to leave and all its children's subtrees have. Rank 0 then sends the farewell down: from
// there on a closing connection is no failure. A rank stays until its children have confirmed the
// farewell or are gone, so that closing its own connections cannot overtake it.
#include <fmt/format.h>

#include <algorithm>

#include "engine/engine_impl.h"

namespace paceline::engine {
namespace {
constexpr Time kLinger = 300 * kMillisecond;
// For operations whose own deadline is the end's: who did not submit them is asked after it.
constexpr Time kInquiries = 2 * kSecond;

std::vector<Rank> children_of(Rank rank, Rank size) {
  auto all = control_neighbours(rank, size);
  std::erase_if(all, [&](Rank r) { return r < rank; });
  return all;
}
}  // namespace

void EngineImpl::on_goodbye(Rank from) {
  if (std::find(goodbyes_.begin(), goodbyes_.end(), from) == goodbyes_.end())
    goodbyes_.push_back(from);
  if (finishing_) try_goodbye();
}

void EngineImpl::try_goodbye() {
  if (said_goodbye_ || farewell_ || !active_.empty()) return;
  for (Rank child : children_of(topology_.rank, topology_.size())) {
    if (std::find(goodbyes_.begin(), goodbyes_.end(), child) == goodbyes_.end()) return;
  }
  said_goodbye_ = true;
  if (topology_.rank == 0) return on_farewell();
  ControlNote note;
  note.kind = NoteKind::kGoodbye;
  post(control_parent(topology_.rank), note);
}

void EngineImpl::on_farewell() {
  if (farewell_) return;
  farewell_ = true;
  farewell_until_ = after(now_, kLinger);
  ControlNote note;
  note.kind = NoteKind::kFarewell;
  unseen_ = children_of(topology_.rank, topology_.size());
  std::erase_if(unseen_, [&](Rank r) { return gone_[static_cast<std::size_t>(r)] != 0; });
  for (Rank child : unseen_) post(child, note);
  if (topology_.rank == 0) return;
  note.kind = NoteKind::kFarewellSeen;
  post(control_parent(topology_.rank), note);
}

bool EngineImpl::finish(Time now, Time deadline) {
  now_ = std::max(now_, now);
  finishing_ = true;
  if (!failure_) return buffers_free_ && active_.empty() && !is_telling();
  try_goodbye();
  if (now >= deadline) {
    if (active_.empty()) return true;
    // Their buffers and this engine's memory are in other hands: the channel's, and those of ranks that read them in place.
    if (now < after(deadline, kInquiries)) return false;
    const Record& r = *records_[active_.front()];
    fail({Code::kAborted, fmt::format("{} has ended its communicator before {} had",
                                      topology_.name(topology_.rank), r.description.title())},
         -1);
    return false;
  }
  return farewell_ && (unseen_.empty() || now >= farewell_until_);
}

}  // namespace paceline::engine
