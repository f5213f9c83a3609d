#include "codec/residual_store.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <unordered_set>
#include <utility>

#include "device/cpu/float_mode.h"

namespace paceline::codec {
namespace {

constexpr int kPlanes = 3;
/// From here on memory comes from the kernel in large pages where it offers them.
constexpr std::size_t kMappedBytes = std::size_t{2} << 20;

/// Zero-filled floats.
class Plane {
 public:
  Plane() = default;
  Plane(const Plane&) = delete;
  Plane& operator=(const Plane&) = delete;
  ~Plane() { release(); }

  bool allocate(uint64_t elements) {
    bytes_ = elements * sizeof(float);
    if (bytes_ < kMappedBytes) {
      data_ = static_cast<float*>(std::calloc(elements, sizeof(float)));
      return data_ != nullptr;
    }
    void* mapped =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return false;
    madvise(mapped, bytes_, MADV_HUGEPAGE);  // a wish: without it the pages are small
    data_ = static_cast<float*>(mapped);
    return true;
  }
  void release() {
    if (data_ == nullptr) return;
    if (bytes_ < kMappedBytes)
      std::free(data_);
    else
      munmap(data_, bytes_);
    data_ = nullptr;
  }
  [[nodiscard]] float* data() const { return data_; }

 private:
  float* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace

/// The memory that was taken at once: two planes, rarely three. Pieces that were split off share
/// it.
class ResidualStore::Slab {
 public:
  Slab(uint64_t elements, uint64_t& bytes) : elements_(elements), bytes_(bytes) {}
  ~Slab() {
    for (int i = 0; i < kPlanes; ++i) release(i);
  }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  bool ensure(int plane) {
    if (planes_[plane].data() != nullptr) return true;
    if (!planes_[plane].allocate(elements_)) return false;
    bytes_ += elements_ * sizeof(float);
    return true;
  }
  void release(int plane) {
    if (planes_[plane].data() == nullptr) return;
    planes_[plane].release();
    bytes_ -= elements_ * sizeof(float);
  }
  [[nodiscard]] float* data(int plane) const { return planes_[plane].data(); }
  [[nodiscard]] uint64_t elements() const { return elements_; }

 private:
  uint64_t elements_;
  uint64_t& bytes_;
  Plane planes_[kPlanes];
};

/// A stretch of one parameter. `committed` is the plane that holds the value of the last step,
/// `latest` the one that this step wrote last; they are the same where this step has written
/// nothing.
struct ResidualStore::Piece {
  std::shared_ptr<Slab> slab;
  uint64_t base = 0;  ///< first element within the slab
  uint64_t elements = 0;
  int committed = 0;
  int latest = 0;
  bool leaves = false;  ///< it is in this step's gradient, and gone with its commit

