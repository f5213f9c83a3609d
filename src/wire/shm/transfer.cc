// How the bytes of an offered message move: read by the receiver, or pushed piece by piece at its
// request. Pieces in slots of the arena can bring back what the receiver makes of them.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "wire/shm/conversation.h"

namespace paceline::wire::shm {

uint64_t Conversation::transfer(Status& status) {
  uint64_t pulled = pulls_.empty() ? 0 : read_together();
  if (pulled == 0 && !pulls_.empty()) pulled = step_pull(status);
  if (!status.is_ok()) return pulled;
  return pulled + (copies_.empty() ? 0 : step_copy());
}

// ---- receiving

void Conversation::start_pull(const RecordHeader& offer, const Posted& posted) {
  Pull pull{Way::kPieces, offer, posted};
  if (offer.in_arena != 0 && shared_.options.use_arena) {
    // The announcement left before the offer did, so it is there by now.
    if (!link_->has_arena()) (void)link_->read_socket();
    if (!link_->arena(offer.where, offer.length).empty()) pull.way = Way::kArena;
    if (pull.way == Way::kArena && offer.flag == OfferFlag::kAnswerHere &&
        posted.inbox.sink != nullptr) {
      pull.answer = link_->arena_to_write(offer.offset, offer.length);
    }
  }
  if (pull.way == Way::kArena && posted.inbox.hold) return hold(offer, posted);
  if (offer.flag == OfferFlag::kAnswerInPieces && offer.in_arena == 0 &&
      shared_.options.use_arena && posted.inbox.sink != nullptr) {
    if (!link_->has_arena()) (void)link_->read_socket();
    if (link_->has_arena()) return ask_for_pieces(pull);
  }
  if (pull.way == Way::kPieces && link_->can_read_memory()) pull.way = Way::kMemory;
  if (pull.way == Way::kPieces) return ask_for_pieces(pull);
  pulls_.push_back(pull);
}

void Conversation::hold(const RecordHeader& offer, const Posted& posted) {
  held_.emplace(offer.id, Held{offer});
  complete(posted.cookie, offer.length, Status::ok(), 0, offer.id);
}

std::span<const std::byte> Conversation::open_held(uint64_t held) {
  auto found = held_.find(held);
  if (found == held_.end()) return {};  // this side's conversation has ended
  if (open_ == 0 && !link_->begin_access()) return {};
  ++open_;
  found->second.open = true;
  return link_->arena(found->second.offer.where, found->second.offer.length);
}

bool Conversation::close_held(uint64_t held) {
  auto found = held_.find(held);
  if (found == held_.end()) return false;
  const Held closed = found->second;
  held_.erase(found);
  if (closed.open && --open_ == 0) link_->end_access();
  RecordHeader answer;
  answer.type = RecordType::kTaken;
  answer.id = closed.offer.id;
  const bool lent = link_->still_lent();
  if (lent) {
    shared_.counters.payload_received += closed.offer.length;
    shared_.counters.wire_received += closed.offer.length;
    shared_.counters.held += closed.offer.length;
  } else {
    answer.digest = static_cast<uint32_t>(Code::kAborted);
  }
  post(answer);
  return lent;
}

void Conversation::ask_for_pieces(Pull pull) {
  pull.way = Way::kPieces;
  piecewise_.emplace(pull.offer.id, pull);
  ask_for_pieces_of(pull);
}

void Conversation::ask_for_pieces_of(const Pull& pull) {
  RecordHeader header;
  header.type = RecordType::kPull;
  header.id = pull.offer.id;
  header.offset = pull.done;
  header.in_arena = shared_.options.use_arena && !link_->arena_failed() ? 1 : 0;
  post(header);
}

uint64_t Conversation::step_pull(Status& status) {
  auto& pull = pulls_.front();
  const uint64_t bytes = std::min(shared_.options.chunk_bytes, pull.offer.length - pull.done);
  const uint64_t got = read_chunk(pull, bytes, status);
  if (got == 0) return 0;
  pull.done += got;
  if (pull.done == pull.offer.length) {
    // A process number can be given to another process: what was read counts only if the peer
    // lives.
    if (pull.way == Way::kMemory && !link_->alive()) {
      status = {Code::kPeerLost, fmt::format("{} is gone: its process ended", name_)};
      return got;
    }
    const Pull finished = pull;
    pulls_.pop_front();
    finish_pull(finished);
  }
  return got;
}

/// Returns 0 where the pull goes another way or was taken back, or the peer is gone.
uint64_t Conversation::read_chunk(Pull& pull, uint64_t bytes, Status& status) {
  if (pull.way == Way::kArena) {
    if (read_in_place(pull, bytes)) return bytes;
    const Pull revoked = pull;
    pulls_.pop_front();
    finish_pull(revoked);
    return 0;
  }
  const bool direct = pull.posted.inbox.sink == nullptr;
  std::byte* into = direct ? pull.posted.inbox.into + pull.done : shared_.scratch.data();
  const int error = link_->read_memory(pull.offer.spare + pull.done, into, bytes);
  if (error == 0) {
    if (!direct) deliver(pull, pull.done, {into, bytes});
    return bytes;
  }
  if (error == ESRCH) {
    status = {Code::kPeerLost, fmt::format("{} is gone: its process ended", name_)};
    return 0;
  }
  if (error != EFAULT) link_->forbid_read_memory(std::strerror(error));
  const Pull other = pull;
  pulls_.pop_front();
  if (!link_->still_lent()) {
    finish_pull(other);
  } else {
    ask_for_pieces(other);  // memory of a kind that can't be read from outside
  }
  return 0;
}

void Conversation::deliver(const Pull& pull, uint64_t at, std::span<const std::byte> data) {
  if (pull.posted.inbox.sink != nullptr) {
    pull.posted.inbox.sink->consume(at, data);
  } else {
    std::memcpy(pull.posted.inbox.into + at, data.data(), data.size());
  }
}

/// False: the peer has taken the message back, its memory may be gone.
bool Conversation::read_in_place(Pull& pull, uint64_t bytes) {
  if (!link_->begin_access()) return false;
  if (!read_part(pull, pull.done, bytes)) pull.answer = nullptr;
  link_->end_access();
  return true;
}

/// Several threads may be at a message. False: no answer was written, the later message brings it.
bool Conversation::read_part(const Pull& pull, uint64_t from, uint64_t bytes) const {
  const auto data = link_->arena(pull.offer.where + from, bytes);
  if (pull.answer != nullptr)
    return pull.posted.inbox.sink->consume_and_answer(from, data, pull.answer + from);
  deliver(pull, from, data);
  return false;
}

void Conversation::finish_pull(const Pull& pull) {
  RecordHeader answer;
  answer.type = RecordType::kTaken;
  answer.id = pull.offer.id;
  if (link_->still_lent()) {
    shared_.counters.payload_received += pull.offer.length;
    shared_.counters.wire_received += pull.way == Way::kPieces ? 0 : pull.offer.length;
    uint64_t answered = pull.answer != nullptr ? pull.offer.offset + 1 : 0;
    if (pull.answered == pull.offer.length) answered = kInPieces | (pull.offer.id + 1);
    complete(pull.posted.cookie, pull.offer.length, Status::ok(), answered);
  } else {
    answer.digest = static_cast<uint32_t>(Code::kAborted);
    complete(pull.posted.cookie, 0,
             {Code::kAborted, fmt::format("{} aborted while its message was read (tag {:#x})",
                                          name_, pull.offer.tag)});
  }
  post(answer);
}

bool Conversation::on_piece(const RingReader::Record& record) {
  const auto& header = record.header;
  auto data = record.payload;
  if (header.in_arena != 0) {
    if (!link_->has_arena()) (void)link_->read_socket();
    if (link_->arena_failed()) return ask_past_arena(header);
    if (!link_->begin_access()) return true;  // it was taken back: kWithdrawn follows
    data = link_->arena(header.where, header.length);
  }
  bool answered = false;
  const bool used = !data.empty() && use_piece(header, data, answered);
  if (header.in_arena != 0) link_->end_access();
  if (!used) return false;
  if (header.in_arena != 0) {
    RecordHeader answer;
    answer.type = RecordType::kFreed;
    answer.where = header.where;
    if (answered) answer.flag = OfferFlag::kAnswered;
    post(answer);  // before the end of the message, with which its sender has all answers
  }
  finish_pieces(header.id);
  return true;
}

/// The peer's slots can't be read here: it is asked, once, to send what it has put there through the ring.
bool Conversation::ask_past_arena(const RecordHeader& piece) {
  auto found = piecewise_.find(piece.id);
  if (found == piecewise_.end()) return !shared_.aborted.is_ok();
  RecordHeader answer;
  answer.type = RecordType::kFreed;
  answer.where = piece.where;
  post(answer);
  if (piece.offset == found->second.done) ask_for_pieces_of(found->second);
  return true;
}

bool Conversation::use_piece(const RecordHeader& header, std::span<const std::byte> data,
                             bool& answered) {
  auto found = piecewise_.find(header.id);
  if (found == piecewise_.end()) return !shared_.aborted.is_ok();
  auto& pull = found->second;
  const uint64_t rest = pull.offer.length - pull.done;
  if (header.offset != pull.done || data.size() > rest ||
      (data.size() != rest && data.size() % kPieceAlign != 0)) {
    return false;
  }
  if (pull.offer.flag == OfferFlag::kAnswerInPieces && header.in_arena != 0 &&
      pull.posted.inbox.sink != nullptr && pull.answered == pull.done) {
    answered = pull.posted.inbox.sink->consume_and_answer(
        pull.done, data, link_->arena_to_write(header.where, header.length));
    if (answered) pull.answered += data.size();
  } else {
    deliver(pull, pull.done, data);
  }
  pull.done += data.size();
  return true;
}

/// Of message `id`, if all of it has come.
void Conversation::finish_pieces(uint64_t id) {
  const auto found = piecewise_.find(id);
  if (found == piecewise_.end() || found->second.done < found->second.offer.length) return;
  const Pull finished = found->second;
  piecewise_.erase(found);
  finish_pull(finished);
}

bool Conversation::on_withdrawn(const RecordHeader& header) {
  auto found = piecewise_.find(header.id);
  // The last piece may have been taken before its sender heard of that and aborted.
  if (found == piecewise_.end()) return !shared_.aborted.is_ok() || !link_->still_lent();
  // Its abort came before this record did, so finish_pull() finds the message taken back.
  if (link_->still_lent()) return false;
  const Pull pull = found->second;
  piecewise_.erase(found);
  finish_pull(pull);
  return true;
}

// ---- sending

void Conversation::withdraw(uint64_t id) {
  RecordHeader header;
  header.type = RecordType::kWithdrawn;
  header.id = id;
  post(header);
}

bool Conversation::on_pull(const RecordHeader& header) {
  auto found = lent_.find(header.id);
  if (found == lent_.end()) {
    if (!shared_.aborted.is_ok()) withdraw(header.id);
    return !shared_.aborted.is_ok();
  }
  auto& lent = found->second;
  const bool in_arena = header.in_arena != 0 && shared_.options.use_arena;
  if (header.offset >= lent.data.size() || header.offset % kPieceAlign != 0) return false;
  if (lent.copying == Copying::kToRing || (lent.copying == Copying::kToArena && in_arena))
    return false;
  if (lent.copying == Copying::kToArena)  // it could not map the arena
    std::erase_if(copies_, [&](const Copy& copy) { return copy.id == header.id; });
  lent.copying = in_arena ? Copying::kToArena : Copying::kToRing;
  copies_.push_back({header.id, header.offset, in_arena});
  return true;
}

/// False: there is no shared memory for them.
bool Conversation::make_slots() {
  if (!slots_tried_) {
    slots_tried_ = true;
    auto& arena = *shared_.options.allocator;
    for (uint32_t i = 0; i < shared_.options.slots; ++i) {
      void* memory = arena.allocate_shared(shared_.options.slot_bytes);
      if (memory != nullptr) slots_.push_back({static_cast<std::byte*>(memory)});
    }
    if (!slots_.empty() && !link_->announce(arena)) release_slots();
  }
  return !slots_.empty();
}

Conversation::Slot* Conversation::free_slot() {
  (void)make_slots();
  for (auto& slot : slots_) {
    if (!slot.busy) return &slot;
  }
  return nullptr;
}

void Conversation::release_slots() {
  for (auto& slot : slots_) shared_.options.allocator->free(slot.data);
  slots_.clear();
}

uint64_t Conversation::step_copy() {
  auto& copy = copies_.front();
  const auto data = lent_.at(copy.id).data.subspan(copy.offset);
  RecordHeader header;
  header.type = RecordType::kPiece;
  header.id = copy.id;
  header.offset = copy.offset;
  uint64_t bytes = 0;
  Slot* slot = copy.in_arena ? free_slot() : nullptr;
  if (slot != nullptr) {
    if (!link_->may_write(0)) return 0;
    bytes = std::min<uint64_t>(data.size(), shared_.options.slot_bytes);
    std::memcpy(slot->data, data.data(), bytes);
    *slot = {slot->data, true, copy.id, copy.offset, bytes};
    header.in_arena = 1;
    header.length = bytes;
    header.where = *shared_.options.allocator->offset_of(slot->data, bytes);
    (void)link_->write(header, {});
  } else {
    if (copy.in_arena && !slots_.empty()) return 0;  // a slot will come back
    bytes = std::min<uint64_t>(data.size(), link_->payload_limit() / 2 / kPieceAlign * kPieceAlign);
    if (!link_->may_write(bytes)) return 0;
    (void)link_->write(header, data.first(bytes));
  }
  shared_.counters.wire_sent += sizeof(RecordHeader) + bytes;
  copy.offset += bytes;
  if (bytes == data.size()) copies_.pop_front();
  return bytes;
}

bool Conversation::on_freed(const RecordHeader& header) {
  for (auto& slot : slots_) {
    auto offset = shared_.options.allocator->offset_of(slot.data, 1);
    if (slot.busy && offset && *offset == header.where) {
      slot.busy = false;
      return header.flag != OfferFlag::kAnswered || take_answer(slot);
    }
  }
  return false;
}

/// False: none was asked for. What comes after the message was taken back is dropped.
bool Conversation::take_answer(const Slot& slot) {
  const auto found = lent_.find(slot.id);
  if (found == lent_.end()) return !shared_.aborted.is_ok();
  auto& lent = found->second;
  if (lent.answer == nullptr || lent.answered != slot.offset) return false;
  std::memcpy(lent.answer + slot.offset, slot.data, slot.bytes);
  lent.answered += slot.bytes;
  return true;
}

}  // namespace paceline::wire::shm
