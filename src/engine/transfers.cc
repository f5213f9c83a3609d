// Messages from rank to rank, matched by peer, tag and order.
#include <fmt/format.h>

#include "engine/engine_impl.h"

namespace paceline::engine {

Result<OpId> EngineImpl::send(const Transfer& t, Time now) { return transfer(t, true, now); }
Result<OpId> EngineImpl::receive(const Transfer& t, Time now) { return transfer(t, false, now); }

Result<OpId> EngineImpl::transfer(const Transfer& t, bool sending, Time now) {
  if (!failure_) return failure_;
  if (finishing_) return Status(Code::kAborted, "the communicator is being destroyed");
  Group* g = group(t.group);
  if (g == nullptr)
    return Status(Code::kInvalidArgument, fmt::format("there is no group {}", t.group));
  auto title =
      fmt::format("{}{}", sending ? "send" : "receive", t.name.empty() ? "" : " '" + t.name + "'");
  if (t.peer < 0 || t.peer >= static_cast<Rank>(g->ranks.size()) || t.peer == g->me) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: peer {} is not another rank of the group (0 to {}, without {})",
                              title, t.peer, g->ranks.size() - 1, g->me));
  }
  if (t.data == nullptr && t.bytes > 0)
    return Status(Code::kInvalidArgument, fmt::format("{}: the buffer is null", title));
  auto slot = take_record();
  Record& r = *records_[slot];
  r.id = ++generation_ << 24 | slot;
  r.transfer = true;
  r.send_counts.clear();  // of the all-to-all that had this record before
  r.receive_counts.clear();
  r.sending = sending;
  r.group = t.group;
  auto from = sending ? g->me : t.peer;
  auto to = sending ? t.peer : g->me;
  auto stream = mix(mix(mix(g->stream, 0x7472616e73666572ULL),
                        static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to)),
                    t.tag);
  r.key = {stream, transfer_sequences_[stream]++};
  r.description = {};
  r.description.kind = Description::kTransfer;
  r.description.count = t.any_length ? Description::kAnyLength : t.bytes;
  r.any_length = t.any_length;
  (sending ? r.description.pair_send : r.description.pair_receive) = 1;
  r.description.name = shortened(t.name, Description::kTextLimit);
  r.description.shape = shortened(t.shape, Description::kTextLimit);
  r.digest = digest_of(r.description);
  r.timeout = t.timeout > 0 ? t.timeout : options_.default_timeout;
  r.peer = g->ranks[static_cast<std::size_t>(t.peer)];
  r.input_bytes = sending ? t.bytes : 0;
  r.output_bytes = t.bytes;
  begin(r, now);
  r.state = Record::State::kRunning;
  active_.push_back(slot);
  auto tag = tag_of(r.key);
  auto cookie = static_cast<uint64_t>(slot) << 32;
  auto* data = static_cast<std::byte*>(t.data);
  if (sending) {
    channel_.send(r.peer, tag, r.digest, {data, t.bytes}, cookie);
  } else {
    channel_.receive(r.peer, tag, r.digest, {data, nullptr, t.bytes}, cookie);
  }
  return r.id;
}

}  // namespace paceline::engine