  [[nodiscard]] float* at(int plane) const { return slab->data(plane) + base; }
  [[nodiscard]] bool written() const { return latest != committed; }
  /// The plane that the next encoding writes: neither the value to return to nor the one it reads.
  [[nodiscard]] int next() const {
    int plane = 0;
    while (plane == committed || plane == latest) ++plane;
    return plane;
  }
};

ResidualStore::ResidualStore() = default;
ResidualStore::~ResidualStore() = default;

void ResidualStore::split_at(Pieces& pieces, uint64_t element) {
  auto above = pieces.upper_bound(element);
  if (above == pieces.begin()) return;
  auto& [begin, piece] = *std::prev(above);
  if (begin == element || element >= begin + piece.elements) return;
  Piece tail = piece;
  const uint64_t head = element - begin;
  tail.base += head;
  tail.elements -= head;
  piece.elements = head;
  pieces.emplace_hint(above, element, std::move(tail));
}

Status ResidualStore::add_piece(uint64_t key, Pieces& pieces, uint64_t begin, uint64_t end) {
  auto slab = std::make_shared<Slab>(end - begin, bytes_);
  if (!slab->ensure(0))
    return {Code::kResourceExhausted, fmt::format("no memory for the residual of parameter {}, "
                                                  "elements {} to {} ({} bytes): top-k needs twice "
                                                  "the size of what a rank encodes",
                                                  key, begin, end, (end - begin) * sizeof(float))};
  pieces.emplace(begin, Piece{std::move(slab), 0, end - begin});
  return Status::ok();
}

/// Makes [begin, end) consist of whole pieces.
Status ResidualStore::cover(uint64_t key, Pieces& pieces, uint64_t begin, uint64_t end) {
  split_at(pieces, begin);
  split_at(pieces, end);
  uint64_t at = begin;
  auto next = pieces.lower_bound(begin);
  while (at < end) {
    const uint64_t gap_end = next == pieces.end() ? end : std::min(end, next->first);
    if (gap_end > at) PACELINE_RETURN_IF_ERROR(add_piece(key, pieces, at, gap_end));
    if (next == pieces.end() || next->first >= end) break;
    at = next->first + next->second.elements;
    ++next;
  }
  return Status::ok();
}

/// Appends the pieces of `range`, with all the memory that an encoding of them needs.
Status ResidualStore::gather(const ResidualRange& range, std::vector<Piece*>& found) {
  auto& pieces = parameters_[range.key];
  const uint64_t end = range.offset + range.elements;
  for (auto it = pieces.lower_bound(range.offset); it != pieces.end() && it->first < end; ++it) {
    Piece& piece = it->second;
    const auto ensure_next = [&] { return piece.slab->ensure(piece.next()); };
    bool has_memory = ensure_next();
    if (has_memory && piece.leaves) {  // nothing is left of it, unless the step is taken back
      std::fill_n(piece.at(piece.next()), piece.elements, 0.0F);
      piece.latest = piece.next();
      piece.leaves = false;
      has_memory = ensure_next();
    }
    if (!has_memory)
      return {Code::kResourceExhausted,
              fmt::format("no memory for the residual of parameter {} ({} bytes more)", range.key,
                          piece.elements * sizeof(float))};
    found.push_back(&piece);
  }
  return Status::ok();
}

namespace {

Status check_disjoint(std::vector<ResidualRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
    return std::pair(a.key, a.offset) < std::pair(b.key, b.offset);
  });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    const auto& last = ranges[i - 1];
    if (last.key == ranges[i].key && last.offset + last.elements > ranges[i].offset)
      return {Code::kInvalidArgument, fmt::format("element {} of parameter {} comes twice in one "
                                                  "bucket: give every parameter its own key",
                                                  ranges[i].offset, ranges[i].key)};
  }
  return Status::ok();
}

}  // namespace

Status ResidualStore::runs(std::span<const ResidualRange> ranges, uint64_t first, uint64_t elements,
                           std::vector<ResidualRun>& out) {
  std::vector<ResidualRange> wanted;
  uint64_t begin = 0;
  uint64_t missing = elements;
  for (const auto& range : ranges) {
    const uint64_t skip = first > begin ? std::min(first - begin, range.elements) : 0;
    const uint64_t take = std::min(range.elements - skip, missing);
    if (take > 0) wanted.push_back({range.key, range.offset + skip, take});
    missing -= take;
    begin += range.elements;
  }
  if (missing > 0)
    return {Code::kInvalidArgument,
            fmt::format("the segments of a top-k operation hold {} elements, but elements {} to {} "
                        "are needed: segments must cover the buffer",
                        begin, first, first + elements)};
  PACELINE_RETURN_IF_ERROR(check_disjoint(wanted));
  std::vector<Piece*> found;
  for (const auto& range : wanted)
    PACELINE_RETURN_IF_ERROR(
        cover(range.key, parameters_[range.key], range.offset, range.offset + range.elements));
  for (const auto& range : wanted) PACELINE_RETURN_IF_ERROR(gather(range, found));
  const std::size_t start = out.size();
  for (Piece* piece : found) {
    const int next = piece->next();
    const ResidualRun run{piece->at(piece->latest), piece->at(next), piece->elements};
    chained_ = chained_ || next == kPlanes - 1;
    piece->latest = next;
    if (out.size() > start) {  // neighbours in memory become one run
      ResidualRun& last = out.back();
      if (last.before + last.elements == run.before && last.after + last.elements == run.after) {
        last.elements += run.elements;
        continue;
      }
    }
    out.push_back(run);
  }
  return Status::ok();
}

namespace {

/// Reached through a pointer, so that the arithmetic stays where the floating-point mode is set.
[[gnu::noinline]] void add(float* to, const float* from, uint64_t elements) {
  for (uint64_t i = 0; i < elements; ++i) to[i] += from[i];
}

}  // namespace

