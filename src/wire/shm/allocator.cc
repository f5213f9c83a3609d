#include "wire/shm/allocator.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "base/log.h"
#include "wire/shm/exchange.h"

namespace paceline::wire::shm {
namespace {

constexpr uint64_t kSmallest = 64;
constexpr uint64_t kLeastCapacity = 64ULL * 1024 * 1024;

uint64_t physical_memory() {
  auto pages = ::sysconf(_SC_PHYS_PAGES);
  return pages > 0 ? static_cast<uint64_t>(pages) * page_size() : kLeastCapacity;
}

uint64_t alignment_for(uint64_t bytes) {
  if (bytes >= kHugePage) return kHugePage;
  return bytes >= page_size() ? page_size() : kSmallest;
}

}  // namespace

ShmAllocator::~ShmAllocator() {
  // Their owners give them back as they got them. (What can't be exchanged keeps the shared pages.)
  for (auto& [begin, alias] : aliases_) {
    auto* const pages = reinterpret_cast<std::byte*>(begin);
    if (!exchange_for_private(pages, alias.bytes)) share_with_children(pages, alias.bytes);
  }
  for (auto& [memory, bytes] : private_) std::free(memory);
}

bool ShmAllocator::open() {
  if (opened_) return base_.load(std::memory_order_relaxed) != nullptr;
  opened_ = true;
  uint64_t capacity = options_.capacity != 0 ? options_.capacity : physical_memory();
  capacity = round_up(std::max(capacity, page_size()), page_size());
  // A limit on address space or file size: less is better than nothing.
  for (;; capacity = round_up(capacity / 2, page_size())) {
    auto made = SharedMemory::create(capacity, SharedMemory::Pages::kSparse, options_.sources);
    if (made.is_ok()) {
      memory_ = std::move(made).value();
      break;
    }
    if (capacity / 2 < kLeastCapacity) {
      why_private_ = made.status().message();
      return false;
    }
  }
  if (options_.huge_pages) (void)::madvise(memory_.data(), memory_.size(), MADV_HUGEPAGE);
  insert_free(0, memory_.size());
  size_.store(memory_.size(), std::memory_order_relaxed);
  base_.store(memory_.data(), std::memory_order_release);
  return true;
}

void* ShmAllocator::allocate(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (void* shared = take(bytes)) return shared;
  if (log::first("shm-private-memory")) {
    log::warning("buffers that ranks of this node could share are private memory instead: {}",
                 why_private_);
  }
  const uint64_t size = round_up(std::max(bytes, kSmallest), kSmallest);
  void* memory = std::aligned_alloc(kSmallest, size);
  if (memory != nullptr) private_.emplace(memory, size), in_use_ += size;
  return memory;
}

void* ShmAllocator::allocate_shared(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  return take(bytes);
}

void* ShmAllocator::take(uint64_t bytes) {
  if (!open()) return nullptr;
  if (bytes > memory_.size()) {
    why_private_ = fmt::format("{} bytes are more than the {} set aside", bytes, memory_.size());
    return nullptr;
  }
  bytes = std::max<uint64_t>(bytes, 1);
  bytes = round_up(bytes, bytes >= page_size() ? page_size() : kSmallest);
  const uint64_t alignment = alignment_for(bytes);
  for (auto at = free_by_size_.lower_bound({bytes, 0}); at != free_by_size_.end(); ++at) {
    const auto [size, offset] = *at;
    const uint64_t begin = round_up(offset, alignment);
    if (begin + bytes > offset + size) continue;
    const uint64_t first_page = begin / page_size() * page_size();
    const uint64_t end_page = round_up(begin + bytes, page_size());
    erase_free(offset, size);
    if (begin > offset) insert_free(offset, begin - offset);
    if (offset + size > begin + bytes) insert_free(begin + bytes, offset + size - begin - bytes);
    if (auto status = memory_.reserve(first_page, end_page - first_page); !status.is_ok()) {
      why_private_ = status.message();
      give(begin, bytes);
      return nullptr;
    }
    used_.emplace(begin, bytes);
    in_use_ += bytes;
    return memory_.data() + begin;
  }
  why_private_ = fmt::format("no {} bytes in one piece are left of {}", bytes, memory_.size());
  return nullptr;
}

void ShmAllocator::keep(const void* memory) {
  std::lock_guard lock(mutex_);
  keep_block(place_of(memory, 1));
}

void ShmAllocator::keep_block(std::optional<uint64_t> offset) {
  auto after = offset ? used_.upper_bound(*offset) : used_.begin();
  if (after != used_.begin()) kept_.insert(std::prev(after)->first);
}

Status ShmAllocator::detach(const void* memory, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto offset = place_of(memory, bytes);
  if (!offset) return Status::ok();
  keep_block(offset);
  const auto first = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t end = round_up(first + bytes, page_size());
  for (uintptr_t at = first / page_size() * page_size(); at < end;) {
    // What is private already must not be shown the shared pages again.
    const auto after = detached_.upper_bound(at);
    if (after != detached_.begin() && std::prev(after)->second > at) {
      at = std::prev(after)->second;
      continue;
    }
    const uintptr_t to = after == detached_.end() ? end : std::min(end, after->first);
    PACELINE_RETURN_IF_ERROR(detach_from_shared(reinterpret_cast<std::byte*>(at), to - at,
                                                memory_.fd(), *offset + at - first));
    const std::lock_guard aliases(alias_mutex_);
    detached_.emplace(at, to);
    has_detached_.store(true, std::memory_order_release);
    at = to;
  }
  return Status::ok();
}

bool ShmAllocator::is_detached(uintptr_t at, uint64_t bytes) const {
  if (!has_detached_.load(std::memory_order_acquire)) return false;
  const std::shared_lock lock(alias_mutex_);
  const auto after = detached_.lower_bound(at + bytes);
  return after != detached_.begin() && std::prev(after)->second > at;
}

bool ShmAllocator::free(void* memory) {
  if (memory == nullptr) return true;
  std::lock_guard lock(mutex_);
  if (auto found = private_.find(memory); found != private_.end()) {
    in_use_ -= found->second;
    private_.erase(found);
    std::free(memory);
    return true;
  }
  auto offset = own_offset_of(memory, 1);
  if (!offset) return false;
  if (!used_.contains(*offset)) return false;
  release(*offset);
  return true;
}

void ShmAllocator::release(uint64_t offset) {
  const auto found = used_.find(offset);
  const uint64_t bytes = found->second;
  used_.erase(found);
  in_use_ -= bytes;
  if (!kept_.contains(offset)) give(offset, bytes);
}

Status ShmAllocator::share(void* data, uint64_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(data);
  const auto begin = round_up(first, page_size());
  const auto end = (first + bytes) / page_size() * page_size();
  if (end <= begin)
    return {Code::kInvalidArgument, fmt::format("share: {} bytes hold no whole page", bytes)};
  const std::lock_guard lock(mutex_);
  const auto after = aliases_.lower_bound(end);
  const bool overlaps =
      after != aliases_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > begin;
  if (overlaps || place_of(data, 1))
    return {Code::kInvalidArgument, "share: the memory, or some of it, is shared already"};
  auto* shared = static_cast<std::byte*>(take(end - begin));
  if (shared == nullptr) return {Code::kResourceExhausted, why_private_};
  const auto offset = static_cast<uint64_t>(shared - memory_.data());
  auto status =
      exchange_for_shared(reinterpret_cast<std::byte*>(begin), end - begin, memory_.fd(), offset);
  if (!status) {
    release(offset);
    return status;
  }
  const std::lock_guard aliases(alias_mutex_);
  aliases_.emplace(begin, Alias{end - begin, offset});
  has_aliases_.store(true, std::memory_order_release);
  return Status::ok();
}

Status ShmAllocator::unshare(void* data) {
  const std::lock_guard lock(mutex_);
  const auto found = aliases_.find(round_up(reinterpret_cast<uintptr_t>(data), page_size()));
  if (found == aliases_.end()) return {Code::kInvalidArgument, "unshare: the memory is not shared"};
  PACELINE_RETURN_IF_ERROR(
      exchange_for_private(reinterpret_cast<std::byte*>(found->first), found->second.bytes));
  const uint64_t offset = found->second.offset;
  {
    const std::lock_guard aliases(alias_mutex_);
    detached_.erase(detached_.lower_bound(found->first),
                    detached_.lower_bound(found->first + found->second.bytes));
    aliases_.erase(found);
  }
  release(offset);
  return Status::ok();
}

std::optional<uint64_t> ShmAllocator::alias_of(uintptr_t at, uint64_t bytes) const {
  if (!has_aliases_.load(std::memory_order_acquire)) return std::nullopt;
  const std::shared_lock lock(alias_mutex_);
  auto found = aliases_.upper_bound(at);
  if (found == aliases_.begin()) return std::nullopt;
  --found;
  const uint64_t from = at - found->first;
  const auto& alias = found->second;
  if (from > alias.bytes || bytes > alias.bytes - from) return std::nullopt;
  return alias.offset + from;
}

/// Joins the range with its free neighbours and returns the pages that hold nothing else any more.
void ShmAllocator::give(uint64_t offset, uint64_t bytes) {
  uint64_t begin = offset;
  uint64_t end = offset + bytes;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == end) {
    const uint64_t size = next->second;
    end += size;
    erase_free(offset + bytes, size);
    next = free_.lower_bound(offset);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == begin) {
      const uint64_t from = before->first;
      erase_free(from, before->second);
      begin = from;
    }
  }
  insert_free(begin, end - begin);
  const uint64_t low = std::max(round_up(begin, page_size()), offset / page_size() * page_size());
  const uint64_t high =
      std::min(end / page_size() * page_size(), round_up(offset + bytes, page_size()));
  if (high > low) memory_.release(low, high - low);
}

