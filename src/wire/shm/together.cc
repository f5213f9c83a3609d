// Messages in the peer's arena, read by several threads at once: one core is at the end of its own bandwidth long before
// the memory is.
#include <algorithm>

#include "base/workers.h"
#include "wire/shm/conversation.h"

namespace paceline::wire::shm {
namespace {

constexpr uint64_t kPart = 128 * 1024;      // a bite: long against the look for the next one
constexpr uint64_t kWorthIt = 1024 * 1024;  // less is read before another thread has woken up

}  // namespace

/// Some of the messages in front, the last of them perhaps in part. 0: none, or too little of them.
uint64_t Conversation::read_together() {
  Workers* workers = shared_.workers;
  if (workers == nullptr || workers->threads() == 1) return 0;
  parts_.clear();
  uint64_t room = shared_.options.worker_bytes * static_cast<uint64_t>(workers->threads()) /
                  std::max<uint64_t>(shared_.readers, 1);
  const uint64_t all = room;
  for (auto& pull : pulls_) {
    room = room / kPieceAlign * kPieceAlign;
    if (pull.way != Way::kArena || room == 0) break;
    const uint64_t end = std::min(pull.offer.length, pull.done + room);
    for (uint64_t from = pull.done; from < end; from += kPart)
      parts_.push_back({&pull, from, std::min(kPart, end - from)});
    room -= end - pull.done;
  }
  if (all - room < kWorthIt || !link_->begin_access()) return 0;
  {
    // What others submit meanwhile may add pulls, which moves none of these.
    const OpenFor open(shared_.interlude, all - room);
    workers->run(static_cast<int>(parts_.size()), [this](int i) {
      auto& part = parts_[static_cast<std::size_t>(i)];
      part.answered = read_part(*part.pull, part.from, part.bytes);
    });
  }
  link_->end_access();
  uint64_t read = 0;
  for (const auto& part : parts_) {
    read += part.bytes;
    part.pull->done += part.bytes;
    if (!part.answered) part.pull->answer = nullptr;
  }
  while (!pulls_.empty() && pulls_.front().done == pulls_.front().offer.length) {
    const Pull finished = pulls_.front();
    pulls_.pop_front();
    finish_pull(finished);
  }
  return read;
}

}  // namespace paceline::wire::shm