void ResidualStore::hand_over(std::span<const ResidualRange> ranges,
                              std::span<const std::pair<uint64_t, uint64_t>> own, float* gradient) {
  if (parameters_.empty()) return;
  const cpu::FloatMode mode;
  uint64_t first = 0;  // of the range, in the buffer
  for (const auto& range : ranges) {
    const uint64_t last = first + range.elements;
    if (auto found = parameters_.find(range.key); found != parameters_.end()) {
      uint64_t at = first;
      const auto give = [&](uint64_t until) {
        if (at < until)
          hand_over(found->second, range.offset + (at - first), range.offset + (until - first),
                    gradient + at);
      };
      for (const auto& [begin, end] : own) {
        if (end <= at) continue;
        if (begin >= last) break;
        give(begin);
        at = end;
      }
      give(last);
    }
    first = last;
  }
}

void ResidualStore::hand_over(Pieces& pieces, uint64_t begin, uint64_t end, float* gradient) {
  split_at(pieces, begin);
  split_at(pieces, end);
  for (auto it = pieces.lower_bound(begin); it != pieces.end() && it->first < end; ++it) {
    Piece& piece = it->second;
    if (piece.leaves || piece.written()) continue;
    add(gradient + (it->first - begin), piece.at(piece.committed), piece.elements);
    piece.leaves = true;
  }
}

void ResidualStore::commit(Pieces& pieces) {
  const auto left = std::erase_if(pieces, [](const auto& entry) { return entry.second.leaves; });
  for (auto& [begin, piece] : pieces) piece.committed = piece.latest;
  if (left > 0) compact(pieces);
}

/// After a step's commit: of slabs that have lost a part, what is left moves out. Without memory for that it stays.
void ResidualStore::compact(Pieces& pieces) {
  std::unordered_map<Slab*, uint64_t> used;
  for (const auto& [begin, piece] : pieces) used[piece.slab.get()] += piece.elements;
  const auto moves = [&](const Piece& piece) {
    return used[piece.slab.get()] < piece.slab->elements();
  };
  for (auto first = pieces.begin(); first != pieces.end();) {
    if (!moves(first->second)) {
      ++first;
      continue;
    }
    auto last = first;
    uint64_t elements = 0;
    for (; last != pieces.end() && last->first == first->first + elements && moves(last->second);
         ++last)
      elements += last->second.elements;
    auto slab = std::make_shared<Slab>(elements, bytes_);
    if (!slab->ensure(0)) return;
    for (auto it = first; it != last; ++it)
      std::memcpy(slab->data(0) + (it->first - first->first), it->second.at(it->second.committed),
                  it->second.elements * sizeof(float));
    first->second = Piece{std::move(slab), 0, elements};
    first = pieces.erase(std::next(first), last);
  }
}

void ResidualStore::rollback(Pieces& pieces) {
  for (auto& [begin, piece] : pieces) {
    piece.latest = piece.committed;
    piece.leaves = false;
  }
}

void ResidualStore::commit() {
  for (auto& [key, pieces] : parameters_) commit(pieces);
  std::erase_if(parameters_, [](const auto& parameter) { return parameter.second.empty(); });
  if (chained_) release_third_planes();
}

void ResidualStore::commit(std::span<const uint64_t> keys) {
  for (const uint64_t key : keys) {
    const auto found = parameters_.find(key);
    if (found == parameters_.end()) continue;
    commit(found->second);
    if (found->second.empty()) parameters_.erase(found);
  }
  if (chained_) release_third_planes();
}

void ResidualStore::rollback() {
  for (auto& [key, pieces] : parameters_) rollback(pieces);
  if (chained_) release_third_planes();
}

void ResidualStore::rollback(std::span<const uint64_t> keys) {
  for (const uint64_t key : keys)
    if (const auto found = parameters_.find(key); found != parameters_.end())
      rollback(found->second);
  if (chained_) release_third_planes();
}

/// Frees the third planes that hold neither a current value nor one of a step under way. The others stay until a later
/// step has moved their values.
void ResidualStore::release_third_planes() {
  std::unordered_set<Slab*> slabs;
  std::unordered_set<Slab*> needed;
  for (auto& [key, pieces] : parameters_)
    for (auto& [begin, piece] : pieces) {
      slabs.insert(piece.slab.get());
      if (piece.committed == kPlanes - 1 || piece.latest == kPlanes - 1)
        needed.insert(piece.slab.get());
    }
  for (Slab* slab : slabs)
    if (!needed.contains(slab)) slab->release(kPlanes - 1);
  chained_ = !needed.empty();
}

