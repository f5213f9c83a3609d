#include "wire/shm/conversation.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/log.h"

namespace paceline::wire::shm {

namespace {
constexpr int kRecordsPerTurn = 256;
}

Conversation::Conversation(Rank peer, std::string name, Shared& shared)
    : peer_(peer), name_(std::move(name)), shared_(shared) {}

void Conversation::complete(uint64_t cookie, uint64_t bytes, Status status, uint64_t answered,
                            uint64_t held) {
  shared_.done.push_back({cookie, bytes, std::move(status), answered, held});
}

// ---- posting

void Conversation::send(Tag tag, uint32_t digest, std::span<const std::byte> data, uint64_t cookie,
                        const Answer& answer) {
  Queued queued;
  queued.header.tag = tag;
  queued.header.digest = digest;
  queued.header.length = data.size();
  queued.data = data;
  queued.cookie = cookie;
  const uint64_t record = record_bytes(data.size());
  const uint64_t returned = link_ ? link_->credit_returned() : 0;
  if (data.size() <= shared_.options.eager_limit &&
      eager_sent_ - returned + record <= shared_.options.eager_budget) {
    eager_sent_ += record;
    queued.header.type = RecordType::kEager;
  } else {
    queued.header.type = RecordType::kOffer;
    queued.header.id = next_id_++;
    queued.answer = answer;
    lent_.emplace(queued.header.id, Lent{data, cookie, tag, answer.place});
  }
  write_or_queue(std::move(queued));
}

void Conversation::receive(Tag tag, uint32_t digest, Inbox inbox, uint64_t cookie) {
  const Posted posted{digest, inbox, cookie};
  auto found = arrived_.find(tag);
  if (found != arrived_.end()) {
    const Arrived arrived = std::move(found->second);
    arrived_.erase(found);
    if (arrived.header.type == RecordType::kEager) {
      match_eager(arrived.header, arrived.payload, posted);
    } else {
      match_offer(arrived.header, posted);
    }
    return;
  }
  if (!posted_.emplace(tag, posted).second) {
    complete(cookie, 0,
             {Code::kInvalidArgument,
              fmt::format("two receives from {} with the same tag {:#x}", name_, tag)});
  }
}

void Conversation::post_note(std::span<const std::byte> bytes) {
  Queued queued;
  queued.header.type = RecordType::kNote;
  queued.data = bytes;
  if (write_or_queue(std::move(queued))) return;
  // The caller keeps its bytes only until this returns.
  queue_.back().copy.assign(bytes.begin(), bytes.end());
  queue_.back().data = queue_.back().copy;
}

/// True when it is in the ring.
bool Conversation::write_or_queue(Queued queued) {
  queue_.push_back(std::move(queued));
  return link_ != nullptr && queue_.size() == 1 && flush();
}

void Conversation::post(const RecordHeader& header) {
  Queued queued;
  queued.header = header;
  write_or_queue(std::move(queued));
}

/// Where the receiver finds the bytes. (The arena can be announced only over a link.)
void Conversation::fill_offer(Queued& queued) {
  auto& header = queued.header;
  const auto data = queued.data;
  header.spare = reinterpret_cast<uintptr_t>(data.data());
  if (!shared_.options.use_arena) return;
  auto& arena = *shared_.options.allocator;
  auto offset = arena.offset_of(data.data(), data.size());
  if (queued.answer.given != 0) {
    const bool in_pieces = (queued.answer.given & kInPieces) != 0;
    header.flag = in_pieces ? OfferFlag::kCameInPieces : OfferFlag::kAnswered;
    header.offset = (queued.answer.given & ~kInPieces) - 1;
  }
  if (!offset) {
    // Two copies through the caches, which bring the answer as well, for two that the system makes page by page.
    // (Short ones may go another way than what answers them.)
    if (queued.answer.place != nullptr && data.size() > shared_.options.eager_limit && make_slots())
      header.flag = OfferFlag::kAnswerInPieces;
    return;
  }
  if (!link_->announce(arena)) return;
  header.in_arena = 1;
  header.where = *offset;
  // Shorter ones may lie in one page with what belongs to others, which await_access() could not detach.
  if (queued.answer.place == nullptr || data.size() < page_size()) return;
  if (auto place = arena.offset_of(queued.answer.place, data.size())) {
    header.flag = OfferFlag::kAnswerHere;
    header.offset = *place;
  }
}

/// The message is where this side wants it since the peer read the one that this one answers.
bool Conversation::is_there(const RecordHeader& offer, const Posted& posted) {
  if (offer.flag == OfferFlag::kCameInPieces) {
    const auto found = answers_.find(offer.offset);
    if (found == answers_.end()) return false;
    const Answered came = found->second;
    answers_.erase(found);
    return posted.inbox.sink == nullptr && came.place == posted.inbox.into &&
           came.bytes == offer.length;
  }
  return offer.flag == OfferFlag::kAnswered && posted.inbox.sink == nullptr &&
         shared_.options.allocator->offset_of(posted.inbox.into, offer.length) == offer.offset;
}

/// Writes what waits, in order. True when the queue is empty afterwards.
bool Conversation::flush() {
  while (!queue_.empty()) {
    auto& next = queue_.front();
    const bool offer = next.header.type == RecordType::kOffer;
    if (offer) fill_offer(next);
    const auto payload = offer ? std::span<const std::byte>() : next.data;
    if (!link_->write(next.header, payload)) return false;
    shared_.counters.wire_sent += record_bytes(payload.size());
    if (next.header.type == RecordType::kEager) {
      shared_.counters.payload_sent += payload.size();
      complete(next.cookie, payload.size(), Status::ok());
    }
    queue_.pop_front();
  }
  return true;
}

bool Conversation::write_waiting() {
  const auto before = queue_.size();
  if (before != 0) flush();
  return queue_.size() != before || (!copies_.empty() && step_copy() != 0);
}

// ---- records

Status Conversation::exchange(bool& moved) {
  if (!queue_.empty()) {
    const auto before = queue_.size();
    flush();
    moved = moved || queue_.size() != before;
  }
  RingReader::Record record;
  // A bound, so that one busy peer does not keep the others waiting.
  for (int i = 0; i < kRecordsPerTurn; ++i) {
    switch (link_->peek(record)) {
      case RingReader::State::kEmpty:
        return Status::ok();
      case RingReader::State::kBroken:
        return {Code::kCorrupted, fmt::format("{} wrote nonsense into the shared ring", name_)};
      case RingReader::State::kRecord:
        break;
    }
    moved = true;
    shared_.counters.wire_received += record_bytes(record.payload.size());
    if (!take(record)) {
      return {Code::kCorrupted,
              fmt::format("{} sent a record of type {} that does not fit what was agreed", name_,
                          static_cast<int>(record.header.type))};
    }
    link_->pop();
  }
  return Status::ok();
}

bool Conversation::take(const RingReader::Record& record) {
  switch (record.header.type) {
    case RecordType::kEager:
      return on_eager(record);
    case RecordType::kOffer:
      return on_offer(record.header);
    case RecordType::kPull:
      return on_pull(record.header);
    case RecordType::kPiece:
      return on_piece(record);
    case RecordType::kFreed:
      return on_freed(record.header);
    case RecordType::kTaken:
      return on_taken(record.header);
    case RecordType::kWithdrawn:
      return on_withdrawn(record.header);
    case RecordType::kNote:
      if (record.payload.size() > kNoteLimit) return false;
      shared_.notes.push_back({peer_, {record.payload.begin(), record.payload.end()}});
      return true;
    case RecordType::kSkip:
      break;
  }
  return false;
}

bool Conversation::on_eager(const RingReader::Record& record) {
  if (!shared_.aborted.is_ok()) return true;
  auto found = posted_.find(record.header.tag);
  if (found == posted_.end()) {
    return arrived_
        .emplace(record.header.tag,
                 Arrived{record.header, {record.payload.begin(), record.payload.end()}})
        .second;
  }
  const Posted posted = found->second;
  posted_.erase(found);
  match_eager(record.header, record.payload, posted);
  return true;
}

void Conversation::match_eager(const RecordHeader& header, std::span<const std::byte> payload,
                               const Posted& posted) {
  link_->return_credit(record_bytes(payload.size()));
  Status status = check(header, payload.size(), posted);
  if (status.is_ok() && !payload.empty()) {
    if (posted.inbox.sink != nullptr) {
      posted.inbox.sink->consume(0, payload);
    } else {
      std::memcpy(posted.inbox.into, payload.data(), payload.size());
    }
  }
  if (status.is_ok()) shared_.counters.payload_received += payload.size();
  complete(posted.cookie, payload.size(), std::move(status));
}

bool Conversation::on_offer(const RecordHeader& offer) {
  if (!shared_.aborted.is_ok()) {
    RecordHeader answer;
    answer.type = RecordType::kTaken;
    answer.id = offer.id;
    answer.digest = static_cast<uint32_t>(Code::kAborted);
    post(answer);
    return true;
  }
  auto found = posted_.find(offer.tag);
  if (found == posted_.end()) return arrived_.emplace(offer.tag, Arrived{offer, {}}).second;
  const Posted posted = found->second;
  posted_.erase(found);
  match_offer(offer, posted);
  return true;
}

void Conversation::match_offer(const RecordHeader& offer, const Posted& posted) {
  Status status = check(offer, offer.length, posted);
  if (status.is_ok() && offer.length != 0) {
    if (!is_there(offer, posted)) return start_pull(offer, posted);
    Pull pull;
    pull.offer = offer;
    pull.posted = posted;
    return finish_pull(pull);
  }
  RecordHeader answer;
  answer.type = RecordType::kTaken;
  answer.id = offer.id;
  answer.digest = static_cast<uint32_t>(status.code());
  complete(posted.cookie, 0, std::move(status));
  post(answer);
}

Status Conversation::check(const RecordHeader& header, uint64_t length,
                           const Posted& posted) const {
  if (header.digest != 0 && posted.digest != 0 && header.digest != posted.digest) {
    return {Code::kMismatch,
            fmt::format(
                "{} sent a message of another operation than this rank expects (tag {:#x}, digest "
                "{:#x} against {:#x}): the ranks' operations differ",
                name_, header.tag, header.digest, posted.digest)};
  }
  if (length > posted.inbox.capacity) {
    return {Code::kMismatch,
            fmt::format("{} sent {} bytes where this rank expects at most {} (tag {:#x})", name_,
                        length, posted.inbox.capacity, header.tag)};
  }
  return Status::ok();
}

bool Conversation::on_taken(const RecordHeader& header) {
  auto found = lent_.find(header.id);
  if (found == lent_.end()) return !shared_.aborted.is_ok();
  const Lent lent = found->second;
  if (header.digest > static_cast<uint32_t>(Code::kInternal)) return false;
  if (lent.answered == lent.data.size() && lent.answered != 0)
    answers_.emplace(header.id, Answered{lent.answer, lent.answered});
  lent_.erase(found);
  std::erase_if(copies_, [&](const Copy& copy) { return copy.id == header.id; });
  const auto code = static_cast<Code>(header.digest);
  if (code == Code::kOk) {
    shared_.counters.payload_sent += lent.data.size();
    complete(lent.cookie, lent.data.size(), Status::ok());
  } else if (code == Code::kMismatch) {
    complete(
        lent.cookie, 0,
        {code, fmt::format("{} expects a message of another operation or size (tag {:#x}): the "
                           "ranks' operations differ",
                           name_, lent.tag)});
  } else {
    complete(lent.cookie, 0,
             {code, fmt::format("{} gave this message up (tag {:#x})", name_, lent.tag)});
  }
  return true;
}

// ---- ends

void Conversation::fail_requests(const Status& why) {
  for (auto& [tag, posted] : posted_) complete(posted.cookie, 0, why);
  for (auto& [id, lent] : lent_) complete(lent.cookie, 0, why);
  for (auto& pull : pulls_) complete(pull.posted.cookie, 0, why);
  for (auto& [id, pull] : piecewise_) complete(pull.posted.cookie, 0, why);
  for (auto& queued : queue_) {
    if (queued.header.type == RecordType::kEager) complete(queued.cookie, 0, why);
  }
  posted_.clear();
  arrived_.clear();
  lent_.clear();
  pulls_.clear();
  piecewise_.clear();
  copies_.clear();
  held_.clear();
  answers_.clear();
}

/// After revoke(): the peer reads nothing any more and writes no answer.
void Conversation::await_access() {
  if (!link_ || !access_ended_ || link_->await_access()) return;
  access_ended_ = false;
  auto& arena = *shared_.options.allocator;
  for (auto& [id, lent] : lent_) {
    arena.keep(lent.data.data());
    if (lent.answer == nullptr) continue;
    // The caller goes on to use it: it must not see what the peer writes there when it continues.
    if (auto status = arena.detach(lent.answer, lent.data.size()); !status)
      log::warning("what {} writes later may appear in a buffer of this process: {}", name_,
                   status.message());
  }
  for (auto& slot : slots_) arena.keep(slot.data);
  log::warning(
      "{} stands still in the middle of this process's shared memory: the buffers that it may read "
      "or write are not used again",
      name_);
}

void Conversation::end(const Status& why) {
  if (ended()) return;
  ended_ = why;
  if (link_) link_->revoke();
  await_access();
  fail_requests(why);
  queue_.clear();
  release_slots();
  link_.reset();
}

void Conversation::abort(const Status& why) {
  if (ended()) return;
  if (link_) link_->revoke();
  await_access();
  std::vector<uint64_t> pushed;
  for (auto& [id, lent] : lent_) {
    if (lent.copying != Copying::kNot) pushed.push_back(id);
  }
  fail_requests(why);
  std::erase_if(queue_, [](const Queued& queued) {
    return queued.header.type == RecordType::kEager || queued.header.type == RecordType::kOffer;
  });
  for (uint64_t id : pushed) withdraw(id);
}

}  // namespace paceline::wire::shm
