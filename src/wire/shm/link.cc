#include "wire/shm/link.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "base/close_in_children.h"
#include "base/log.h"
#include "wire/shm/handshake.h"
#include "wire/shm/packet.h"
#include "wire/shm/vm_read.h"

namespace paceline::wire::shm {

Link::Link(LinkParts parts)
    : parts_(std::move(parts)), page_(reinterpret_cast<Page*>(parts_.memory.data())) {
  std::byte* rings[2] = {parts_.memory.data() + kPageBytes,
                         parts_.memory.data() + kPageBytes + parts_.ring_bytes};
  writer_ = RingWriter(rings[parts_.side], parts_.ring_bytes, &mine(), &theirs());
  reader_ = RingReader(rings[1 - parts_.side], parts_.ring_bytes, &mine(), &theirs());
  // Or its end would not come while such a child lives, and the peer hear of this rank's at a deadline.
  close_in_children(parts_.socket.get());
}

Link::~Link() { keep_in_children(parts_.socket.get()); }

bool Link::write(const RecordHeader& header, std::span<const std::byte> payload) {
  if (!writer_.write(header, payload)) return false;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_peer();
  return true;
}

void Link::pop() {
  reader_.pop();
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (theirs().starved.load(std::memory_order_relaxed) != 0) wake_peer();
}

void Link::wake_peer() {
  auto& asleep = theirs().asleep;
  if (asleep.load(std::memory_order_relaxed) == 0 || asleep.exchange(0) == 0) return;
  const uint64_t one = 1;
  // A full counter rings as well.
  while (::write(parts_.bell.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void Link::return_credit(uint64_t bytes) {
  auto& taken = mine().eager_taken;
  taken.store(taken.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
}

uint64_t Link::credit_returned() const {
  return theirs().eager_taken.load(std::memory_order_relaxed);
}

void Link::fall_asleep(bool starved) {
  mine().starved.store(starved ? 1 : 0, std::memory_order_relaxed);
  mine().asleep.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Link::stay_awake() {
  mine().asleep.store(0, std::memory_order_relaxed);
  mine().starved.store(0, std::memory_order_relaxed);
}

void Link::revoke() {
  mine().aborted.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool Link::still_lent() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return theirs().aborted.load(std::memory_order_relaxed) == 0;
}

bool Link::alive() const {
  pollfd watched[2] = {{parts_.socket.get(), POLLRDHUP, 0}, {parts_.pidfd.get(), POLLIN, 0}};
  return ::poll(watched, parts_.pidfd ? 2 : 1, 0) <= 0;
}

bool Link::announce(const ShmAllocator& arena) {
  if (announced_) return true;
  const int fd = arena.fd();
  if (fd < 0) return false;
  const int fds[1] = {fd};
  auto bytes = encode(Arena{arena.capacity()});
  announced_ = send_packet(parts_.socket.get(), bytes, fds) == PacketState::kOk;
  return announced_;
}

bool Link::read_socket() {
  Packet packet;
  for (;;) {
    auto state = receive_packet(parts_.socket.get(), packet);
    if (state != PacketState::kOk) return state == PacketState::kAgain;
    auto message = decode(packet.bytes);
    if (!message.is_ok() || !std::holds_alternative<Arena>(*message) || packet.fds.size() > 1 ||
        has_arena() || arena_failed_) {
      return false;
    }
    adopt_arena(packet.fds.empty() ? Fd() : std::move(packet.fds[0]),
                std::get<Arena>(*message).bytes);
  }
}

void Link::adopt_arena(Fd fd, uint64_t bytes) {
  auto mapped = fd ? SharedMemory::adopt(std::move(fd), bytes, true)
                   : Status(Code::kResourceExhausted,
                            "this process has no file descriptor left for them (ulimit -n)");
  arena_failed_ = !mapped.is_ok();
  if (arena_failed_) {
    if (log::first("shm-arena")) {
      log::warning("a peer's shared buffers can't be mapped, they are copied instead: {}",
                   mapped.status().message());
    }
    return;
  }
  arena_ = std::move(mapped).value();
  arena_.close_fd();
}

std::span<const std::byte> Link::arena(uint64_t offset, uint64_t bytes) const {
  if (offset > arena_.size() || bytes > arena_.size() - offset) return {};
  return {arena_.data() + offset, bytes};
}

std::byte* Link::arena_to_write(uint64_t offset, uint64_t bytes) const {
  return arena(offset, bytes).empty() ? nullptr : arena_.data() + offset;
}

bool Link::begin_access() {
  mine().at_work.store(1, std::memory_order_relaxed);
  if (still_lent()) return true;
  end_access();
  return false;
}

void Link::end_access() { mine().at_work.store(0, std::memory_order_release); }

bool Link::await_access() const {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (theirs().at_work.load(std::memory_order_acquire) != 0) {
    if (!alive()) return true;
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

int Link::read_memory(uint64_t address, void* into, std::size_t bytes) const {
  return vm_read(parts_.pid, address, into, bytes);
}

}  // namespace paceline::wire::shm