void ShmAllocator::insert_free(uint64_t offset, uint64_t bytes) {
  free_.emplace(offset, bytes);
  free_by_size_.emplace(bytes, offset);
}

void ShmAllocator::erase_free(uint64_t offset, uint64_t bytes) {
  free_.erase(offset);
  free_by_size_.erase({bytes, offset});
}

std::optional<uint64_t> ShmAllocator::offset_of(const void* data, uint64_t bytes) const {
  if (is_detached(reinterpret_cast<uintptr_t>(data), bytes)) return std::nullopt;
  return place_of(data, bytes);
}

std::optional<uint64_t> ShmAllocator::place_of(const void* data, uint64_t bytes) const {
  if (auto offset = own_offset_of(data, bytes)) return offset;
  return alias_of(reinterpret_cast<uintptr_t>(data), bytes);
}

std::optional<uint64_t> ShmAllocator::own_offset_of(const void* data, uint64_t bytes) const {
  const auto* base = base_.load(std::memory_order_acquire);
  if (base == nullptr) return std::nullopt;
  const auto begin = reinterpret_cast<uintptr_t>(base);
  const auto at = reinterpret_cast<uintptr_t>(data);
  const uint64_t size = size_.load(std::memory_order_relaxed);
  if (at < begin || at - begin > size || bytes > size - (at - begin)) return std::nullopt;
  return at - begin;
}

int ShmAllocator::fd() const {
  std::lock_guard lock(mutex_);
  return memory_.fd();
}

uint64_t ShmAllocator::capacity() const { return size_.load(std::memory_order_acquire); }

uint64_t ShmAllocator::bytes_in_use() const {
  std::lock_guard lock(mutex_);
  return in_use_;
}

std::string ShmAllocator::describe() const {
  std::lock_guard lock(mutex_);
  if (memory_.size() != 0) return memory_.source();
  return opened_ ? "private memory (" + why_private_ + ")" : "not used yet";
}

}  // namespace paceline::wire::shm
