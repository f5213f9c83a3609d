// Whatever a peer writes into the shared ring, this side must end the conversation or go on, and
// touch no memory but its own. The input is a list of records (any header, any payload), written by
// the rules of the ring; the first byte says how this side stands, the last bytes overwrite the
// ring and its head.
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "wire/shm/conversation.h"
#include "wire/shm/handshake.h"
#include "wire/shm/packet.h"

namespace {

using namespace paceline;
using namespace paceline::wire;
using namespace paceline::wire::shm;

/// Half of every input is spent on plausible values, so that ids and sizes often hit.
RecordHeader header_from(const uint8_t* bytes) {
  RecordHeader header;
  std::memcpy(&header, bytes, sizeof(header));
  header.type = static_cast<RecordType>(bytes[4] % 10);
  if (bytes[0] % 2 == 0) {
    header.tag %= 8;
    header.id %= 8;
    header.digest %= 16;
    header.length %= 300'000;
    header.offset %= 200'000;
    if (bytes[1] % 2 == 0) header.offset -= header.offset % 64;
    header.where %= 300'000;
    header.flag = static_cast<OfferFlag>(bytes[12] % 5);
  }
  return header;
}

class Echo final : public Sink {
 public:
  void consume(uint64_t /*offset*/, std::span<const std::byte> /*data*/) override {}
  bool consume_and_answer(uint64_t /*offset*/, std::span<const std::byte> data,
                          std::byte* place) override {
    std::memmove(place, data.data(), data.size());
    return true;
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  constexpr uint64_t kCapacity = 64 * 1024;
  Shared shared;
  shared.options.allocator = std::make_shared<ShmAllocator>(AllocatorOptions{1 << 20, false, {}});
  shared.options.eager_limit = 256;
  shared.scratch.resize(shared.options.chunk_bytes);
  LinkParts parts;
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, sockets) != 0) return 0;
  Fd far(sockets[1]);
  parts.socket = Fd(sockets[0]);
  parts.bell = Fd(::eventfd(0, EFD_NONBLOCK));
  auto memory = SharedMemory::create(segment_bytes(kCapacity), SharedMemory::Pages::kReserve, {});
  if (!memory.is_ok()) return 0;
  auto* page = reinterpret_cast<Page*>(memory->data());
  std::byte* ring = memory->data() + kPageBytes;
  parts.memory = std::move(memory).value();
  parts.ring_bytes = kCapacity;
  parts.side = 1;
  parts.no_vm_read = "fuzzing";
  RingWriter writer(ring, kCapacity, &page->side[0], &page->side[1]);

  Conversation conversation(0, "rank 0 (host fuzz)", shared);
  conversation.attach(std::make_unique<Link>(std::move(parts)));
  std::vector<std::byte> buffer(300'000);
  for (uint64_t tag = 0; tag < 4; ++tag) {
    conversation.receive(tag, 0, {buffer.data(), nullptr, buffer.size()}, tag);
    Answer answer;
    if (tag == 2) answer.place = buffer.data();
    conversation.send(tag, 0, std::span(buffer).first(tag % 2 == 0 ? 200'000 : 100), 10 + tag,
                      answer);
  }
  // One that answers, and one to where an answer may lie.
  Echo echo;
  conversation.receive(4, 0, {nullptr, &echo, buffer.size()}, 4);
  auto* place = static_cast<std::byte*>(shared.options.allocator->allocate(100'000));
  conversation.receive(5, 0, {place, nullptr, 100'000}, 5);
  if (data[0] % 4 == 3)
    conversation.abort(Status(Code::kAborted, "fuzz")),
        shared.aborted = Status(Code::kAborted, "fuzz");
  if (data[0] % 4 == 2) {
    (void)shared.options.allocator->allocate(4096);
    const int fds[1] = {shared.options.allocator->fd()};
    auto arena = encode(Arena{data[1] % 2 == 0 ? 1 << 20 : ~uint64_t{0}});
    (void)send_packet(far.get(), arena, fds);
  }
  std::size_t at = 2;
  Status status;
  bool moved = false;
  while (at + sizeof(RecordHeader) + 1 <= size && status.is_ok()) {
    const auto header = header_from(data + at);
    const std::size_t want = data[at + sizeof(RecordHeader)] * 3;
    at += sizeof(RecordHeader) + 1;
    const auto payload = std::min(want, size - at);
    (void)writer.write(header, std::as_bytes(std::span(data + at, payload)));
    at += payload;
    status = conversation.exchange(moved);
    if (status.is_ok()) (void)conversation.transfer(status);
  }
  if (status.is_ok()) {
    // And once without any rule.
    std::memcpy(ring, data, std::min<std::size_t>(size, kCapacity));
    page->side[0].head.store(page->side[0].head.load() + data[1] * 32);
    status = conversation.exchange(moved);
  }
  conversation.end(Status(Code::kPeerLost, "fuzz"));
  return 0;
}
