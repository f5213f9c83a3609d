#include "gpu/node_page.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "gpu/deal.h"

namespace paceline::gpu {
namespace {

// A word has two cache lines of its own, as processors fetch them in pairs. The first two hold the page's secret.
constexpr uint64_t kWordRoom = 128;
constexpr size_t kSecretBytes = 16;

struct Ticket {
  int64_t process = 0;
  int64_t descriptor = -1;
  std::array<char, kSecretBytes> secret{};
};
static_assert(sizeof(Ticket) == NodePage::kTicketBytes);

/// Pages that were made in this process, by their secrets. Ranks that are threads use one mapping: tools that watch over threads
/// know memory by its address.
struct OwnPages {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<SharedMemory>> made;
};
OwnPages& own_pages() {
  static OwnPages pages;
  return pages;
}

std::string secret_of(const SharedMemory& memory) {
  return {reinterpret_cast<const char*>(memory.data()), kSecretBytes};
}

/// Two rooms a rank: how far it is, and what it has to send, which is written more often than it is read.
uint64_t bytes_for(int ranks) { return (1 + 2 * static_cast<uint64_t>(ranks)) * kWordRoom; }
static_assert(kMostWires * sizeof(uint64_t) <= kWordRoom);

}  // namespace

Result<NodePage> NodePage::make(int ranks) {
  PACELINE_ASSIGN(auto memory,
                  SharedMemory::create(bytes_for(ranks), SharedMemory::Pages::kReserve, {}));
  if (getrandom(memory.data(), kSecretBytes, 0) != static_cast<ssize_t>(kSecretBytes))
    return Status(Code::kUnavailable, fmt::format("no random bytes: {}", std::strerror(errno)));
  auto shared = std::make_shared<SharedMemory>(std::move(memory));
  auto& own = own_pages();
  const std::lock_guard lock(own.mutex);
  std::erase_if(own.made, [](const auto& page) { return page.second.expired(); });
  own.made[secret_of(*shared)] = shared;
  return NodePage(std::move(shared), ranks);
}

std::string NodePage::ticket() const {
  Ticket t;
  t.process = getpid();
  t.descriptor = memory_->fd();
  std::memcpy(t.secret.data(), memory_->data(), kSecretBytes);
  return {reinterpret_cast<const char*>(&t), sizeof t};
}

// A number of a process means something else in another container: the secret tells.
Result<NodePage> NodePage::open(std::string_view ticket, int ranks) {
  Ticket t;
  if (ticket.size() != sizeof t)
    return Status(Code::kUnavailable, "the node's page: a ticket of another length");
  std::memcpy(&t, ticket.data(), sizeof t);
  if (t.process == getpid()) {
    auto& own = own_pages();
    const std::lock_guard lock(own.mutex);
    const auto found = own.made.find(std::string(t.secret.data(), kSecretBytes));
    auto shared = found == own.made.end() ? nullptr : found->second.lock();
    if (shared && shared->size() >= bytes_for(ranks)) return NodePage(std::move(shared), ranks);
  }
  const auto path = fmt::format("/proc/{}/fd/{}", t.process, t.descriptor);
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd)
    return Status(Code::kUnavailable,
                  fmt::format("the node's page: {}: {}", path, std::strerror(errno)));
  auto memory = SharedMemory::adopt(std::move(fd), bytes_for(ranks), true);
  if (!memory || secret_of(*memory) != std::string(t.secret.data(), kSecretBytes))
    return Status(Code::kUnavailable,
                  fmt::format("the node's page: {} is something else: another container's process "
                              "has made it",
                              path));
  memory->close_fd();
  return NodePage(std::make_shared<SharedMemory>(std::move(*memory)), ranks);
}

uint64_t* NodePage::word(int rank, For what) const {
  return reinterpret_cast<uint64_t*>(memory_->data() +
                                     (1 + static_cast<uint64_t>(rank)) * kWordRoom) +
         static_cast<size_t>(what);
}

uint64_t* NodePage::waiting_word(int rank, int wire) const {
  return reinterpret_cast<uint64_t*>(
             memory_->data() +
             (1 + static_cast<uint64_t>(ranks_) + static_cast<uint64_t>(rank)) * kWordRoom) +
         wire;
}

// A word is 1 more than the bytes: 0 is a page's beginning.
void NodePage::put_waiting(int rank, int wire, uint64_t bytes) {
  __atomic_store_n(waiting_word(rank, wire), bytes + 1, __ATOMIC_RELAXED);
}

std::optional<uint64_t> NodePage::waiting(int rank, int wire) const {
  const uint64_t word = __atomic_load_n(waiting_word(rank, wire), __ATOMIC_RELAXED);
  return word == 0 ? std::nullopt : std::optional(word - 1);
}

void NodePage::put(int rank, For what, uint64_t sequence) {
  __atomic_store_n(word(rank, what), sequence, __ATOMIC_RELEASE);
}

uint64_t NodePage::through(For what) const {
  uint64_t least = UINT64_MAX;
  for (int r = 0; r < ranks_; ++r)
    least = std::min(least, __atomic_load_n(word(r, what), __ATOMIC_ACQUIRE));
  return least;
}

}  // namespace paceline::gpu