namespace {

/// Reached through a pointer, so that the arithmetic stays where the floating-point mode is set.
[[gnu::noinline]] void multiply(float* data, uint64_t elements, double factor) {
  constexpr double kMost = std::numeric_limits<float>::max();
  for (uint64_t i = 0; i < elements; ++i)
    data[i] = static_cast<float>(std::clamp(data[i] * factor, -kMost, kMost));
}

}  // namespace

Status ResidualStore::scale(double factor) {
  if (!std::isfinite(factor) || factor <= 0)
    return {Code::kInvalidArgument,
            fmt::format("residuals can't be scaled by {}: a change of loss scale from a to b "
                        "is the finite, positive factor b / a",
                        factor)};
  const cpu::FloatMode mode;
  for (auto& [key, pieces] : parameters_)
    for (auto& [begin, piece] : pieces) {
      multiply(piece.at(piece.committed), piece.elements, factor);
      if (piece.written()) multiply(piece.at(piece.latest), piece.elements, factor);
    }
  return Status::ok();
}

Status ResidualStore::read(uint64_t key, std::span<float> data) const {
  std::fill(data.begin(), data.end(), 0.0F);
  const auto found = parameters_.find(key);
  if (found == parameters_.end()) return Status::ok();
  for (const auto& [begin, piece] : found->second) {
    if (begin + piece.elements > data.size())
      return {Code::kInvalidArgument, fmt::format("the residual of parameter {} has elements up to "
                                                  "{}, the buffer for it {}: its shape changed",
                                                  key, begin + piece.elements, data.size())};
    std::memcpy(data.data() + begin, piece.at(piece.committed), piece.elements * sizeof(float));
  }
  return Status::ok();
}

Status ResidualStore::write(uint64_t key, std::span<const float> data) {
  const auto found = parameters_.find(key);
  if (found != parameters_.end()) {
    for (const auto& [begin, piece] : found->second) {
      if (begin + piece.elements > data.size() && !data.empty())
        return {
            Code::kInvalidArgument,
            fmt::format("the residual of parameter {} has elements up to {}, those to load {}: its "
                        "shape changed",
                        key, begin + piece.elements, data.size())};
      if (piece.written() || piece.leaves)
        return {Code::kInvalidArgument,
                fmt::format("the residual of parameter {} can't be loaded in the middle of a step: "
                            "commit or roll back first",
                            key)};
    }
  }
  if (data.empty()) {
    parameters_.erase(key);
    return Status::ok();
  }
  const auto bad =
      std::find_if(data.begin(), data.end(), [](float value) { return !std::isfinite(value); });
  if (bad != data.end())
    return {Code::kInvalidArgument, fmt::format("element {} of parameter {} has a residual of {}, "
                                                "which would make every step to come one that is "
                                                "lost: load one that is finite, or none",
                                                bad - data.begin(), key, *bad)};
  return overwrite(key, parameters_[key], data);
}

Status ResidualStore::overwrite(uint64_t key, Pieces& pieces, std::span<const float> data) {
  // Memory for what isn't zero and has none, then all values: an error leaves the old ones.
  std::vector<std::pair<uint64_t, uint64_t>> gaps;
  uint64_t at = 0;
  for (const auto& [begin, piece] : pieces) {
    gaps.emplace_back(at, begin);
    at = begin + piece.elements;
  }
  gaps.emplace_back(at, data.size());
  for (auto [begin, end] : gaps) {
    while (begin < end && data[begin] == 0) ++begin;
    while (begin < end && data[end - 1] == 0) --end;
    if (begin < end) PACELINE_RETURN_IF_ERROR(add_piece(key, pieces, begin, end));
  }
  for (auto& [begin, piece] : pieces)
    std::memcpy(piece.at(piece.committed), data.data() + begin, piece.elements * sizeof(float));
  return Status::ok();
}

ResidualStore::Statistics ResidualStore::statistics() const {
  Statistics s;
  s.bytes = bytes_;
  s.parameters = parameters_.size();
  for (const auto& [key, pieces] : parameters_) {
    s.pieces += pieces.size();
    for (const auto& [begin, piece] : pieces) s.elements += piece.elements;
  }
  return s;
}

}  // namespace paceline::codec
